"""The page in a real browser (Debian's Chromium): every view, by keyboard, narrow and wide, light and dark,
with a server that is lost; no error on the console, no serious fault found by axe-core.
"""

import shutil
import threading
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("plotly")
sync_api = pytest.importorskip("playwright.sync_api")
uvicorn = pytest.importorskip("uvicorn")

import meshwise as mw  # noqa: E402
from data_tables import DATA, GLOO4, TRACES, table  # noqa: E402
from meshwise.calibrate.runs import published_runs  # noqa: E402
from meshwise.web import app  # noqa: E402
from meshwise.web.app import make_app  # noqa: E402
from meshwise.web.views import Server  # noqa: E402

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium is installed (apt-get install chromium)", allow_module_level=True)
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 380, "height": 800}
VIEWS = table("pages")["views"]


class Running:
    """A server in a thread, which can be stopped and started again at its address."""

    def __init__(self, port: int = 0) -> None:
        state = Server(TRACES)
        self.drop = state.drop
        self.server = uvicorn.Server(uvicorn.Config(make_app(state), port=port, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def few_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    few = tmp_path_factory.mktemp("runs") / "runs.csv"
    few.write_text("\n".join(published_runs().read_text().splitlines()[:12]))
    return few


@pytest.fixture(scope="module")
def server(few_runs: Path) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwise.web.views._validated", lambda: mw.validate([few_runs]))
        running = Running()
        yield running
        running.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def tab(browser: Any, server: Running) -> Iterator[Any]:
    """One tab for all tests, because the first page of a tab costs three times the next."""
    home = f"http://127.0.0.1:{server.port}"
    context = browser.new_context(base_url=home)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    found = listened_to(context.new_page())
    own = (f"{home}/", "data:", "blob:")
    found.on("request", lambda request: request.url.startswith(own) or found.problems.append(request.url))
    yield found
    context.close()


def listened_to(page: Any) -> Any:
    """`page`, with a list of the `problems` that its console tells."""
    page.problems = []
    page.on(
        "console", lambda message: message.type in ("error", "warning") and page.problems.append(message.text)
    )
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    return page


@pytest.fixture
def page(tab: Any) -> Iterator[Any]:
    """A page that fails its test for any error on the console, and for any request to elsewhere."""
    tab.problems.clear()
    tab.set_viewport_size(WIDE)
    tab.emulate_media(color_scheme="light", reduced_motion="no-preference")
    yield tab
    tab.evaluate("localStorage.clear()")
    tab.goto("about:blank")
    assert not tab.problems


def show(page: Any, view: str, query: str = "") -> str:
    """Open a view; its headline."""
    page.goto(f"/#{view}?v=1&{query or VIEWS[view]}")
    return settled(page)


def until(page: Any, truth: str) -> None:
    """Wait until `truth` holds (Playwright's own waiting needs eval, which the page forbids)."""
    look = f"const look = () => {truth} ? done(true) : Date.now() > end ? done(false) : setTimeout(look, 20);"
    waited = f"new Promise((done) => {{ const end = Date.now() + 120000; {look} look(); }})"
    assert page.evaluate(waited), truth


def settled(page: Any) -> str:
    until(page, "document.querySelector('#page').ariaBusy !== 'true'")
    until(page, "!!document.querySelector('#headline').textContent")
    return str(page.inner_text("#headline"))


ALIKE = """(() => {
  const seen = new Set();
  for (const row of document.querySelectorAll("tbody tr")) {
    const markup = row.outerHTML.replace(/>[^<]*</g, "><");
    if (seen.has(markup)) row.remove();
    seen.add(markup);
  }
})()"""
"""Leaves one row of those that differ in their text alone, in which axe-core would find the same."""


def faults(page: Any) -> list[str]:
    """What axe-core finds that is serious or critical in what is shown."""
    axe = (resources.files("axe_playwright_python") / "axe.min.js").read_text()
    page.evaluate(f"{ALIKE}; {axe}\n;0")
    found = page.evaluate("axe.run({exclude: 'form[hidden]'}, {resultTypes: ['violations']})")["violations"]
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in found if one["impact"] in ("serious", "critical") for node in one["nodes"]
    ]  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_every_view(page: Any, view: str) -> None:
    """As it opens by itself, with something useful in it; without traces that is where they are dropped."""
    pytest.importorskip("axe_playwright_python")
    page.goto(f"/#{view}")
    assert settled(page) and page.locator("#headline.error, #headline.no").count() == 0
    assert page.locator("#page .chart, #page .drop").count() > 0
    if view in ("traces", "rl"):
        show(page, view)
    page.wait_for_selector(".chart .main-svg")
    assert page.locator(f'nav a[href="#{view}"]').get_attribute("aria-current") == "page"
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for scheme, size in (("light", WIDE), ("dark", NARROW)):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size(size)
        if size is NARROW:
            page.click("#drawer")
        page.locator("form:not([hidden]) .field").last.scroll_into_view_if_needed()
        assert page.evaluate(f"{ANSWER}.top") >= 0 and page.evaluate(f"{ANSWER}.bottom <= innerHeight")
        assert faults(page) == []
        assert runs_over(page) <= 0
        until(page, f"{APART} && {FIT}")  # no number of an axis lies on the next
    assert view != "serve" or page.locator(".xtick", has_text="ms").count() > 0
    assert page.evaluate(f"{PINNED}.every((cell) => cell.querySelector('a'))")


ANSWER = "document.querySelector('#headline').getBoundingClientRect()"
APART = """[...document.querySelectorAll(".chart")].every((chart) => [...chart.querySelectorAll("g.xtick")]
  .map((text) => text.getBoundingClientRect()).sort((one, other) => one.left - other.left)
  .every((box, i, all) => !i || box.left >= all[i - 1].right))"""

FIT = """[...document.querySelectorAll(".chart:has(.main-svg)")].every((chart) =>
  chart.querySelector(".main-svg").clientWidth === chart.clientWidth
  && chart._fullLayout.xaxis._length > chart.clientWidth / 5)"""
PINNED = """[...document.querySelectorAll("td + td:last-child")]
  .filter((cell) => getComputedStyle(cell).position === "sticky")"""


def runs_over(page: Any) -> float:
    """By how many pixels the page is wider than its window."""
    return float(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def test_the_colors_of_a_chart_are_those_of_the_page(page: Any) -> None:
    show(page, "explore")
    ink = "getComputedStyle(document.querySelector('.chart .ytick text')).fill"
    colors = []
    for _ in range(3):
        page.click("#theme")
        colors.append((page.inner_text("#theme"), page.evaluate(ink)))
        assert page.evaluate("getComputedStyle(document.body).color") == colors[-1][1]
        assert "e9e9e9" not in str(page.evaluate("charts().map((one) => JSON.stringify(one.data))"))
    assert [name for name, _ in colors] == ["Theme: light", "Theme: dark", "Theme: system"]
    assert colors[0][1] != colors[1][1]


def test_a_change_is_priced_and_a_link_holds_all_of_it(page: Any) -> None:
    before = show(page, "explore")
    page.locator("summary", has_text="Data: Time of a step").click()
    page.evaluate("document.querySelectorAll('#page *').forEach((one) => { one.was = true; })")
    rows = "document.querySelector('#page details[open] tbody').textContent"
    told = page.evaluate(rows)
    page.select_option("#explore-tp", "4")
    until(page, f"document.querySelector('#headline').textContent !== {before!r}")
    after = settled(page)
    until(page, "!due.size")  # the charts out of view too
    kept = page.evaluate("[...document.querySelectorAll('.chart')].map((one) => one.was)")
    assert kept == [True] * 4 and page.locator(".chart > .plot-container").count() == 4
    assert page.evaluate(rows) != told and "plan=tp%3D4" in page.url
    page.reload()
    assert settled(page) == after
    page.click("[data-act=link]")
    assert page.evaluate("navigator.clipboard.readText()") == page.url
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { configurable: true })")  # as with --host
    page.click("[data-act=command]")
    page.wait_for_selector("text=command copied")
    page.evaluate("delete navigator.clipboard")
    assert page.evaluate("navigator.clipboard.readText()").startswith("meshwise estimate llama3-8b")


@pytest.mark.parametrize(("view", "query", "told"), table("pages")["links"])
def test_a_link_is_answered_whole_or_refused(page: Any, view: str, query: str, told: str) -> None:
    assert told in show(page, view, f"model=llama3-8b&cluster=h100-80g-sxm:64&batch=256&seq=4096&{query}")
    assert query.partition("=")[0] in page.url
    page.reload()
    assert told in settled(page)
    if page.locator("#headline.error").count():
        page.fill(f"#{view}-batch", "128")
        page.keyboard.press("Tab")
        page.wait_for_selector("#headline:not(.error)")


def test_an_old_answer_is_dimmed_until_the_next(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), app.answer

    def slow(view: str, state: Any, server: Server, hear: Any = lambda so_far: None) -> Any:
        hear("1,234,567 plans priced; so far tp=8, 3 s")
        go.wait(60)
        return real(view, state, server, hear)

    def opacity() -> float:
        return float(page.evaluate("getComputedStyle(document.querySelector('#page')).opacity"))

    before = show(page, "serve")
    assert opacity() == 1
    monkeypatch.setattr(app, "answer", slow)
    for rate, act in (("6", "cancel"), ("7", "")):
        page.fill("#serve-rate", rate)
        page.keyboard.press("Tab")
        until(page, "document.querySelector('#progress').textContent.includes('so far tp=8, 3 s')")
        assert opacity() < 1 and page.locator("#page h2").first.is_visible()
        if act:
            page.click(f"[data-act={act}]")
            assert settled(page).startswith("Stopped.") and opacity() < 1
            go.set()
    assert settled(page) not in (before, "") and opacity() == 1 and not page.locator("#progress").is_visible()


def test_by_keyboard_alone(page: Any) -> None:
    before = show(page, "explore")
    keyboard = page.keyboard
    keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "results"
    reach(page, "nav a", "Shift+Tab")
    reach(page, "#explore-tp", "Tab")
    keyboard.press("ArrowDown")
    until(page, f"document.querySelector('#headline').textContent !== {before!r}")
    settled(page)
    for act in ("pin", "launch"):
        reach(page, f"[data-act={act}]", "Tab")
        keyboard.press("Enter")
    page.wait_for_selector("#launch[open]")
    keyboard.press("Escape")
    assert not page.locator("#launch").is_visible()
    assert page.evaluate("document.activeElement.dataset.act") == "launch"
    assert "A: tp=" in page.inner_text("#page")
    page.locator("summary", has_text="Data: Time of a step").first.focus()
    keyboard.press("Enter")
    assert page.locator("details[open] table").first.is_visible()


def reach(page: Any, wanted: str, key: str) -> None:
    """Press `key` until the focus is on `wanted`."""
    for _ in range(120):
        if page.evaluate("(wanted) => document.activeElement.matches(wanted)", wanted):
            return
        page.keyboard.press(key)
    raise AssertionError(f"{wanted} cannot be reached with {key}")


def test_a_plan_that_is_none_and_a_bad_config_are_told(page: Any) -> None:
    good = show(page, "explore")
    page.fill("#explore-batch", "7")
    assert "batch" in settled(page) and page.locator("#headline.error").is_visible()
    assert page.evaluate("document.querySelector('#page').inert")
    page.fill("#explore-batch", "1e")
    until(page, "document.querySelector('#headline').textContent.includes('batch=1e must be a number')")
    assert page.locator(".bad input").get_attribute("name") == "batch"
    page.fill("#explore-batch", "32")
    page.wait_for_selector("#headline:not(.error)")
    assert settled(page) == good and not page.evaluate("document.querySelector('#page').inert")
    page.locator("#form-explore summary", has_text="Your own model").click()
    page.fill("#explore-config", '{"model_type": <script>alert(1)</script>')
    page.wait_for_selector("#headline.error")
    assert "config.json is not valid JSON" in settled(page)
    assert page.locator(".bad textarea").get_attribute("name") == "config"
    page.fill("#explore-config", (DATA / "tiny_llama.json").read_text())
    page.fill("#explore-seq", "64")
    page.wait_for_selector("#headline:not(.error)")


def test_an_edited_machine_is_compared_with_what_was_pinned(page: Any) -> None:
    before = show(page, "explore")
    page.click("[data-act=pin]")
    with page.expect_download() as saved:
        page.click("[data-act=save]")
    assert saved.value.suggested_filename == "llama3-8b-h100-80g-sxm-16-tp-2-pp-4.html"
    page.click("[data-act=machine]")
    until(page, "document.querySelector('#explore-machine').value.includes('memory_bytes_per_s')")
    text = page.input_value("#explore-machine")
    page.fill("#explore-machine", text.replace("num_chips = 16", "num_chips = 32"))
    until(page, f"document.querySelector('#headline').textContent !== {before!r}")
    assert f"than A ({before.partition(' a step')[0]})" in page.inner_text("#page")
    until(page, "document.querySelector('#explore-pp option[disabled]')?.text.includes(' - ')")


def test_a_plan_of_the_search_opens_beside_the_best(page: Any) -> None:
    show(page, "search")
    page.locator("#page td a").nth(1).click()
    page.wait_for_selector("text=B - A >> visible=false", state="attached")
    assert page.url.count("a.plan=") == 1 and "#explore" in page.url
    assert "than A" in page.inner_text("#page")
    page.go_back()
    settled(page)
    mark = page.locator(".chart .scatterlayer .trace").last.locator("path.point").first
    mark.click(force=True)
    until(page, "location.hash.startsWith('#explore')")
    settled(page)


@pytest.mark.parametrize("how", ["dropped", "chosen"])
def test_a_folder_of_traces_goes_to_the_server(page: Any, server: Running, how: str, tmp_path: Path) -> None:
    """With its subfolders, from elsewhere than `--traces`; the next one takes its place."""
    show(page, "traces", "steps=")
    for name in ("first", "second"):
        shutil.copytree(GLOO4, tmp_path / name / "job" / "ranks")
        (tmp_path / name / "notes.txt").write_text("no trace")
        before = page.input_value("#traces-path")
        if how == "dropped":
            drop_on(page, "#results", tmp_path / name)
        else:
            page.set_input_files("[data-folder=traces-path]", tmp_path / name)
        until(page, f"document.querySelector('#traces-path').value !== {before!r}")
        page.wait_for_selector("#headline:not(.error)")
        assert "rank 3" in settled(page).lower()
        kept = Path(page.evaluate("document.querySelector('#traces-path').value"))
        held = server.drop.folder(str(kept))
        sent = (file for ending in ("*.json", "*.json.gz") for file in (GLOO4).rglob(ending))
        files = (file for file in held.rglob("*") if file.is_file())
        assert sorted(file.name for file in files) == sorted(file.name for file in sent)
    page.reload()
    assert "rank 3" in settled(page).lower()
    page.goto(f"/#traces?v=1&path={before}")
    page.wait_for_selector("#headline.error")
    assert "drop it again" in page.inner_text("#headline")


def drop_on(page: Any, selector: str, folder: Path) -> None:
    """Drop a folder on an element, as a person does from a window of files."""
    box = page.locator(selector).bounding_box()
    devtools = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(folder)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        at = {"x": box["x"] + 5, "y": box["y"] + 5}
        devtools.send("Input.dispatchDragEvent", {"type": kind, "data": data, **at})


def test_a_lost_server_is_told_and_found_again(browser: Any) -> None:
    running = Running()
    page = browser.new_page(base_url=f"http://127.0.0.1:{running.port}")
    found = show(page, "explore")
    running.stop()
    page.select_option("#explore-tp", "4")
    page.wait_for_selector("[role=alert]:visible")
    assert "does not answer" in page.inner_text("[role=alert]")
    again = Running(running.port)
    page.wait_for_selector("[role=alert]", state="hidden", timeout=15_000)
    assert settled(page) != found
    page.close()
    again.stop()


@pytest.fixture(scope="module")
def offline(browser: Any) -> Iterator[Any]:
    """A page without a network."""
    context = browser.new_context(offline=True)
    yield listened_to(context.new_page())
    context.close()


@pytest.mark.parametrize("words", table("pages")["reports"])
def test_a_report_needs_no_network_and_no_server(
    offline: Any, meshwise: Any, tmp_path: Path, words: str
) -> None:
    """`--html`, narrow and wide, light and dark."""
    path = tmp_path / "report.html"
    done = meshwise(*words.replace("TRACES", str(GLOO4)).split(), "--html", str(path))
    assert done.code == 0, done.err
    offline.problems.clear()
    for scheme, size in (("light", WIDE), ("dark", NARROW)):
        offline.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        offline.set_viewport_size(size)
        offline.goto(path.as_uri())
        offline.wait_for_selector(".chart .main-svg")
        assert offline.locator(".chart .main-svg").count() >= offline.locator(".chart").count()
        assert offline.locator("[data-title*='loud']").count() == 0  # nothing would send it to a cloud
        assert runs_over(offline) <= 0
    assert faults(offline) == [] and offline.problems == []

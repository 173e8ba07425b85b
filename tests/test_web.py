"""The server of the page: every view answers, other sites and strangers do not get in, nothing is ignored."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any

import pytest

from data_tables import DATA, TRACES, table

pytest.importorskip("starlette")
pytest.importorskip("httpx2")
pytest.importorskip("plotly")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

import meshwise as mw
from meshwise.calibrate.runs import published_runs
from meshwise.plan.plan import KEYS
from meshwise.web.app import SLOTS, make_app
from meshwise.web.views import VIEWS, Server, answer, options

WRONG = table("wrong_inputs")

JOB = {"model": "llama3-8b", "cluster": "h100-80g-sxm:16", "batch": "32", "seq": "4096"}
CONFIG = (DATA / "tiny_llama.json").read_text()


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(make_app(Server(TRACES)), base_url="http://127.0.0.1") as found:
        yield found


def ask(client: TestClient, view: str, **state: str) -> Any:
    return client.post(f"/api/{view}", json=state).json()


def html(found: Any) -> str:
    return "".join(found["sections"])


def test_explore_says_what_the_command_line_says(client: TestClient, meshwise: Any) -> None:
    found = ask(client, "explore", **JOB, plan="tp=4,pp=2")
    expected = mw.estimate("llama3-8b", "h100-80g-sxm:16", "tp=4,pp=2", batch=32, seq=4096)
    priced = ask(client, "explore", **JOB, plan="tp=4,pp=2", price="2")
    assert "a million tokens" in html(priced) and "--price 2" in priced["command"]
    assert "mw.budget(price='2').run(found)" in priced["python"]
    own = ask(client, "explore", **JOB | {"batch": "16", "seq": "64"}, config=CONFIG)
    assert "estimate config.json" in own["command"] and own["needs"].endswith("as config.json")
    drawn = ask(client, "explore", model="flux.1-dev", cluster="h100:1", kind="sampling", guidance="yes")
    assert meshwise(*drawn["command"].split()[1:]).code == 0 and " a sampling (" in drawn["headline"]
    assert found["ok"] and f"{expected.memory_bytes['total'] / 1e9:.4g} GB" in found["headline"]
    words = found["command"].split()
    done = meshwise(*words[1:], "--json")
    assert json.loads(done.out)["step_s"] == expected.step_s
    names: dict[str, Any] = {}
    exec(found["python"], names)
    assert names["found"].step_s == expected.step_s


def test_a_name_of_the_catalog_is_no_folder(client: TestClient, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("llama3-8b", "Qwen/Qwen2.5-0.5B", "h100-80g-sxm:16", "mine"):
        (tmp_path / folder).mkdir(parents=True)
    told = {"llama3-8b": "a step", "Qwen/Qwen2.5-0.5B": "a step", "mine,like=llama": "is a path"}
    for model, words in told.items():
        found = ask(client, "explore", **JOB | {"model": model})
        assert words in (found.get("headline") or found["error"])


def test_a_pipeline_of_many_microbatches_is_drawn_with_fewer(client: TestClient) -> None:
    job = {"model": "gpt3-175b", "cluster": "a100-80g-sxm:512", "seq": "2048"}
    few = html(ask(client, "ops", **job, plan="pp=16", batch="2048"))
    many = html(ask(client, "ops", **job, plan="tp=8,pp=16,vpp=2", batch="1536"))
    assert "Roofline" in few and "Pipeline over time: 1f1b</h2>" in few
    assert "Pipeline over time: interleaved with 32 of its 384 microbatches</h2>" in many


A = {f"a.{name}": text for name, text in JOB.items()}


def test_what_is_pinned_stays_while_model_machine_and_batch_are_edited(client: TestClient) -> None:
    """Pasted and edited ones replace the presets of B alone; what differs is named, on a saved page too."""
    machine = ask(client, "machine", **JOB)["text"].replace("memory_bytes = 8", "memory_bytes = 7", 1)
    pinned = f">{ask(client, 'explore', **JOB)['headline'].partition(' a step')[0]}<"
    own = JOB | {"model": "no-such-model", "config": CONFIG, "seq": "64"}
    for state, differs in ((JOB | {"machine": machine}, "memory_bytes = 7"), (own, "parallel, config")):
        found = ask(client, "explore", **state, **A)
        assert pinned in html(found) and differs in html(found)
        assert ("cluster.toml" if "machine" in state else "config.json") in found["command"]
    twice = JOB | A | {"batch": "64"}
    assert "more than A" in html(ask(client, "explore", **twice))
    assert "B: data parallel, batch 64" in ask(client, "save", **twice)["text"]
    lines = ask(client, "launch", **JOB | {"model": "llama3-405b"})["lines"]
    assert lines[0].startswith("as written: ") and lines[0].endswith("does not fit")


def test_a_search_keeps_the_job_in_its_links_and_says_why_nothing_fits(client: TestClient) -> None:
    job = {"model": "qwen2-vl-2b", "cluster": "h100-80g-sxm:8", "batch": "8", "seq": "4096"}
    of_images = {"images": "1", "image_size": "448x448", "plan": "tp=1,pp=1,cp=1,zero=1"}
    links = html(ask(client, "search", **job, **of_images, robust="yes"))
    assert "&amp;images=1&amp;image_size=448x448&amp;" in links and "a.images=1" in links
    assert '"name":"most robust"' in links and '"text":"robust step"' in links
    none = ask(client, "search", **JOB | {"model": "llama3-405b", "cluster": "h100-80g-sxm:8"})
    assert none["headline"].startswith("none fits: ") and "\n" not in none["headline"]
    assert "<li>fits" in html(none) and "0 fit in" in html(none) and "not tried: " in html(none)
    assert "(capped=no, or KEY=*)" in html(none) and "Notes" not in html(none)


def test_what_is_grey_is_refused_and_what_is_not_is_priced(client: TestClient) -> None:
    options = ask(client, "options", **JOB, plan="tp=2")["options"]
    assert {"tp", "pp", "zero", "dtype", "schedule", "recompute"} <= options.keys() <= KEYS.keys()
    refused = 0
    for key in ("tp", "pp", "vpp", "schedule", "zero_group", "dtype"):
        for value, reason in options[key]:
            plan = f"{key}={value}" if key == "tp" else f"tp=2,{key}={value}"
            found = ask(client, "explore", **JOB, plan=plan)
            assert found.get("error", "") == reason, plan
            refused += bool(reason)
    assert refused > 5


def test_the_other_views_answer(client: TestClient) -> None:
    where = {"model": "llama3-8b", "cluster": "h100-80g-sxm:8"}
    served = ask(client, "serve", **where, prompt="512", output="64", rate="5", price="2")
    shown = ("Latency under load", "a million tokens", "Pareto front of all layouts")
    assert all(words in html(served) for words in shown)
    sized = ask(client, "serve", **where, rate="5", ttft_ms="500", token_ms="25", price="2")
    assert sized["headline"].startswith("1 GPU holds 5 requests/s: ") and "GPU holds" not in html(sized)
    assert "best of each chip" in html(sized) and "headroom: " in html(sized)
    full = ask(client, "serve", **where, rate="4000")
    assert full["headline"].startswith("the queue grows without end: ") and "grows" not in html(full)
    alone = ask(client, "serve", **where, prompt="512", output="1", rate="5")["headline"]
    assert alone.startswith("first token after") and "a token after it" not in alone
    never = ask(client, "serve", **where, rate="5", token_ms="0.0001")
    assert never["headline"].startswith("no layout of this cluster fits and keeps") and not never["ok"]
    for rate, said in (("", "not even one sequence alone keeps"), ("5", "0.0% of the requests within 1 ms")):
        late = ask(client, "serve", **where, plan="tp=8", token_ms="1", rate=rate)
        assert late["headline"].startswith(said) and not late["ok"]
    slow = ask(client, "frontier", chip="h100-80g-sxm", beside="a100-80g-sxm", schedule="zero-bubble")
    assert "a100-80g-sxm" in slow["title"] and "; on a100-80g-sxm: plateau" in slow["headline"]
    assert "Rank 3" in ask(client, "traces", path="gloo4")["headline"]
    other = ask(client, "traces", path="gloo4", **where, batch="8")
    assert "The traces are of CPUs" in html(other) and "From the predicted step" not in html(other)


def test_slow_questions_stand_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def answer(view: str, state: Any, server: Server, hear: Any) -> Any:
        hear("7 plans")
        return go.wait(60) and {"title": "found"}

    monkeypatch.setattr("meshwise.web.app.answer", answer)
    monkeypatch.setattr("meshwise.web.app.MOST_WAITING", 2)
    with TestClient(make_app(), base_url="http://127.0.0.1") as client, ThreadPoolExecutor(9) as threads:

        def progress(question: str) -> Any:
            return client.get(f"/api/progress/{question}").json()

        def search(question: str) -> Any:
            return client.post("/api/search", json={}, headers={"question": question}).json()

        asked = []
        for i in range(SLOTS + 2):
            asked.append(threads.submit(search, f"q{i}"))
            expected = {"before": i * (i >= SLOTS), "so_far": "7 plans" if i < SLOTS else ""}
            while progress(f"q{i}") != expected or len(client.app.state.pool._jobs) != i + 1:
                time.sleep(0.01)
        assert "2 questions wait for an answer already" in search("one more")["error"]
        go.set()
        assert [one.result() for one in asked] == [{"title": "found"}] * (SLOTS + 2)
    assert progress("q0") == {"before": 0, "so_far": ""}


@pytest.mark.parametrize(
    "job", ["search batch=8", "serve rate=5", "frontier", "rl prompts=8 samples=4 output=64"]
)
def test_what_nobody_waits_for_ends(job: str) -> None:
    view, *asked = job.split()
    where = {"chip": "h100-80g-sxm"} if view == "frontier" else {"model": "llama3-8b", "cluster": "h100:8"}
    with pytest.raises(ZeroDivisionError):
        answer(view, where | dict(one.split("=") for one in asked), Server(), lambda so_far: 1 // 0)


def test_a_dropped_folder_is_bounded_and_gone_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    with TestClient(make_app(server), base_url="http://127.0.0.1") as client:
        assert "meshwise web --traces" in ask(client, "traces", path="x")["error"]

        def put(file: str, body: bytes = b"{}") -> str:
            return str(client.put(f"/api/drop/{name}/{file}", content=body).json().get("error", ""))

        name = client.post("/api/drop").json()["folder"]
        home = server.folder(name)
        for file in ("a.txt", "..%2Fa.json", "%2Ftmp%2Fa.json", "a%00.json"):
            assert "is no trace" in put(file)
        assert put("ranks/a.json") == "" and (home / "ranks" / "a.json").read_text() == "{}"
        said = ask(client, "traces", path=name)["error"]
        assert "no readable trace" in said and "ranks/a.json" in said and str(home) not in said
        monkeypatch.setattr("meshwise.web.views.MOST_BYTES", 10)
        name = client.post("/api/drop").json()["folder"]
        assert not home.exists()
        home = server.folder(name)
        assert "too large to send" in put("a.json", b"x" * 11)
        assert not home.exists() and "drop it again" in put("a.json")
        name = client.post("/api/drop").json()["folder"]
        home = server.folder(name)
    assert not home.exists()


def test_accuracy_shows_the_rows_that_the_filter_leaves(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, *runs = published_runs().read_text().splitlines()
    few = tmp_path / "runs.csv"
    few.write_text("\n".join([head, *runs[:6], *[run for run in runs if ",b200" in run][:3]]))
    monkeypatch.setattr("meshwise.web.views._validated", lambda: mw.validate([few]))
    everything = ask(client, "accuracy")
    some = ask(client, "accuracy", text="b200", quantity="step_s")
    num = [int(found["headline"].split()[0].replace(",", "")) for found in (some, everything)]
    assert 0 < num[0] < num[1]
    assert 'href="https://' in html(everything)
    of_chip = set(re.findall(r'"name":"([^"]+) \(\d+\)".*?"color":"(#\w+)"', html(everything)))
    assert len(of_chip) == len(dict(of_chip)) > 1


@pytest.mark.parametrize(("view", "state", "sentence"), WRONG["pages"])
def test_what_is_wrong_is_one_sentence(client: TestClient, view: str, state: Any, sentence: str) -> None:
    reply = client.post(f"/api/{view}", json=state)
    assert reply.status_code == 200 and sentence in reply.json()["error"]
    assert "Traceback" not in reply.text


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"model": 1}', b'{"model": {"a": 1}}', b"\xff", b" " * 1_000_001]
)
def test_a_state_is_an_object_of_texts(client: TestClient, body: bytes) -> None:
    assert client.post("/api/explore", content=body).status_code == (413 if len(body) > 1_000_000 else 400)


def test_other_sites_cannot_ask(client: TestClient) -> None:
    assert client.post("/api/explore", json=JOB, headers={"Origin": "http://127.0.0.1"}).status_code == 200
    for headers in (
        {"Origin": "https://elsewhere.example"},
        {"Origin": "null"},
        {"Host": "elsewhere.example"},
    ):
        assert client.post("/api/explore", json=JOB, headers=headers).status_code in (400, 403)


def test_the_page_holds_every_field_and_runs_nothing_but_its_own(client: TestClient) -> None:
    page = client.get("/")
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy
    for view in VIEWS:
        for name, option in options(view).items():
            if (view, name) != ("explore", "plan"):  # a field for each of its keys
                assert f'name="{option.typed}"' in page.text and escape(option.help) in page.text
            if option.kind is bool and option.default is None:  # neither yes nor no is as if not stated
                assert re.search(f'name="{option.typed}"[^>]* data-default=""', page.text)
    assert "<script>" not in page.text and " onclick" not in page.text
    assert not re.search(r'type="range" data-default=""', page.text)  # a browser would send its middle
    for name in ("page.js", "draw.js", "plotly.min.js", "style.css", "page.css"):
        assert client.get(f"/static/{name}").status_code == 200
    assert client.get("/static/..%2fapp.py").status_code == 404


def test_a_token_keeps_strangers_out() -> None:
    with TestClient(make_app(token="secret"), base_url="http://192.0.2.1") as client:
        assert client.get("/").status_code == 403
        assert client.get("/?token=wrong").status_code == 403
        assert client.post("/api/explore", json=JOB).status_code == 403
        assert client.get("/?token=secret").status_code == 200  # the cookie is set, the address is clean
        assert client.get("/").status_code == 200


@pytest.mark.parametrize(("host", "has_token"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_the_command_prints_an_address_that_answers(host: str, has_token: bool) -> None:
    words = [sys.executable, "-m", "meshwise", "web", "--port", "0", "--host", host]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            address = server.stderr.readline().strip()
            assert ("?token=" in address) == has_token
            with urllib.request.urlopen(address.partition("?")[0].replace("0.0.0.0", "127.0.0.1")) as reply:
                assert b"meshwise" in reply.read() and not has_token
        except urllib.error.HTTPError as error:
            assert error.code == 403 and has_token
            error.close()
        finally:
            server.terminate()


def test_a_port_that_is_taken(meshwise: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = meshwise("web", "--port", str(taken.getsockname()[1]))
    assert done.code == 2 and "choose another --port" in done.err

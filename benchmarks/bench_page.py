"""What a user of the page waits for, in Chromium: the first paint and the first answer of a fresh page, and
from a change of a key until what the window shows is new.

The server's answers, words and charts, and a frame of the browser are in it. One window is as large as that
of a laptop, another as high as the page, so that it shows every chart. Then 50 clients ask at once.
"""

import shutil
from itertools import product

from benchmarks.bench_web import running_server, under_load

JOBS = {
    "llama3-8b on 64": ("model=llama3-8b&cluster=h100-80g-sxm:64&seq=4096&plan=pp=4", 128),
    "gpt3-175b on 512": ("model=gpt3-175b&cluster=a100-80g-sxm:512&seq=2048&plan=pp=16", 1024),
    "deepseek-v3 on 2048": ("model=deepseek-v3&cluster=h800-80g-sxm:2048&seq=4096&plan=pp=16,ep=64", 4096),
}
"""The state of the page, and the batch by which its batch grows."""
WINDOWS = {"window of 1280 x 900": 900, "window of 1280 x 2600, all charts": 2600}
NUM_CYCLES = 8
OPENED = """() => [
  performance.getEntriesByName("first-contentful-paint")[0].startTime, performance.now()
]"""
"""Milliseconds from the request of the page."""
MEASURE = """async ([key, value]) => {
  const field = document.getElementById(`explore-${key}`), started = performance.now();
  field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
  const page = document.getElementById("page");
  while (page.ariaBusy === "true") await new Promise((next) => setTimeout(next));
  await new Promise((painted) => requestAnimationFrame(() => setTimeout(painted)));
  const waited = performance.now() - started;
  await new Promise((next) => setTimeout(next, 200));
  return waited;
}"""


def changes(batch: int) -> list[list[str]]:
    """Keys and values, one after the other, so that no state comes twice."""
    return [
        change
        for i in range(2, NUM_CYCLES + 2)
        for change in (["batch", str(i * batch)], ["tp", "2"], ["zero", "2"], ["tp", "1"], ["zero", "1"])
    ]


def main() -> None:
    """Print how long the changes of each job took."""
    from playwright.sync_api import sync_playwright

    with running_server() as port, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for (job, (state, batch)), (window, height) in product(JOBS.items(), WINDOWS.items()):
            page = browser.new_page(viewport={"width": 1280, "height": height})
            page.goto(f"http://127.0.0.1:{port}/#explore?v=1&{state}&batch={batch}")
            page.wait_for_selector(".chart .main-svg")
            opened = page.evaluate(OPENED)
            waits = [page.evaluate(MEASURE, change) for change in changes(batch)]
            waits = sorted(waits[len(waits) // NUM_CYCLES :])  # the first cycle warms up
            median, p90 = waits[len(waits) // 2], waits[9 * len(waits) // 10]
            print(
                f"{job}, {window}: first paint {opened[0]:.0f} ms, first answer {opened[1]:.0f} ms",
                flush=True,
            )
            print(f"  after a change {median:.0f} ms (median), {p90:.0f} ms (p90); target 100", flush=True)
            page.close()
        browser.close()
        for view, num_requests in (("explore", 20), ("search", 2)):
            print(under_load(port, view, num_requests), flush=True)


if __name__ == "__main__":
    main()

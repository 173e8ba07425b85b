"""Takes the pictures of docs/web.md from the page as it is, in Chromium: `make docs`."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.bench_web import running_server

FIGURES = Path(__file__).parent
VIEWS = {
    "explore": "model=gpt3-175b&cluster=a100-80g-sxm:512&plan=tp=8,pp=16&batch=512&seq=2048",
    "search": "model=llama3-70b&cluster=h100-80g-sxm:256&batch=512&seq=8192",
}


def main() -> None:
    """Write `web_VIEW.png` of each view."""
    from playwright.sync_api import sync_playwright

    with running_server() as port, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for view, state in VIEWS.items():
            page = browser.new_page(viewport={"width": 1360, "height": 900})
            page.goto(f"http://127.0.0.1:{port}/#{view}?v=1&{state}")
            page.wait_for_selector("#page[aria-busy=false] .chart .main-svg", timeout=120_000)
            page.screenshot(path=FIGURES / f"web_{view}.png")
        browser.close()


if __name__ == "__main__":
    main()

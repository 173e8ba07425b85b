"""The tool that keeps the pages of docs/ current runs their examples, and nothing else of them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import meshwise as mw
from data_tables import DATA, DOCS, GLOO4
from docs_scripts import docs_script
from meshwise.cli.command import EXAMPLES
from meshwise.report.answer import Chart
from meshwise.report.pages import parts_of
from meshwise.report.table import Table
from meshwise.trace.summary import summarize_paths

rerun = docs_script("rerun")
PAGE = (DATA / "page.md").read_text()


def test_examples_are_run_and_the_rest_is_left_alone() -> None:
    done = rerun.rerun(PAGE)
    assert done == PAGE.replace("old output", "1").replace("```text\n", "```text\n2 text\n")
    assert rerun.rerun(done) == done


def test_a_failing_example_stops_the_tool() -> None:
    with pytest.raises(Exception, match="returned non-zero exit status 2"):
        rerun.rerun("```console\n$ meshwise estimate gpt5 2>&1\n```\n")


PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(DOCS.parent.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_links_and_modules_of_a_page_exist(page: Path) -> None:
    text, root = page.read_text(encoding="utf-8"), DOCS.parent
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        if "://" not in target and not target.endswith("reference/verbs.md"):  # which mkdocs makes
            assert (page.parent / target).exists(), target
    modules = re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text) if page.stem not in ("log", "CHANGELOG") else []
    assert not [name for name in modules if not ((root / name).exists() or any((root / "src").rglob(name)))]


def test_the_site_is_whole(tmp_path: Path) -> None:
    """Every link leads somewhere, every verb is on a page, and no page asks the network."""
    pytest.importorskip("mkdocs")
    settings = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=DOCS.parent, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    verbs = (tmp_path / "reference" / "verbs" / "index.html").read_text(encoding="utf-8")
    assert all(f'id="{name.replace(" ", "-")}"' in verbs for name in EXAMPLES)
    python = (tmp_path / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    missing = {name for name in mw.__all__ if not re.search(rf'id="meshwise\.[\w.]+\.{name}"', python)}
    assert missing == {"__version__"}
    asks = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(?:https?:)?//")
    for page in tmp_path.rglob("*.html"):
        assert not asks.search(page.read_text(encoding="utf-8")), page


def test_the_page_of_json_keys_has_every_verb(meshwise: Any) -> None:
    """But `web`, which prints none, as the page says."""
    page = (DOCS / "reference" / "json.md").read_text()
    printing = {words for words in EXAMPLES if "--json" in meshwise(*words.split(), "--help").out}
    assert {*EXAMPLES} - printing == {"web"}
    assert {words for words in printing if f"`{words}`" not in page} == set()


def test_the_glossary_has_every_column_and_field() -> None:
    """Of what the verbs print of small jobs; fields are on the page of JSON keys or among its words."""
    traces = GLOO4
    gpus, few = "h100-80g-sxm:4", {"batch": 8, "seq": 2048}
    limits = {"rate": 4, "ttft_s": 0.5, "token_s": 0.05, "num_requests": 50}
    results: list[tuple[Any, dict[str, Any]]] = [
        (mw.estimate("mixtral-8x7b", "h100-80g-sxm:16", "pp=2,ep=4", batch=32), {"per_layer": True}),
        (mw.search("llama3-8b", gpus, "zero=1", beside="tp=4", **few), {}),
        (mw.study("llama3-8b", gpus, "gpus=4|8", "zero=1", **few), {}),
        (mw.serve("llama3-8b", gpus, price=2, pareto=True, **limits), {}),
        (mw.rl("llama3-8b", gpus, prompts=8, samples=4, output=64, mode="colocated"), {}),
        (mw.collective("all_reduce", gpus), {}),
        (mw.fit_card("4090", models=["qwen3-0.6b"], tokens=1e7, price=0.3), {}),
        (mw.validate([DATA / "validate" / "published_runs_excerpt.csv"]), {}),
        (summarize_paths([traces]), {"everything": True}),
        (mw.explain(traces, "llama3-8b", gpus, batch=8, seq=128), {}),
    ]
    page = (DOCS / "notation.md").read_text(encoding="utf-8")
    words = set(re.findall(r"`([^`]+)`", page[page.index("## Words") :])) | {"measured", "predicted", "time"}
    known = page + (DOCS / "reference" / "json.md").read_text(encoding="utf-8")
    missing = set()
    for result, shown in results:
        for part in parts_of(result, **shown):
            table = part.table if isinstance(part, Chart) else part
            heads = map(str, table.columns if isinstance(table, Table) else ())
            missing |= {head for head in heads if head and head.replace("\n", " ") not in words}
        found = result.to_json()
        fields = found if isinstance(found, dict) else found[0]
        missing |= {field for field in fields if not re.search(rf"\b{field}\b", known)}
    missing -= {"10 M tokens", "Step time", "Memory per GPU"}  # a number, and quantities by name
    assert not missing, ", ".join(sorted(missing))

"""One answer in four forms: what Python returns, --json prints, --csv writes and the table shows is the same.

JSON and CSV hold every digit; a table shows the same number rounded, by the functions that print times and
quantities.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import meshwise as mw
from data_tables import DATA, GLOO4, csv_rows
from meshwise.core.units import duration, with_prefix
from meshwise.trace.summary import summarize_paths

GLOO = str(GLOO4)
EXCERPT = str(DATA / "validate" / "published_runs_excerpt.csv")
H100 = "h100-80g-sxm:4"
Rows = Iterator[tuple[str, ...]]


def searched(document: Any) -> Rows:
    for best in document["best"]:
        yield duration(best["step_s"]), with_prefix(best["memory_bytes"]["total"], "B"), best["plan_text"]


def served(document: Any) -> Rows:
    for name, row in (("first token", "ttft_s"), ("token after it", "tpot_s")):
        yield name, *(duration(document[row][column]) for column in ("mean", "p50", "p90", "p99"))
    for each in document["passes"]:
        memory = with_prefix(each["memory_bytes"]["total"], "B")
        yield str(each["sequences"]), duration(each["token_s"]), memory


def collected(document: Any) -> Rows:
    for row in document:
        yield duration(row["time_s"]), with_prefix(row["bus_bytes_per_s"], "B/s")


def at_the_frontier(document: Any) -> Rows:
    for point in document["curve"][::5]:  # the table shows the half decades in which something runs
        if point["plan"] is not None:
            mfu = f"{100 * point['utilization']:.1f}%"
            yield f"{point['training_flop']:.1e}", mfu, point["binds"]


def validated(document: Any) -> Rows:
    total = document["summary"]["step_s"]
    fracs = [f"{100 * total[name]:.1f} %" for name in ("median_abs_frac", "mean_abs_frac", "p90_abs_frac")]
    yield str(total["num_rows"]), str(total["num_expressed"]), *fracs


def summarized(document: Any) -> Rows:
    for rank in document["ranks"]:
        yield str(rank["rank"]), *(duration(rank[name]) for name in ("span_s", "compute_s", "idle_s"))
    for kernel in document["kernels"][:15]:
        yield kernel["name"], str(kernel["count"]), duration(kernel["total_s"]), duration(kernel["mean_s"])


def explained(document: Any) -> Rows:
    yield tuple(duration(document["step_s"][name]) for name in ("predicted", "measured"))


def compared(document: Any) -> Rows:
    assert document["agree"]
    yield (f"all {len(document['rows'])} numbers agree: estimate, dry_run",)


SMALL = "ulysses --seq 64 --hidden 64 --heads 8 --ranks 2"
Answer = Callable[[], Any]
FORMS: dict[str, tuple[Answer, Callable[[Any], Rows]]] = {
    f"search llama3-8b --cluster {H100} --batch 8 --seq 2048": (
        lambda: mw.search("llama3-8b", H100, batch=8, seq=2048),
        searched,
    ),
    f"serve llama3-8b --cluster {H100} --plan tp=4 --concurrency 8": (
        lambda: mw.serve("llama3-8b", H100, "tp=4", concurrency=8),
        served,
    ),
    f"collective all_reduce --cluster {H100} --size 64MiB --size 1e9": (
        lambda: mw.collective("all_reduce", H100, (2.0**26, 1e9)),
        collected,
    ),
    "frontier run --chip h100-80g-sxm": (lambda: mw.frontier("h100-80g-sxm"), at_the_frontier),
    f"validate --runs {EXCERPT}": (lambda: mw.validate([EXCERPT]), validated),
    f"trace summary {GLOO}": (lambda: summarize_paths([GLOO]), summarized),
    f"explain {GLOO} --model llama3-8b --cluster {H100} --batch 8 --seq 128": (
        lambda: mw.explain([GLOO], "llama3-8b", H100, batch=8, seq=128),
        explained,
    ),
    f"compare {SMALL} --no-run": (
        lambda: mw.compare("ulysses", ranks=2, with_run=False, seq=64, hidden=64, heads=8),
        compared,
    ),
}
MEASURED = {"elapsed_s", "plans_per_s"}
"""What a search says of itself, another time each time."""
OF_COMMAND = {"program", "ranks", "rank"}
"""What the document of `compare` says of its command."""


@pytest.mark.parametrize("words", FORMS)
def test_json_and_python_and_the_table_agree(meshwise: Any, words: str, monkeypatch: Any) -> None:
    """The document, the table of the command, and what a result says of itself in Python, without colors."""
    if words.startswith("compare"):
        pytest.importorskip("torch")
    answer, shown = FORMS[words]
    document = meshwise(*words.split(), "--json").document
    result = answer()
    python = json.loads(msgspec.json.encode(result.to_json(), enc_hook=lambda number: number.item()))
    python = python["rows"] if isinstance(document, list) else python
    for found in (document, python) if isinstance(document, dict) else ():
        for name in (MEASURED | (OF_COMMAND if words.startswith("compare") else set())) & found.keys():
            del found[name]
    assert document == python
    rows = list(shown(document))
    assert rows
    printed = meshwise(*words.split()).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in repr(result)
    for text in (printed, repr(result)):
        for cells in rows:
            assert any(all(cell in line for cell in cells) for line in text.splitlines()), cells
    assert len(repr(result)) < 1.05 * len(printed)
    assert len(result._repr_html_()) < 32_000
    assert len(result.to_pandas()) == len(result.to_polars()) == len(result.records()) > 0


def test_csv_and_json_agree(meshwise: Any, tmp_path: Path) -> None:
    """Of a search every plan that it prints, of a server every layout of the front."""
    for words, keys in (
        (f"search llama3-8b --cluster {H100} --batch 8 --seq 2048", ("best",)),
        (f"serve llama3-8b --cluster {H100} --pareto", ("sizing", "pareto")),
    ):
        told = meshwise(*words.split(), "--json", "--csv", str(tmp_path / "x.csv")).document
        for key in keys:
            told = told[key]
        rows = csv_rows(tmp_path / "x.csv")
        for one in told:
            words = {key: " ".join(of) if isinstance(of, list) else of for key, of in one.items()}
            plain = {key: of for key, of in words.items() if key in rows[0] and not isinstance(of, dict)}
            texts = {key: "" if value is None else str(value) for key, value in plain.items()}
            assert len(texts) > 3 and any(texts.items() <= row.items() for row in rows), one

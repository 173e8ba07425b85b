"""The tensor-parallel programs equal one process, and what they do the closed form, to the last digit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from meshwise.core.compare import WORK, compare, work_of
from meshwise.core.errors import PlanError
from meshwise.core.ledger import Ledger
from meshwise.program.tape import Tape
from meshwise.runtime.compare_program import compare_program
from meshwise.runtime.launch import Ranks
from meshwise.runtime.programs import find_program
from meshwise.runtime.programs.tensor_parallel import Options, check, estimate
from part_of_pool import run_on_first

pytestmark = pytest.mark.slow

PROGRAM = find_program("tensor-parallel")
SMALL: dict[str, Any] = {"seq": 24, "microbatch": 2, "hidden": 48, "heads": 12}

WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1d on 2": (2, {"layout": "1d"}),
    "1d on 4": (4, {"layout": "1d"}),
    "2d on 2x2": (4, {"layout": "2d", "grid": "2x2"}),
    "2d on 2x3": (6, {"layout": "2d", "grid": "2x3"}),
    "2d on 3x2": (6, {"layout": "2d", "grid": "3x2", "hidden": 72}),
    "2d on 4x1": (4, {"layout": "2d", "grid": "4x1"}),
    "2d-cp on 2x2": (4, {"layout": "2d-cp", "grid": "2x2"}),
    "2d-cp on 2x3": (6, {"layout": "2d-cp", "grid": "2x3"}),
    "2.5d on 2x2x2": (8, {"layout": "2.5d", "grid": "2x2x2"}),
    "3d on 2x2x2": (8, {"layout": "3d", "grid": "2x2x2"}),
}
BLOCKS: tuple[dict[str, Any], ...] = (
    {"style": "gpt"},
    {"style": "llama", "kv_heads": 6, "causal": False, "microbatch": 1},
)


def cases() -> list[Any]:
    """Every world with one of the blocks, in turn; heads that the columns divide."""
    found = []
    for i, (world, (ranks, layout)) in enumerate(WORLDS.items()):
        options = SMALL | layout | BLOCKS[i % 2]
        if "kv_heads" in options and "3x" not in layout.get("grid", ""):
            options["kv_heads"] = 4
        found.append(pytest.param(ranks, options, id=f"{world}: {options['style']}"))
    return found


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Eight ranks for all tests of this file."""
    with Ranks(8) as ranks:
        yield ranks


@pytest.mark.parametrize(("ranks", "options"), cases())
def test_output_and_gradients_are_those_of_one_process(
    pool: Ranks, ranks: int, options: dict[str, Any]
) -> None:
    """float64; inputs and all weights (biases and norms too) random, in an order that shows a wrong piece."""
    chosen = Options(**options, dtype="fp64", check=True)
    check(chosen, ranks)
    outcomes = pool.call(run_on_first, ranks, chosen)
    differences = outcomes[0].result["max_abs_diff"]
    weights = 12 if chosen.style == "gpt" else 6
    assert len(differences) == weights + 2
    assert max(differences.values()) < 1e-10


@pytest.mark.parametrize(("ranks", "options"), cases())
def test_dry_run_counts_what_the_closed_form_says(ranks: int, options: dict[str, Any]) -> None:
    chosen = Options(**options)
    check(chosen, ranks)
    result = compare_program(PROGRAM, chosen, ranks=ranks, rank=ranks - 1, with_run=False)
    assert not result.differences()
    assert {"attention", "mlp"} <= {row.module for row in result.rows}


@pytest.mark.parametrize(
    ("world", "dtype"), [("1d on 4", "bf16"), ("2d on 2x3", "fp32"), ("2d-cp on 2x3", "fp16"),
                         ("2.5d on 2x2x2", "bf16"), ("3d on 2x2x2", "fp64")],
)  # fmt: skip
def test_every_rank_runs_what_the_closed_form_says(pool: Ranks, world: str, dtype: Any) -> None:
    ranks, layout = WORLDS[world]
    options = Options(**(SMALL | layout), dtype=dtype)
    check(options, ranks)
    tape = Tape("estimate", 0, ranks)
    estimate(options, tape)
    ledgers = {"estimate": tape.ledger()}
    for rank, outcome in enumerate(pool.call(run_on_first, ranks, options)[:ranks]):
        ledgers[f"rank {rank}"] = outcome.ledger
    result = compare({name: work_of(ledger) for name, ledger in ledgers.items()}, WORK)
    assert not result.differences()


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, dict[str, Any]]:
    """Ranks and options that pass the check, worlds of up to 64 ranks among them."""
    layout = draw(st.sampled_from(["1d", "2d", "2d-cp", "2.5d", "3d"]))
    columns, rows, depth = (draw(st.integers(1, 4)) for _ in range(3))
    grid = {
        "1d": (columns,),
        "2d": (columns, rows),
        "2d-cp": (columns, rows),
        "2.5d": (columns, columns, depth),
        "3d": (columns,) * 3,
    }[layout]
    heads = columns * columns * draw(st.integers(1, 2))
    hidden = heads * 12 * draw(st.integers(1, 2))
    return int(np.prod(grid)), {
        "layout": layout,
        "grid": "x".join(map(str, grid)) if layout != "1d" else "",
        "seq": 2 * int(np.lcm.reduce(grid)) * int(np.prod(grid)) * draw(st.integers(1, 2)),
        "microbatch": draw(st.integers(1, 3)),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if heads == columns * columns else heads // draw(st.integers(1, 2)),
        "ffn_hidden": hidden * draw(st.sampled_from([1, 3])),
        "style": draw(st.sampled_from(["gpt", "llama"])),
        "causal": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["bf16", "fp16", "fp32", "fp64"])),
    }  # fmt: skip


@settings(max_examples=15)
@given(sizes())
def test_dry_run_of_any_sizes_counts_what_the_closed_form_says(case: tuple[int, dict[str, Any]]) -> None:
    ranks, options = case
    chosen = Options(**options)
    try:
        check(chosen, ranks)
    except PlanError:
        return
    assert not compare_program(PROGRAM, chosen, ranks=ranks, rank=ranks // 2, with_run=False).differences()


def test_a_collective_or_a_matmul_more_is_a_difference() -> None:
    """The comparison of work sees what either side has alone."""
    options = Options(**SMALL, layout="2d", grid="2x2")
    tape = Tape("estimate", 0, 4)
    estimate(options, tape)
    told = work_of(tape.ledger())
    rows = list(told.rows())
    for left_out in ("broadcast", "reduce", ""):
        gone = next(i for i, row in enumerate(rows) if row["collective"] == left_out)
        fewer = Ledger.from_rows(rows[:gone] + rows[gone + 1 :])
        assert compare({"estimate": told, "run": fewer}, WORK).differences()
    assert compare({"estimate": told, "run": told}, WORK).agree


def test_compare_on_the_command_line(meshwise: Callable[..., Any]) -> None:
    words = ("--layout", "2.5d", "--ranks", "8", "--seq", "64", "--hidden", "64", "--heads", "4")
    done = meshwise("compare", "tensor-parallel", *words, "--no-run", "--json")
    assert done.code == 0
    assert done.document["agree"] is True
    assert {"all_reduce", "broadcast"} <= {row["collective"] for row in _ledger(meshwise, words)}


def _ledger(meshwise: Callable[..., Any], words: tuple[str, ...]) -> list[dict[str, Any]]:
    done = meshwise("dryrun", "tensor-parallel", *words, "--json")
    assert json.dumps(done.document)
    return done.document["ledger"]


BAD = {
    "a grid of other ranks": (4, {"layout": "2d", "grid": "2x3"}, "is not 4 ranks"),
    "no numbers": (4, {"layout": "2d", "grid": "2xtwo"}, "write numbers as 4x2"),
    "a grid too flat": (8, {"layout": "3d", "grid": "4x2"}, "needs a grid of 3 numbers"),
    "no square": (8, {"layout": "2.5d", "grid": "4x2x1"}, "needs square grids"),
    "no cube": (8, {"layout": "3d", "grid": "4x2x1"}, "needs a cube"),
    "no cube by default": (12, {"layout": "3d"}, "use 8 or 27 ranks"),
    "heads": (4, {"layout": "2d", "grid": "4x1", "heads": 6}, "heads of tensor-parallel by 4"),
    "heads of a cube": (8, {"layout": "3d", "heads": 6}, "heads of tensor-parallel by 4"),
    "width": (6, {"layout": "2d", "grid": "2x3", "hidden": 40, "heads": 4}, "by 6, which does not divide 40"),
    "sequence": (4, {"layout": "2d", "seq": 25}, "the sequence"),
    "1d heads": (5, {"layout": "1d"}, "by 5, which does not divide"),
    "heads and hidden": (2, {"heads": 7}, "does not divide by --heads 7"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_one_sentence(name: str) -> None:
    ranks, options, message = BAD[name]
    with pytest.raises(PlanError, match=message) as error:
        check(Options(**(SMALL | options)), ranks)
    assert "\n" not in str(error.value)

"""The tensor-parallel programs equal one process, and what they do the closed form, to the last digit."""

from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

from data_tables import table
from meshwise.core.compare import WORK, compare, work_of
from meshwise.program.tape import Tape
from meshwise.runtime.compare_program import compare_program
from meshwise.runtime.programs import find_program
from meshwise.runtime.programs.tensor_parallel import Options, check, estimate
from meshwise.runtime.start import run_rank
from one_block import differences
from ranks import Ranks, on_first

pytestmark = pytest.mark.slow
NUM_RANKS = 8

PROGRAM = find_program("tensor-parallel")
SMALL: dict[str, Any] = {"seq": 24, "microbatch": 2, "hidden": 48, "heads": 12}

WORLDS: dict[str, tuple[int, dict[str, Any]]] = table("tables")["tensor_parallel"]["worlds"]
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


@pytest.mark.parametrize(("ranks", "options"), cases())
def test_output_and_gradients_are_those_of_one_process(
    pool: Ranks, ranks: int, options: dict[str, Any]
) -> None:
    """float64; inputs and all weights (biases and norms too) random, in an order that shows a wrong piece."""
    chosen = Options(**options, dtype="fp64")
    check(chosen, ranks)
    weights = 12 if chosen.style == "gpt" else 6
    for found in pool.call(on_first, ranks, differences, chosen)[:ranks]:
        assert len(found) == weights + 2
        assert max(found.values()) < 1e-10


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
    run = partial(run_rank, name="tensor-parallel", quiet=True)
    for rank, outcome in enumerate(pool.call(on_first, ranks, run, options)[:ranks]):
        ledgers[f"rank {rank}"] = outcome.ledger
    result = compare({name: work_of(ledger) for name, ledger in ledgers.items()}, WORK)
    assert not result.differences()

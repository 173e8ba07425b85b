"""The program `rl`: a real GRPO step on two pools of ranks, held against the closed form."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwise.model.weights import num_params
from meshwise.rl.step import SYNC_BYTES
from meshwise.runtime.programs import find_program, parse_options
from meshwise.runtime.programs.rl import the_model
from meshwise.runtime.start import run_rank
from ranks import Ranks, compared, run_bare

pytestmark = pytest.mark.slow
RL = find_program("rl")


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Four ranks."""
    with Ranks(4) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (0, ""),
        (3, "--updates 2 --samples 8"),
        (1, "--rollout-ranks 1 --pack-length 200 --samples 9 --output 31"),
        (2, "--rollout-ranks 3 --prompts 3 --steps 2"),
    ],
)
def test_passes_tokens_payloads_and_memory_of_both_pools_agree(rank: int, words: str, pool: Ranks) -> None:
    """Estimate, dry run and run, to the last digit."""
    found = compared(pool, RL, parse_options(RL, words.split()), ranks=4, rank=rank)
    assert not found.differences()
    columns = {(row.op, row.column): row.values for row in found.rows}
    assert {"tokens", "passes", "matmul", "attention", "broadcast"} <= {op for op, _ in columns}


def test_the_weights_travel_as_the_estimate_of_a_step_prices_them(pool: Ranks) -> None:
    """In two bytes a parameter, from one trainer to all engines."""
    options = parse_options(RL, [])
    ledger = pool.call(run_rank, "rl", options, 0, True)[0].ledger
    sync = [row for row in ledger.rows() if row["axis"] == "sync"]
    assert [row["payload_bytes"] for row in sync] == [SYNC_BYTES * num_params(the_model(options))]


def test_the_reward_rises(pool: Ranks) -> None:
    """The update is a real one: answers get more even tokens than chance has."""
    options = parse_options(RL, ["--steps", "12", "--lr", "0.01", "--samples", "8", "--layers", "1"])
    rewards = pool.call(run_bare, "rl", options)[0].result["rewards"]
    assert sum(rewards[-4:]) / 4 > 0.7 > 0.6 > sum(rewards[:4]) / 4

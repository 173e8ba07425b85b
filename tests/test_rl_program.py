"""The program `rl`: a real GRPO step on two pools of ranks, held against the closed form."""

import pytest

from meshwise.runtime.programs import find_program, parse_options
from ranks import Ranks, compared, run_bare

pytestmark = pytest.mark.slow
NUM_RANKS = 4
RL = find_program("rl")


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


def test_the_reward_rises(pool: Ranks) -> None:
    """The update is a real one: answers get more even tokens than chance has."""
    options = parse_options(RL, ["--steps", "12", "--lr", "0.01", "--samples", "8", "--layers", "1"])
    rewards = pool.call(run_bare, "rl", options)[0].result["rewards"]
    assert sum(rewards[-4:]) / 4 > 0.7 > 0.6 > sum(rewards[:4]) / 4

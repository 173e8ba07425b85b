"""Speed of `estimate`: whole processes, one estimate, a grid of blocks, a million plans."""

import itertools
import subprocess
import sys

import numpy as np
from meshwise.estimate.block_time import block_time

from benchmarks.timing import median_s, report
from meshwise.estimate.grid import Choices, plan_grid
from meshwise.estimate.single import estimate
from meshwise.estimate.timing import Machine, machine, op_times
from meshwise.machine.hardware import find_cluster, rates, stack_rates
from meshwise.model.find import find_model
from meshwise.plan.plan import parse_plan
from meshwise.plan.workload import workload
from meshwise.program.block import block
from meshwise.program.cut import Cut

GPT3 = find_model("gpt3-175b")


def process(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "meshwise", *words], check=True, capture_output=True)


SEQUENCES = itertools.count(128, 8)


def one_estimate() -> None:
    """A new sequence each time: blocks that were priced before are remembered."""
    plan, load = parse_plan("tp=8,pp=8,vpp=3,recompute=selective"), workload(512, next(SEQUENCES))
    estimate(GPT3, find_cluster("a100-80g-sxm:512"), plan, load)


def block_grid() -> int:
    """100,000 blocks: 5 tp x 20 microbatches x 200 sequences x 5 chips."""
    names = ("a100-80g-sxm:8", "h100-80g-sxm:8", "h200-sxm:8", "b200-sxm:8", "mi300x:8")
    stacked = stack_rates([rates(find_cluster(name), "bf16") for name in names])
    on = Machine(base=stacked, by_dtype={"bf16": stacked})
    cut = Cut(
        microbatch=np.arange(1.0, 21.0)[:, None, None],
        seq=np.arange(1.0, 201.0)[:, None] * 128.0,
        tp=np.array([1.0, 2.0, 4.0, 8.0, 16.0])[:, None, None, None],
        sequence_parallel=True,
    )
    ops = block(GPT3, cut)
    return int(np.size(block_time(ops, op_times(ops, on)).forward.total_s))


MILLION = Choices(
    tp=(1, 2, 3, 4, 6, 8, 12, 16),
    cp=(1, 2, 4, 8),
    microbatch=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384),
    pp=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96),
    schedules=(
        *(("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("dualpipe", 1), ("dualpipe-v", 2)),
        *(("interleaved", vpp) for vpp in (2, 3, 4, 6, 8, 12, 16)),
    ),
    recompute=("none", "selective", "full"),
    zero=(0, 1, 2, 3),
)


def million_plans() -> int:
    grid = plan_grid(GPT3, 512, 1536, 2048, MILLION, parse_plan(""))
    cost = grid.price(GPT3, machine(find_cluster("a100-80g-sxm:512"), "bf16"))
    total = np.broadcast_shapes(np.shape(cost.step_s), np.shape(cost.memory.total))
    return int(np.prod(total))


def main() -> None:
    report("meshwise --help (process)", median_s(lambda: process("--help")), 0.3)
    arguments = ("gpt3-175b", "--cluster", "a100-80g-sxm:512", "--plan", "tp=8,pp=8", "--batch", "512")
    report("meshwise estimate (process)", median_s(lambda: process("estimate", *arguments)), 0.6)
    report("one estimate in a process", median_s(one_estimate, 51), 0.002)
    report(f"a grid of {block_grid():,} blocks", median_s(block_grid), 0.1)
    report(f"a grid of {million_plans():,} plans", median_s(million_plans, 3), 1.0)

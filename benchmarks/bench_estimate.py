"""Speed of `estimate`: whole processes, one estimate, a grid of blocks, a million plans."""

import itertools
import subprocess
import sys
from typing import Any

import numpy as np

from benchmarks.timing import median_s, report
from meshwise.estimate.grid import grids
from meshwise.estimate.one_plan import estimate
from meshwise.estimate.priced_part import price_parts
from meshwise.estimate.timing import Machine
from meshwise.machine.hardware import find_cluster, rates
from meshwise.model.find import find_model
from meshwise.plan.plan import EVEN, parse_plan
from meshwise.plan.workload import Workload
from meshwise.program.block import block
from meshwise.program.cut import Cut

GPT3 = find_model("gpt3-175b")


def process(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "meshwise", *words], check=True, capture_output=True)


SEQUENCES = itertools.count(128, 8)


def one_estimate() -> None:
    """A new sequence each time: blocks that were priced before are remembered."""
    plan, load = parse_plan("tp=8,pp=8,vpp=3,recompute=selective"), Workload(batch=512, seq=next(SEQUENCES))
    estimate(GPT3, find_cluster("a100-80g-sxm:512"), plan, load)


def block_grid() -> int:
    """100,000 blocks: 5 tp x 20 microbatches x 1,000 sequences."""
    cluster = find_cluster("h100-80g-sxm:8")
    base = rates(cluster.chip, cluster.levels, "bf16")
    on = Machine(base=base, by_dtype={"bf16": base})
    cut = Cut(
        microbatch=np.arange(1.0, 21.0)[:, None],
        seq=np.arange(1.0, 1001.0) * 32.0,
        tp=np.array([1.0, 2.0, 4.0, 8.0, 16.0])[:, None, None],
        sequence_parallel=True,
    )
    return int(np.size(price_parts({"layer": block(GPT3, cut)}, on)["layer"].forward_s))


MANY = {
    "tp": (1, 2, 3, 4, 6, 8, 12, 16),
    "cp": (1, 2, 4, 8),
    "microbatch": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384),
    "pp": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"),
    "vpp": (1, 2, 3, 4, 6, 8, 12, 16),
    "recompute": ("none", "selective", "full"),
    "zero": (0, 1, 2, 3),
    "offload_optimizer": (0.0, 1.0),
    "overlap_dp": (False, True),
    "overlap_pp": (False, True),
}


def many_plans(**more: Any) -> int:
    """Every valid plan of a space of 30 million combinations; what is invalid is not priced."""
    cluster, load = find_cluster("a100-80g-sxm:512"), Workload(batch=1536, seq=2048)
    of = grids(GPT3, cluster, load, {"stages": (EVEN,), **MANY, **more})
    return sum(int(np.size(one.array(one.step.step_s))) for grid in of for one in grid.price())


def main() -> None:
    report("meshwise --help (process)", median_s(lambda: process("--help")), 0.3)
    arguments = ("gpt3-175b", "--cluster", "a100-80g-sxm:512", "--plan", "tp=8,pp=8", "--batch", "512")
    report("meshwise estimate (process)", median_s(lambda: process("estimate", *arguments)), 0.6)
    report("one estimate in a process", median_s(one_estimate, 51), 0.002)
    report(f"a grid of {block_grid():,} blocks", median_s(block_grid), 0.1)
    report(f"a grid of {many_plans():,} plans", median_s(many_plans, 3), 1.0)
    report("the same, each with its fastest stages", median_s(lambda: many_plans(stages=(None,)), 1), 5.0)

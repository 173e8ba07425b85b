"""How long the experts of a mixture-of-experts layer take on one rank: two grouped matmuls.

`tokens` tokens choose `topk` of `experts` experts each: P = tokens x topk pairs. Where there are fewer
pairs than a few times the experts, some experts get none and their weights are not read: under even
routing E (1 - (1 - 1/E)^P) experts are active. The rows are sorted by expert, multiplied by gate and up
(side by side, hidden -> 2 inter), activated, multiplied by down (inter -> hidden), and summed back with
the router's weights. So a layer is two matmuls of P / active rows, one per active expert, and three
passes over the rows that only move memory: gather, activate, combine.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from meshwise.cost.gemm import gemm_s
from meshwise.cost.memory_kernel import memory_kernel_s
from meshwise.efficiency import GemmEfficiency, MemoryEfficiency
from meshwise.units import Num


def active_experts(experts: Num, pairs: Num) -> Num:
    """Expected number of `experts` that at least one of `pairs` evenly routed token-expert pairs meets."""
    return experts * -np.expm1(pairs * np.log1p(-1.0 / np.maximum(experts, 1.0 + 1e-9)))


def experts_s(
    tokens: Num,
    *,
    topk: Num,
    experts: Num,
    hidden: Num,
    inter: Num,
    flop_per_s: Num,
    memory_bytes_per_s: Num,
    num_cores: Num = 1.0,
    elem_bytes: Num,
    act_bytes: Num = 2.0,
    gemm: GemmEfficiency,
    memory: MemoryEfficiency,
) -> Num:
    """Time [s] of the gated experts of one layer for `tokens` tokens, all experts on this rank.

    `elem_bytes` is the size of an element of the matmuls' operands, `act_bytes` of what lies between them.
    Assumes even routing; under uneven routing the busiest rank's tokens are what to pass.
    """
    pairs = tokens * topk
    active = active_experts(experts, pairs)
    rows = pairs / active
    grouped = partial(
        gemm_s,
        batch=active,
        flop_per_s=flop_per_s,
        memory_bytes_per_s=memory_bytes_per_s,
        num_cores=num_cores,
        elem_bytes=elem_bytes,
        out_bytes=act_bytes,
        efficiency=gemm,
    )
    up_s, down_s = grouped(rows, 2.0 * inter, hidden), grouped(rows, hidden, inter)
    per_pair = (2.0 * hidden, 3.0 * inter, hidden + hidden / topk)  # elements: gather, activate, combine
    moved = [act_bytes * pairs * elements for elements in per_pair]
    moves_s = [
        memory_kernel_s(size, memory_bytes_per_s=memory_bytes_per_s, efficiency=memory) for size in moved
    ]
    return up_s + down_s + moves_s[0] + moves_s[1] + moves_s[2]

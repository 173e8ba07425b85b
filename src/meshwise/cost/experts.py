"""How long the experts of a mixture-of-experts layer take on one rank: two grouped matmuls.

`tokens` tokens choose `topk` of `experts` experts each: P = tokens x topk pairs. Where there are fewer
pairs than a few times the experts, some experts get none and their weights are not read: under even
routing E (1 - (1 - 1/E)^P) experts are active. The rows are sorted by expert, multiplied by gate and up
(side by side, hidden -> 2 inter), activated, multiplied by down (inter -> hidden), and summed back with
the router's weights. So a layer is two matmuls of P / active rows, one per active expert, and three
passes over the rows that only move memory: gather, activate, combine. Kernels of trtllm-gen and AITER gather
nothing: their first matmul reads a row where its token lies (`routeAct`, trtllm_fused_moe_runner.cu of
flashinfer).

Under expert parallelism a rank holds only some of the experts: pass those, and as `topk` the choices of a
token that fall on them, which may be less than one. Libraries that keep a row for every choice, whether its
expert is here or not, move `moved_topk` rows a token. One activates every choice (`ACTIVATES_ALL`), in a
kernel of its own (`activationDeepSeekKernel`, flashinfer's csrc/fused_moe/trtllm_backend): its blocks of 128
columns of a choice run to their end wherever the expert is, so that tp makes it shorter, ep does not. Weights
of fewer bits than their matmul computes in (w4a16) are `weight_bytes` an element in memory.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np

from meshwise.core.numbers import added
from meshwise.core.units import Num
from meshwise.cost.gemm import GROUPED_TILES, gemm_s
from meshwise.cost.memory_kernel import memory_kernel_s
from meshwise.machine.efficiency import ExpertsEfficiency, GemmEfficiency, MemoryEfficiency

_PLAIN_MATMULS = ExpertsEfficiency()

GATHERS_NOTHING = ("trtllm", "aiter")
"""Libraries whose first matmul reads a token's row where it lies."""

ACTIVATES_ALL = ("fp8_block-trtllm",)
"""Libraries whose activation visits every choice of a token, wherever its expert is."""


def active_experts(experts: Num, pairs: Num) -> Num:
    """Expected number of `experts` that at least one of `pairs` evenly routed token-expert pairs meets."""
    return experts * -np.expm1(pairs * np.log1p(-1.0 / np.maximum(experts, 1.0 + 1e-9)))


def met_places(places: Num, choices: Num, groups: tuple[float, float] = (0.0, 0.0)) -> Num:
    """Expected number of `places` (ranks, nodes) that the `choices` of a token meet.

    `groups`: of so many groups of neighbouring experts the token uses only some (0: no such limit). A place
    then has several groups, one of which is enough to meet it, or a group spans several places.
    """
    num_groups, used = groups
    if not used:
        return active_experts(places, choices)
    held = np.maximum(num_groups / places, 1.0)  # groups that a place holds
    missed = math.prod(np.maximum(num_groups - held - i, 0.0) / (num_groups - i) for i in range(int(used)))
    spanned = np.maximum(places / num_groups, 1.0)  # places that a group spans
    inside = used * active_experts(spanned, choices / used)
    return np.where(spanned > 1.0, inside, places * (1.0 - missed))


def experts_s(
    tokens: Num, *, topk: Num, experts: Num, hidden: Num, inter: Num, active: Num | None = None,
    uneven: Num = True, moved_topk: Num | None = None, chosen: Num = 0.0, library: str = "",
    flop_per_s: Num, memory_bytes_per_s: Num, num_cores: Num = 1.0, elem_bytes: Num,
    weight_bytes: Num | None = None, act_bytes: Num = 2.0, gemm: GemmEfficiency, memory: MemoryEfficiency,
    efficiency: ExpertsEfficiency = _PLAIN_MATMULS,
) -> Num:  # fmt: skip
    """Time [s] of the gated experts of one layer for `tokens` tokens, all experts on this rank.

    `elem_bytes` is the size of an element of the matmuls' operands, `weight_bytes` of the right one (None:
    the same), `act_bytes` of what lies between them. `active` experts have work (None: as many as under
    even routing), `uneven` if they do not have exactly as many rows each; rows for `moved_topk` choices a
    token are moved (None: `topk`); a token chose `chosen` in all, here and elsewhere. `efficiency` are
    constants of `library`, on top of those of its matmuls and memory kernels. Assumes even routing; under
    uneven routing the busiest rank's tokens are what to pass.
    """
    pairs = tokens * topk
    active = active_experts(experts, pairs) if active is None else active
    rows = pairs / active
    own = replace(
        gemm,
        peak_frac=gemm.peak_frac * efficiency.peak_frac,
        memory_frac=gemm.memory_frac * efficiency.memory_frac,
    )
    grouped = partial(
        gemm_s, batch=active, flop_per_s=flop_per_s, memory_bytes_per_s=memory_bytes_per_s,
        num_cores=num_cores, elem_bytes=elem_bytes, right_bytes=weight_bytes, out_bytes=act_bytes,
        tiles=GROUPED_TILES, uneven=uneven, efficiency=own,
    )  # fmt: skip
    up_s, down_s = grouped(rows, 2.0 * inter, hidden), grouped(rows, hidden, inter)
    moved = tokens * (topk if moved_topk is None else moved_topk)
    activated = tokens * chosen if library in ACTIVATES_ALL else moved
    elements = (  # gathered; activated; combined, with what all tokens cost
        2.0 * hidden * moved * (not library.endswith(GATHERS_NOTHING)),
        3.0 * inter * efficiency.activation_passes * activated,
        hidden * moved + (1.0 + efficiency.passes) * hidden * tokens,
    )
    move_s = partial(memory_kernel_s, memory_bytes_per_s=memory_bytes_per_s, efficiency=memory)
    return efficiency.launch_s + up_s + down_s + added(move_s(act_bytes * count) for count in elements)

"""How long the ops of a layout take on a machine: compute, memory and communication, op by op.

The roofline of an op is FLOP over peak and bytes over bandwidth, both as published. What it really
takes is longer: `cost.gemm`, `cost.attention_kernel`, `cost.memory_kernel` and `cost.collective` say
by how much, with the chip's fitted constants (`meshwise.machine.efficiency`; `IDEAL` is the bare roofline).

One plan's ops are stacked by kind and timed in one call per kind; over a grid of plans each op is one
call, along the axes that it depends on.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from meshwise.core.units import Num
from meshwise.cost.attention_kernel import attention_s
from meshwise.cost.collective import collective_s
from meshwise.cost.gemm import gemm_s
from meshwise.cost.memory_kernel import memory_kernel_s
from meshwise.machine.efficiency import IDEAL, Efficiency, constants
from meshwise.machine.hardware import Chip, Cluster, Level, Rates, rates
from meshwise.machine.overheads import NONE, Overheads, find_overheads
from meshwise.program.context import CORE
from meshwise.program.op import Op


@dataclass(frozen=True, slots=True, eq=False)
class OpTime:
    """Seconds of one occurrence of an op.

    `compute_s` and `memory_s` are its roofline, `busy_s` what the kernel takes; `comm_s` the links.
    """

    compute_s: Num = 0.0
    memory_s: Num = 0.0
    busy_s: Num = 0.0
    comm_s: Num = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """What ops are timed on: the rates of a cluster (scalars, or arrays over chips) and its efficiency.

    `by_dtype` are the rates of matrix work by dtype; `base` those of the step's own. `reached_frac` is
    the share of each level's link that collectives reach (empty: all of it).
    """

    base: Rates
    by_dtype: dict[str, Rates]
    reached_frac: tuple[float, ...] = ()
    efficiency: Efficiency = IDEAL
    num_cores: Num = 1.0
    overheads: Overheads = NONE
    power_watts: float = 0.0

    def sustained_s(self, flop: Num, dtype: str) -> Num:
        """Least time of `flop` matrix FLOP within the power limit."""
        return flop / self.overheads.sustained_flop_per_s(dtype, self.power_watts)

    def collective_s(
        self, kind: str, payload_bytes: Num, group_ranks: Num, stride: Num, choices: float = 0.0
    ) -> Num:
        """Time of one collective with the links to itself; `send` and `recv` are point to point."""
        if isinstance(group_ranks, float | int) and group_ranks == 1:
            return 0.0
        alone = kind in ("send", "recv")
        link_bytes_per_s = self.base.link_bytes_per_s
        if self.reached_frac and not alone:
            link_bytes_per_s = tuple(map(operator.mul, link_bytes_per_s, self.reached_frac))
        return collective_s(
            "p2p" if alone else kind,  # type: ignore[arg-type]
            payload_bytes,
            group_ranks,
            stride=stride,
            link_bytes_per_s=link_bytes_per_s,
            link_latency_s=self.base.link_latency_s,
            link_ranks=self.base.link_ranks,
            choices=choices,
            efficiency=self.efficiency,
        )


def machine(
    cluster: Cluster, dtype: str, *, ideal: bool = False, overheads: Overheads | None = None
) -> Machine:
    """The machine that a step in `dtype` runs on; attention and the rest of an fp8 step run in bf16.

    `ideal`: kernels and links keep every promise of the data sheet. `overheads`: what a step pays
    beside its kernels (None: the chip's, under today's software).
    """
    pays = NONE if ideal else overheads or find_overheads(cluster.chip)
    return _machine(cluster.chip, cluster.levels, dtype, ideal, pays)


@lru_cache(maxsize=256)
def _machine(chip: Chip, levels: tuple[Level, ...], dtype: str, ideal: bool, overheads: Overheads) -> Machine:
    cluster = Cluster(name=chip.name, chip=chip, num_chips=1, levels=levels)
    dtypes = {dtype, "bf16" if dtype in ("fp8", "fp4") else dtype}
    return Machine(
        base=rates(cluster, dtype),
        reached_frac=(1.0, *(overheads.reached_frac(level.name) for level in levels[1:])),
        by_dtype={name: rates(cluster, name) for name in dtypes},
        efficiency=IDEAL if ideal else constants(chip, levels),
        num_cores=float(max(chip.num_cores, 1)),
        overheads=overheads,
        power_watts=chip.power_watts,
    )


def op_times(ops: Sequence[Op], on: Machine) -> list[OpTime]:
    """The time of each op, in order."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        if op.kind != "collective" or not (isinstance(op.group_size, float | int) and op.group_size == 1):
            groups[_group(op)].append(i)
    times: list[OpTime] = [OpTime()] * len(ops)
    for (kind, *rest), members in groups.items():
        for i, time in zip(members, _TIMERS[kind]([ops[i] for i in members], rest, on), strict=True):
            times[i] = time
    return times


def _group(op: Op) -> tuple[str, ...]:
    if op.kind == "collective":
        return "collective", "dispatch" if op.choices else op.collective, str(op.choices)
    if op.kind == "attention":
        return "attention", op.dtype, op.phase, "causal" if op.causal else "full"
    if op.kind == "matmul":
        is_core = op.name in CORE and op.module != "head"  # the head has logits too
        return "matmul", op.dtype, "scores" if is_core else "weights"
    if op.name.endswith("_cast"):
        return op.kind, "cast"
    return op.kind, "expert_bias" if op.name in ("expert_fc1_bias", "expert_fc2_bias") else "other"


def _each(ops: Sequence[Op], numbers: Sequence[tuple[Num, ...]], timer: Callable) -> list[OpTime]:
    """Apply `timer` to each op's numbers: all at once where they are scalars, alike ops once in a grid."""
    if _is_grid(numbers):
        timed: dict[bytes, OpTime] = {}
        keys = [_key(row) for row in numbers]
        for key, row in zip(keys, numbers, strict=True):
            if key not in timed:
                timed[key] = timer(*row)
        return [timed[key] for key in keys]
    stacked = timer(*np.array(numbers, dtype=np.float64).T)
    columns = [_listed(column, len(ops)) for column in _fields(stacked)]
    return [OpTime(*row) for row in zip(*columns, strict=True)]


def _is_grid(numbers: Sequence[tuple[Num, ...]]) -> bool:
    """Whether any of the numbers is an array."""
    return any(isinstance(x, np.ndarray) and x.ndim for row in numbers for x in row)


def _listed(column: Num, length: int) -> list[float]:
    """A column of `length` numbers, all the same where it is a scalar."""
    return list(map(float, np.ravel(column))) if np.ndim(column) else [float(column)] * length


def _key(row: tuple[Num, ...]) -> bytes:
    """The same bytes for the same numbers: arrays by shape and contents."""
    return b";".join(str(np.shape(x)).encode() + np.asarray(x, dtype=np.float64).tobytes() for x in row)


def _fields(time: OpTime) -> tuple[Num, Num, Num, Num]:
    return time.compute_s, time.memory_s, time.busy_s, time.comm_s


def _matmuls(ops: Sequence[Op], rest: Sequence[str], on: Machine) -> list[OpTime]:
    chip, constant = on.by_dtype.get(rest[0], on.base), on.efficiency.gemm(rest[0])
    scores_slowdown, unaligned_frac = on.overheads.misaligned_slowdown, on.overheads.unaligned_frac

    def timer(
        batch: Num, m: Num, n: Num, k: Num, flop: Num, read: Num, write: Num, d_in: Num, d_out: Num
    ) -> OpTime:
        busy_s = gemm_s(
            m, n, k,
            batch=batch,
            flop_per_s=chip.matrix_flop_per_s,
            memory_bytes_per_s=chip.memory_bytes_per_s,
            num_cores=on.num_cores,
            elem_bytes=read / (batch * (m * k + k * n)),
            out_bytes=write / (batch * m * n),
            efficiency=constant,
        )  # fmt: skip
        busy_s = np.maximum(busy_s, on.sustained_s(flop, rest[0]))
        if rest[1] == "scores":
            busy_s = busy_s * np.where(_aligned(m) & _aligned(n) & _aligned(k), 1.0, scores_slowdown)
        elif unaligned_frac:
            busy_s = busy_s * (1.0 + unaligned_frac * np.maximum(_halvings(d_in), _halvings(d_out)))
        return OpTime(flop / chip.matrix_flop_per_s, (read + write) / chip.memory_bytes_per_s, busy_s)

    # The weight's dimensions are the row lengths of all operands: (n, k), or (m, n) of its gradient.
    weights = [op.shape[1:3] if op.is_weight_grad else op.shape[2:4] for op in ops]
    numbers = [
        (*op.shape, op.cost.flop, op.cost.read_bytes, op.cost.write_bytes, *weight)
        for op, weight in zip(ops, weights, strict=True)
    ]
    return _each(ops, numbers, timer)


def _aligned(size: Num) -> Any:
    """Whether rows of `size` 16-bit elements start at multiples of 16 bytes, which the fast kernels need."""
    return np.mod(size, 8.0) == 0.0


_HALVINGS = np.array([0.0, 3.0, 2.0, 3.0, 1.0, 3.0, 2.0, 3.0])


def _halvings(size: Num) -> Any:
    """How often 16 bytes must be halved until rows of `size` 16-bit elements start at multiples of them."""
    return _HALVINGS[np.mod(size, 8.0).astype(np.intp)]


def _attentions(ops: Sequence[Op], rest: Sequence[str], on: Machine) -> list[OpTime]:
    dtype, phase, mask = rest
    chip = on.by_dtype.get(dtype, on.base)

    def timer(
        batch: Num, heads: Num, kv_heads: Num, seq_q: Num, qk_dim: Num, v_dim: Num, flop: Num, moved: Num
    ) -> OpTime:
        dims = 3.0 * qk_dim + 2.0 * v_dim if phase == "backward" else qk_dim + v_dim
        keys_per_query = flop / (2.0 * batch * heads * dims * seq_q)
        busy_s = attention_s(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            seq_q=seq_q,
            # The length at which a causal mask leaves that many keys per query.
            seq_k=keys_per_query + (0.5 * seq_q if mask == "causal" else 0.0),
            qk_dim=qk_dim,
            v_dim=v_dim,
            causal=mask == "causal",
            backward=phase == "backward",
            flop_per_s=chip.matrix_flop_per_s,
            memory_bytes_per_s=chip.memory_bytes_per_s,
            num_cores=on.num_cores,
            efficiency=on.efficiency.attention,
        )
        busy_s = np.maximum(busy_s * on.overheads.attention_slowdown, on.sustained_s(flop, dtype))
        return OpTime(flop / chip.matrix_flop_per_s, moved / chip.memory_bytes_per_s, busy_s)

    return _each(
        ops,
        [
            (*op.shape[:4], *op.shape[5:], op.cost.flop, op.cost.read_bytes + op.cost.write_bytes)
            for op in ops
        ],
        timer,
    )


def _kernels(ops: Sequence[Op], rest: Sequence[str], on: Machine) -> list[OpTime]:
    chip = on.base
    pays = on.overheads
    times = {"cast": pays.cast_passes, "expert_bias": pays.expert_bias_passes, "other": pays.kernel_passes}
    passes = times[rest[0]]

    def timer(flop: Num, moved: Num) -> OpTime:
        busy_s = memory_kernel_s(
            moved * passes,
            memory_bytes_per_s=chip.memory_bytes_per_s,
            efficiency=on.efficiency.memory,
        )
        compute_s = flop / chip.vector_flop_per_s
        return OpTime(compute_s, moved / chip.memory_bytes_per_s, np.maximum(busy_s, compute_s))

    return _each(ops, [(op.cost.flop, op.cost.read_bytes + op.cost.write_bytes) for op in ops], timer)


def _collectives(ops: Sequence[Op], rest: Sequence[str], on: Machine) -> list[OpTime]:
    choices = float(rest[1])

    def timer(payload_bytes: Num, group_ranks: Num, stride: Num) -> OpTime:
        waiting_s = np.where(np.asarray(group_ranks) > 1, on.overheads.skew_s, 0.0)
        return OpTime(
            comm_s=on.collective_s(rest[0], payload_bytes, group_ranks, stride, choices) + waiting_s
        )

    numbers = [(op.payload_bytes, op.group_size, op.stride) for op in ops]
    if _is_grid(numbers):
        return _each(ops, numbers, timer)
    # What a group costs is remembered for scalars, so one call each is cheaper than an array of few.
    timed = {row: timer(*row) for row in set(numbers)}
    return [timed[row] for row in numbers]


_TIMERS = {
    "matmul": _matmuls,
    "attention": _attentions,
    "kernel": _kernels,
    "collective": _collectives,
}

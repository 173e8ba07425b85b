"""How long the ops of a program take on a machine: compute, memory and communication, op by op.

The roofline of an op is FLOP over peak and bytes over bandwidth, both as published. What it really
takes is longer: the formulas of `cost` say by how much, with the chip's fitted constants
(`meshwise.machine.efficiency`; `IDEAL` is the bare roofline).

Ops of one kind that vary along the same axes are stacked along a new first axis and timed in one call,
be they those of one plan or of a grid of plans.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwise.core.numbers import SINGLE, where
from meshwise.core.units import Num
from meshwise.cost import collective
from meshwise.cost.attention_kernel import attention_s, decode_attention_s
from meshwise.cost.collective import NO_CHOICES, ONE_RUN, Choices, Line, Runs, collective_lines, fastest_s
from meshwise.cost.dispatch import deepep_copies, dispatch_s, launch_s
from meshwise.cost.experts import experts_s
from meshwise.cost.gemm import GROUPED_TILES, TILES, gemm_s
from meshwise.cost.memory_kernel import memory_kernel_s
from meshwise.machine import hardware
from meshwise.machine.efficiency import IDEAL, LARGE_CORES, Efficiency, ExpertsEfficiency, constants
from meshwise.machine.hardware import Chip, Cluster, Level, MeasuredCollective, Rates, ReduceScatter
from meshwise.machine.overheads import NONE, Overheads, Tables, find_overheads, serving_overheads
from meshwise.plan.implementation import IMPLEMENTATIONS
from meshwise.plan.mesh import SERVING
from meshwise.plan.plan import NARROW_DTYPES, Plan
from meshwise.program.context import CORE
from meshwise.program.loss import KERNEL as LOSS_KERNEL
from meshwise.program.op import Op, precision

Stack: TypeAlias = NDArray[np.float64]

DISPATCH_CORES = 24.0
"""Cores that DeepEP's normal kernels run on; its low-latency ones take as many as serve the experts."""

STACK_CELLS = 2**15
"""Numbers that are timed in one call at most: more do not stay in the cache."""

LANES = 128.0
"""Numbers side by side in a register of a TPU's vector unit."""

EXPERT_LIBRARIES = ("aiter", "triton", "trtllm")
"""Libraries of grouped matmuls, the preferred one first."""


CORE_BYTES_PER_S = {"mamba_ssm": 11.6e9, "fla": 19e9}
"""Bytes/s that a core moves in kernels of a library that wait for each load, whatever the memory could give:
of state-spaces/mamba and causal-conv1d, and of flash-linear-attention. They take as long on B200 as on H100.
Sources: tests/data/recurrence_times.csv, state-spaces/mamba issue 904, vLLM pull request 27299."""


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """What ops are timed on: the rates of a cluster (scalars, or arrays over chips) and its efficiency.

    `by_dtype` are the rates of matrix work by dtype; `base` those of the step's own. `reached_frac` is
    the share of each level's link that collectives reach (empty: all of it), `reduce_scatter` the collective
    that the library does for it, `host_bytes_per_s` the chip's link to its host, per direction, `op_host_s`
    what the host adds to every matrix op (`Chip`), `collectives` what was measured (`Cluster`).
    """

    base: Rates
    by_dtype: dict[str, Rates]
    reached_frac: tuple[float, ...] = ()
    reduce_scatter: ReduceScatter = "reduce_scatter"
    efficiency: Efficiency = IDEAL
    num_cores: Num = 1.0
    overheads: Overheads = NONE
    power_watts: float = 0.0
    host_bytes_per_s: float = np.inf
    op_host_s: float = 0.0
    collectives: tuple[MeasuredCollective, ...] = ()

    @property
    def small_cores(self) -> Num:
        """Cores that a library's kernels can hold some of; infinite where a chip has few, large ones."""
        return where(np.asarray(self.num_cores) > LARGE_CORES, self.num_cores, np.inf)

    def rates(self, op: Op) -> Rates:
        """The rates of the matrix work in the dtype of `op`; the step's own where it has none."""
        return self.by_dtype.get(op.dtype, self.base)

    def roofline_s(self, op: Op) -> tuple[Num, Num]:
        """Seconds of the FLOP of a kernel, and of its bytes, at the published peaks."""
        rates = self.base if op.kind == "kernel" else self.rates(op)
        flop_per_s = rates.vector_flop_per_s if op.kind == "kernel" else rates.matrix_flop_per_s
        moved_bytes = op.cost.read_bytes + op.cost.write_bytes
        return op.cost.flop / flop_per_s, moved_bytes / rates.memory_bytes_per_s

    def sustained_s(self, flop: Num, dtype: str) -> Num:
        """Least time of `flop` matrix FLOP within the power limit."""
        return flop / self.overheads.sustained_flop_per_s(dtype, self.power_watts)

    def leaves_node(self, group_ranks: Num, stride: Num) -> Num:
        """1 where a group spans more than the links inside a node, else 0."""
        return _leaves_node(self, _frozen(group_ranks), _frozen(stride))

    def collective_s(
        self, kind: str, payload_bytes: Num, group_ranks: Num, stride: Num, choices: Choices = NO_CHOICES,
        runs: Runs = ONE_RUN,
    ) -> Num:  # fmt: skip
        """Time of one collective with the links to itself; `send` and `recv` are point to point."""
        seconds = fastest_s(self.collective_lines(kind, group_ranks, stride, choices, runs), payload_bytes)
        return self.or_measured(seconds, kind, payload_bytes, group_ranks, stride, runs)

    def or_measured(
        self, seconds: Num, kind: str, payload_bytes: Num, group_ranks: Num, stride: Num, runs: Runs = ONE_RUN
    ) -> Num:
        """What was measured of such a group, else the predicted `seconds`."""
        for known in self.collectives:
            if np.any(is_like := is_measured(known, kind, group_ranks, stride, runs)):
                seconds = np.where(is_like, _measured_s(known, payload_bytes), seconds)[()]
        return seconds

    def collective_lines(
        self, kind: str, group_ranks: Num, stride: Num, choices: Choices = NO_CHOICES, runs: Runs = ONE_RUN
    ) -> list[Line]:
        """What the library chooses from for a group: its algorithms and protocols."""
        return _lines(self, kind, tuple(map(_frozen, (group_ranks, stride, *runs))), choices)


def is_measured(known: MeasuredCollective, kind: str, ranks: Num, stride: Num, runs: Runs = ONE_RUN) -> Any:
    """Whether `known` is of that kind among so many ranks, as many of them on one host."""
    inside = collective.members(ranks, stride, known.host_ranks, runs)
    return (known.kind == kind) & (np.equal(ranks, known.ranks)) & (np.equal(inside, known.ranks_inside))


def _measured_s(known: MeasuredCollective, payload_bytes: Num) -> Num:
    """What was measured, between its sizes as logs.

    Smaller ones take as long as the smallest, larger ones go at the rate of the largest: the link that was
    measured is as slow there too.
    """
    size = np.log(np.maximum(payload_bytes, 1.0))
    sizes, times = np.log(known.sizes_bytes), np.log(known.seconds)
    return np.exp(np.interp(size, sizes, times) + np.maximum(size - sizes[-1], 0.0))


def _frozen(number: Num) -> Any:
    """A number, or an array as something that can be looked up: its contents and its shape."""
    if isinstance(number, SINGLE):
        return float(number)
    array = np.asarray(number, dtype=np.float64)
    return array.tobytes(), array.shape


def _thawed(frozen: Any) -> Num:
    """The number, or the array again."""
    return frozen if isinstance(frozen, float) else np.frombuffer(frozen[0]).reshape(frozen[1])


@lru_cache(maxsize=4096)
def _leaves_node(machine: Machine, ranks: Any, stride: Any) -> Num:
    node = [link for level, link in enumerate(machine.base.links) if link.box or not level][-1]
    return (collective.domains(_thawed(ranks), _thawed(stride), node)[1] > 1.0) * 1.0


@lru_cache(maxsize=4096)  # what a group is asked to exchange changes more often than the group
def _lines(machine: Machine, kind: Any, placed: tuple[Any, ...], choices: Choices) -> list[Line]:
    base, is_message = machine.base, kind in ("send", "recv")
    fracs = machine.reached_frac if machine.reached_frac and not is_message else (1.0,) * len(base.links)
    links = tuple(
        link._replace(bytes_per_s=link.bytes_per_s * frac)
        for link, frac in zip(base.links, fracs, strict=True)
    )
    ranks, stride, *runs = map(_thawed, placed)
    kind, twice = collective.carried_out(kind, ranks, by_gloo=machine.reduce_scatter == "all_reduce")
    efficiency = machine.efficiency
    lines = collective_lines(kind, ranks, stride, links, efficiency, choices=choices, runs=Runs(*runs))
    return [replace(line, s_per_byte=line.s_per_byte * (1.0 + twice)) for line in lines]


def machine(
    cluster: Cluster, dtype: str, *, ideal: bool = False, overheads: Overheads | None = None, job: int = 0
) -> Machine:
    """The machine that a step in `dtype` runs on; attention and the rest of an fp8 step run in bf16.

    `ideal`: kernels and links keep every promise of the data sheet. `overheads`: what a step pays
    beside its kernels (None: the chip's, under today's software). `job`: ranks that the groups of a
    collective fill one by one (0: it is of one group).
    """
    overheads = NONE if ideal else overheads or find_overheads(cluster.chip)
    placed = hardware.sliced(cluster.levels, cluster.num_chips), job, cluster.reduce_scatter
    return _machine(cluster.chip, *placed, dtype, ideal, overheads, cluster.collectives)


def machine_for(
    cluster: Cluster, plan: Plan, kind: str, *, ideal: bool = False, overheads: Overheads | None = None
) -> Machine:
    """The machine that `plan` runs on: a serving engine, or the generation of training software it names.

    `overheads`: those of other software.
    """
    chip = cluster.chip
    own = serving_overheads(chip) if kind in SERVING else overheads_of(chip, plan)
    job = cluster.num_chips * (kind not in SERVING)  # an engine's ranks are one group
    return machine(cluster, plan.dtype, ideal=ideal, overheads=overheads or own, job=job)


def overheads_of(chip: Chip, plan: Plan, among: Tables | None = None) -> Overheads:
    """What training by `plan` pays: the overheads of its software, from `among` as in `find_overheads`, and
    those of its implementation.
    """
    return _overheads(chip, plan.software, plan.implementation, among)


@lru_cache(maxsize=256)
def _overheads(chip: Chip, software: str, implementation: str, among: Tables | None) -> Overheads:
    return replace(find_overheads(chip, software, among=among), **IMPLEMENTATIONS[implementation].overheads)


@lru_cache(maxsize=256)
def _machine(
    chip: Chip, levels: tuple[Level, ...], job: int, reduce_scatter: ReduceScatter, dtype: str,
    ideal: bool, overheads: Overheads, collectives: tuple[MeasuredCollective, ...],
) -> Machine:  # fmt: skip
    dtypes, base = {dtype, "bf16" if dtype in NARROW_DTYPES else dtype}, hardware.rates(chip, levels, dtype)
    return Machine(
        base=replace(base, links=tuple(link.of_job(job) for link in base.links)),
        reached_frac=(
            *(1.0 for _ in levels[0].torus or (1,)),
            *(overheads.reached_frac(level.name, level.bytes_per_s) for level in levels[1:]),
        ),
        reduce_scatter=reduce_scatter,
        by_dtype={name: hardware.rates(chip, levels, name) for name in dtypes},
        efficiency=IDEAL if ideal else constants(chip, levels),
        num_cores=float(hardware.num_cores(chip)),
        overheads=overheads,
        power_watts=chip.power_watts,
        host_bytes_per_s=hardware.host_bytes_per_s(chip) or np.inf,
        op_host_s=0.0 if ideal else chip.op_host_s,
        collectives=() if ideal else collectives,
    )


def op_times(ops: Sequence[Op], machine: Machine) -> list[Num]:
    """Seconds of one occurrence of each op, in order: of its kernel, or of its links."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, op in enumerate(ops):
        kind = op.library if op.kind == "collective" and op.library else op.kind
        size = op.payload_bytes if op.kind == "collective" else op.cost.read_bytes
        groups[kind, getattr(size, "shape", ()), *_TRAITS[kind](op)].append(i)
    times: list[Num] = [0.0] * len(ops)
    ndim = 1 + np.ndim(machine.base.memory_bytes_per_s)
    for (kind, shape, *_), alike in groups.items():
        most = max(1, STACK_CELLS // max(1, math.prod(shape)))
        for chosen in (alike[i : i + most] for i in range(0, len(alike), most)):
            stacks = _stacked([_numbers(ops[i]) for i in chosen], ndim)
            seconds = np.asarray(_SECONDS[kind](machine, ops[chosen[0]], *stacks))
            for i, each_s in zip(chosen, seconds.tolist() if seconds.ndim == 1 else seconds, strict=True):
                times[i] = each_s
    return times


def _numbers(op: Op) -> tuple[Num, ...]:
    """What is stacked of an op: its shape as far as its time depends on it, and its cost or its exchange."""
    if op.kind == "collective":
        shape = op.shape if op.library.startswith("deepep") else ()
        return *shape, op.payload_bytes, op.group_size, op.stride
    cost = op.cost.flop, op.cost.read_bytes, op.cost.write_bytes
    if op.kind == "matmul":
        return *op.shape, float(op.is_weight_grad), *cost
    return cost if op.kind == "kernel" else (*op.shape, *cost)


def _stacked(rows: Sequence[tuple[Num, ...]], ndim: int) -> list[Stack]:
    """Each number of several ops as one array [ops, *axes] of at least `ndim` dimensions that line up."""
    stacks = []
    for column in zip(*rows, strict=True):
        if len({getattr(number, "shape", ()) for number in column}) > 1:
            column = np.broadcast_arrays(*column)
        stacks.append(np.array(column, dtype=np.float64))
    ndim = max(ndim, *(stack.ndim for stack in stacks))
    return [stack.reshape(len(rows), *(1,) * (ndim - stack.ndim), *stack.shape[1:]) for stack in stacks]


# --- kernels -----------------------------------------------------------------------------------


def _is_core(op: Op) -> bool:
    return op.name in CORE and op.module != "head"  # the head has logits too


def _matmul_s(
    machine: Machine, op: Op, batch: Stack, m: Stack, n: Stack, k: Stack, is_weight_grad: Stack, flop: Stack,
    read: Stack, write: Stack,
) -> Num:  # fmt: skip
    rates, overheads = machine.rates(op), machine.overheads
    efficiency = machine.efficiency.gemm(
        op.dtype, in_blocks=op.right_bytes > 1.0, grouped=op.library == "ragged"
    )
    copies = np.where(is_weight_grad, 1.0, efficiency.weight_copies)
    one_by_one = bool(overheads.expert_call_s) and op.is_expert
    elem_bytes = precision(op.dtype).operand_bytes if op.right_bytes else read / (batch * (m * k + k * n))
    out_bytes = write / (batch * m * n)
    is_masked = (np.mod(n, LANES) > 0.0) | (np.mod(np.where(is_weight_grad, m, k), LANES) > 0.0)
    m, k = m + efficiency.shared_rows * (1.0 - is_weight_grad), k + efficiency.shared_rows * is_weight_grad
    speedup = min(overheads.fp4_speedup, 1.0 / efficiency.peak_frac) if op.dtype == "fp4" else 1.0
    busy_s = gemm_s(
        m, n, k,
        batch=1.0 if one_by_one else batch,
        flop_per_s=rates.matrix_flop_per_s * speedup / (1.0 + efficiency.masked_frac * is_masked),
        memory_bytes_per_s=rates.memory_bytes_per_s,
        num_cores=machine.num_cores,
        elem_bytes=elem_bytes,
        right_bytes=(op.right_bytes or elem_bytes) * copies,
        tiles=GROUPED_TILES if op.right_bytes and op.dtype != "fp4" else TILES,  # Marlin's have 16 rows too
        out_bytes=out_bytes * efficiency.weight_copies / copies,
        efficiency=efficiency,
    )  # fmt: skip
    busy_s = np.maximum(busy_s * np.where(one_by_one, batch, 1.0), machine.sustained_s(flop, op.dtype))
    if _is_core(op):
        is_aligned = _halvings(m) + _halvings(n) + _halvings(k) == 0.0
        return busy_s * np.where(is_aligned, 1.0, overheads.misaligned_slowdown)
    # The weight's dimensions are the row lengths of all operands: (n, k), or (m, n) of its gradient.
    halvings = np.maximum(_halvings(n), _halvings(np.where(is_weight_grad, m, k)))
    return busy_s * (1.0 + overheads.unaligned_frac * halvings)


_HALVINGS = np.array([0.0, 3.0, 2.0, 3.0, 1.0, 3.0, 2.0, 3.0])


def _halvings(size: Stack) -> Any:
    """How often 16 bytes must be halved until rows of `size` 16-bit elements start at multiples of them.

    Fast kernels of attention need those that start at multiples of the whole 16.
    """
    return _HALVINGS[np.mod(size, 8.0).astype(np.intp)]


def _on_chip(machine: Machine, op: Op) -> dict[str, Any]:
    """The peaks that a matrix op runs at, as its formula takes them."""
    rates = machine.rates(op)
    return {
        "flop_per_s": rates.matrix_flop_per_s,
        "memory_bytes_per_s": rates.memory_bytes_per_s,
        "num_cores": machine.num_cores,
    }


_ATTENTION = ("batch", "heads", "kv_heads", "seq_q", "seq_k", "qk_dim", "v_dim")
"""The dims of an attention's shape."""


def _attention_s(machine: Machine, op: Op, *stacks: Stack) -> Num:
    *shape, flop, _, _ = stacks
    of: dict[str, Any] = dict(zip(_ATTENTION, shape, strict=True))
    is_backward = op.phase == "backward"
    dims = 3.0 * of["qk_dim"] + 2.0 * of["v_dim"] if is_backward else of["qk_dim"] + of["v_dim"]
    keys_per_query = flop / (2.0 * of["batch"] * of["heads"] * dims * of["seq_q"])
    # The length at which a causal mask leaves that many keys per query.
    of["seq_k"] = keys_per_query + (0.5 * of["seq_q"] if op.causal else 0.0)
    busy_s = attention_s(
        **of, causal=op.causal, backward=is_backward, efficiency=machine.efficiency.attention,
        **_on_chip(machine, op),
    )  # fmt: skip
    return np.maximum(busy_s * machine.overheads.attention_slowdown, machine.sustained_s(flop, op.dtype))


def _decode_attention_s(machine: Machine, op: Op, *stacks: Stack) -> Num:
    batch, heads, _, seq_q, seq_k, qk_dim, v_dim, _, read, _ = stacks
    efficiency, rates = machine.efficiency, machine.rates(op)
    return decode_attention_s(
        batch=batch, heads=heads * seq_q, seq_k=seq_k, kv_bytes_per_token=read / (batch * seq_k),
        qk_dim=qk_dim, v_dim=v_dim, flop_per_s=rates.matrix_flop_per_s,
        memory_bytes_per_s=rates.memory_bytes_per_s,
        efficiency=efficiency.latent_decode if op.library == "mla" else efficiency.decode,
    )  # fmt: skip


def _experts_s(machine: Machine, op: Op, *stacks: Stack) -> Num:
    tokens, top_k, experts, hidden, width, chosen, *_ = stacks
    efficiency, form = machine.efficiency, precision(op.dtype)
    library = op.library or experts_library(
        efficiency, "w4a16" if 0 < op.right_bytes < min(form.operand_bytes, 1) else op.dtype
    )
    return experts_s(
        tokens, topk=top_k, chosen=chosen, library=library, experts=experts, hidden=hidden, inter=width,
        elem_bytes=form.operand_bytes, weight_bytes=op.right_bytes or None, act_bytes=form.act_bytes,
        gemm=efficiency.gemm(op.dtype), memory=efficiency.memory,
        efficiency=efficiency.experts.get(library, ExpertsEfficiency()),
        **_on_chip(machine, op),
    )  # fmt: skip


def experts_library(efficiency: Efficiency, dtype: str) -> str:
    """The library of the grouped matmuls: the first measured here, else on this generation, else anywhere."""
    form = {"fp16": "bf16", "fp8": "fp8_block"}.get(dtype, dtype)
    names = [name for last in EXPERT_LIBRARIES if (name := f"{form}-{last}") in efficiency.experts]
    return efficiency.nearest("experts", names)


def _passes(op: Op) -> str:
    """Which of the software's passes over its bytes a kernel takes; a loss, or a library, has its own."""
    if op.kernel == LOSS_KERNEL or op.library:
        return ""
    if op.name.endswith("_cast"):
        return "cast_passes"
    return "expert_bias_passes" if op.name in ("expert_fc1_bias", "expert_fc2_bias") else "kernel_passes"


def _moved_s(machine: Machine, op: Op, moved_bytes: Stack) -> Num:
    """Time of a kernel that only moves; of some libraries, no more than each core waits for."""
    each = CORE_BYTES_PER_S.get(op.library, np.inf) if machine.efficiency is not IDEAL else np.inf
    bytes_per_s = np.minimum(machine.base.memory_bytes_per_s, machine.small_cores * each)
    return memory_kernel_s(moved_bytes, memory_bytes_per_s=bytes_per_s, efficiency=machine.efficiency.memory)


def _chunks_s(machine: Machine, op: Op, kernels: Stack, *stacks: Stack) -> Num:
    *_, flop, read, write = stacks
    moved_s = _moved_s(machine, op, read + write) + (kernels - 1.0) * machine.efficiency.memory.launch_s
    return np.maximum(moved_s, flop / machine.rates(op).matrix_flop_per_s)


def _kernel_s(machine: Machine, op: Op, flop: Stack, read: Stack, write: Stack) -> Num:
    busy_s = _moved_s(machine, op, (read + write) * getattr(machine.overheads, _passes(op), 1.0))
    return np.maximum(busy_s, flop / machine.base.vector_flop_per_s)


# --- communication -----------------------------------------------------------------------------


def _collective_s(machine: Machine, op: Op, payload_bytes: Stack, ranks: Stack, stride: Stack) -> Num:
    kind = "dispatch" if op.choices else op.collective
    waiting_s = np.where(ranks > 1, machine.overheads.skew_s, 0.0)
    if op.choices:
        waiting_s = waiting_s + _dispatch_launch_s(machine, op, ranks)
    sent_s = machine.collective_s(kind, payload_bytes, ranks, stride, Choices(op.choices, op.groups))
    return waiting_s + sent_s


def _dispatch_launch_s(machine: Machine, op: Op, ranks: Stack) -> Num:
    """What kernels that send a token once to each rank take before it leaves: they exchange counts."""
    measured = machine.efficiency.dispatches.get(f"deepep-normal-{op.name}")
    if measured is None:
        return 0.0
    per_node = np.minimum(ranks, machine.base.node_ranks)
    return np.where(ranks > 1, launch_s(ranks, per_node, efficiency=measured), 0.0)


def _peer_all_reduce_s(machine: Machine, op: Op, payload_bytes: Stack, ranks: Stack, stride: Stack) -> Num:
    """Inside a node by reading the peers' memory, where engines do so and it is faster than the library.

    Up to which size it is faster engines know of the chip, whatever was measured on the links at hand
    (vLLM's all_reduce_utils.py: CUSTOM_ALL_REDUCE_MAX_SIZES).
    """
    base, link, group = machine.base, machine.base.links[0], (payload_bytes, ranks, stride)
    library_s = fastest_s(machine.collective_lines("all_reduce", ranks, stride), payload_bytes)
    peer_s = collective.peer_all_reduce_s(
        payload_bytes, ranks, memory_bytes_per_s=base.memory_bytes_per_s, link_bytes_per_s=link.among(ranks),
        coded=op.library == "peer-coded", efficiency=machine.efficiency.peer,
    )  # fmt: skip
    is_inside = (ranks > 1) & (ranks * stride <= base.node_ranks) & (ranks <= link.peer_ranks)
    return np.where(
        is_inside & (peer_s < library_s),
        machine.or_measured(peer_s, "custom_allreduce", *group),
        machine.or_measured(library_s, "all_reduce", *group),
    )


def _deepep_s(
    machine: Machine, op: Op, tokens: Stack, experts: Stack, hidden: Stack, payload_bytes: Stack,
    ranks: Stack, stride: Stack,
) -> Num:  # fmt: skip
    """Tokens to their experts (dispatch) or back (combine) by DeepEP's kernels."""
    efficiency = machine.efficiency.dispatches.get(f"{op.library}-{op.name}")
    if efficiency is None:  # a machine that no such library was measured on
        return machine.collective_s("all_to_all", payload_bytes, ranks, stride)
    links, per_node = machine.base.links, np.minimum(ranks, machine.base.node_ranks)
    copies, num_cores = deepep_copies(
        op.library, op.choices, ranks, per_node,
        experts=experts, num_cores=machine.num_cores, cores=DISPATCH_CORES,
    )  # fmt: skip
    exchange_s = dispatch_s(
        tokens,
        copies,
        token_bytes=payload_bytes / (tokens * op.choices),
        ranks=ranks,
        ranks_per_node=per_node,
        experts=experts,
        num_cores=num_cores,
        inner_bytes_per_s=links[0].bytes_per_s,
        outer_bytes_per_s=links[-1].bytes_per_s,
        efficiency=efficiency,
    )
    return np.where(ranks > 1, exchange_s, 0.0)


_SECONDS: dict[str, Callable[..., Num]] = {
    "matmul": _matmul_s,
    "attention": _attention_s,
    "decode_attention": _decode_attention_s,
    "experts": _experts_s,
    "chunks": _chunks_s,
    "kernel": _kernel_s,
    "collective": _collective_s,
    **dict.fromkeys(("peer", "peer-coded"), _peer_all_reduce_s),
    **dict.fromkeys(("deepep-ll", "deepep-normal"), _deepep_s),
}
"""What times a stack of ops, by their kind, or by the library of a collective that has one of its own."""

_TRAITS: dict[str, Callable[[Op], tuple[Any, ...]]] = {
    "matmul": lambda op: (op.dtype, _is_core(op), op.is_expert, op.right_bytes, op.library),
    "attention": lambda op: (op.dtype, op.phase, op.causal),
    "decode_attention": lambda op: (op.dtype, op.library),
    "experts": lambda op: (op.dtype, op.right_bytes, op.library),
    "chunks": lambda op: (op.dtype, op.library),
    "kernel": lambda op: (_passes(op), op.library),
    "collective": lambda op: (op.collective, op.choices, op.groups, op.name * bool(op.choices)),
    **dict.fromkeys(("peer", "peer-coded"), lambda op: ()),
    **dict.fromkeys(("deepep-ll", "deepep-normal"), lambda op: (op.name, op.choices)),
}
"""What tells apart ops of one kind that cannot be timed together."""

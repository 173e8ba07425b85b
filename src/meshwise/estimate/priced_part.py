"""From the ops of a part to its seconds, by phase; one microbatch on one rank.

The phases are those that a pipeline schedule moves: forward (F), gradient of the input (B), gradient of the
weights (W), and what selective recomputation runs again (core). Within a phase the ops run one
after the other. A collective that may hide behind compute costs what sticks out of it, and what hiding it
takes from that compute: its *exposed share*. Every second of a phase belongs to an op or to a named wait, so
the rows of a part add up to its phases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from msgspec import Struct, structs

from meshwise.core.columns import grouped
from meshwise.core.numbers import added, anywhere, larger, largest, smaller
from meshwise.core.units import Num
from meshwise.estimate.timing import Machine, op_times
from meshwise.machine.overheads import Overheads
from meshwise.plan.plan import NARROW_DTYPES
from meshwise.program.exchange import Held
from meshwise.program.loss import KERNEL as LOSS_KERNEL
from meshwise.program.op import Op
from meshwise.program.parts import HEAD
from meshwise.program.walk import PartBytes, Room, activations, mapped, part_bytes, room, with_saved_bytes
from meshwise.program.weights_of_ops import ENDS, held_of

MATRIX_KINDS = ("matmul", "attention", "decode_attention", "experts", "chunks")
"""Kinds of op whose FLOP are matrix work."""
FORWARD, BACKWARD, WEIGHT, CORE_PHASE, AGAIN = "forward", "backward", "weight", "core", "recompute"
WAIT, SUM = "wait", "sum"
"""Kinds of what is no op of a layout."""
DENSE, EXPERTS = 0, 1
"""Places of what is not of experts, and of these, in pairs."""


class PricedOp(Struct, frozen=True, eq=False, gc=False):
    """An op with the time of one occurrence, and `spent_s`: what all of them add to their phase.

    `is_redone`: whether full recomputation of its part runs it again.
    """

    op: Op
    time_s: Num
    phase: str
    spent_s: Num
    is_redone: bool = True

    @property
    def is_wait(self) -> bool:
        """Whether it is no op of the layout (`waiting`)."""
        return self.op.kind in (WAIT, SUM)


def waiting(name: str, phase: str, spent_s: Num, kind: str = WAIT) -> PricedOp:
    """Time of a phase that is no op of the layout: waiting for the host, or (`SUM`) adding up gradients."""
    return PricedOp(Op(module="", name=name, phase=phase, kind=kind), spent_s, phase, spent_s)


@dataclass(frozen=True, slots=True, eq=False)
class PhaseTimes:
    """One microbatch of a part or a stage: forward, backward (of the input), and gradient of the weights.

    In `near_forward_s` of the forward (and so on) collectives hold the links inside a node, hidden or not, in
    `far_forward_s` those between nodes; backward includes the gradient of the weights.
    """

    forward_s: Num
    backward_s: Num
    weight_s: Num
    near_forward_s: Num = 0.0
    near_backward_s: Num = 0.0
    far_forward_s: Num = 0.0
    far_backward_s: Num = 0.0

    @property
    def total_s(self) -> Num:
        """Forward, backward and gradient of the weights."""
        return self.forward_s + self.backward_s + self.weight_s


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Part(PhaseTimes):
    """One microbatch of one part on one rank: seconds by phase, bytes kept, weights.

    `again_s` is the forward as full recomputation runs it.
    Of the `saved_bytes`, `core_bytes` go under selective recomputation, whose backward holds `redone_bytes`
    more than what is kept at its fullest moment (`program.walk`). `loose_bytes` are kept by ops behind which
    the part trains no weights.
    `held`: weights, dense ones and those of experts.
    `loss_room`: what is filled and booked for a loss beyond what is kept of it (`program.walk.room`);
    `widest_bytes` is the largest gradient of an activation that the backward holds,
    `exchange_bytes` the largest tensor that a tensor-parallel exchange gathers. `live`: the most alive in its
    forward and backward, where memory is told moment by moment; of the head, then of multi-token prediction.
    """

    machine: Machine
    rows: tuple[PricedOp, ...]
    again_s: Num
    core_s: Num
    saved_bytes: Num
    core_bytes: Num
    redone_bytes: Num
    loose_bytes: Num
    held: tuple[Held, Held]
    loss_room: Room
    widest_bytes: Num
    exchange_bytes: Num
    live: tuple[PartBytes, ...] = ()

    def mapped(self, of: Callable[[Num], Num]) -> Part:
        """The part with something done to each of its numbers, without its rows."""
        names = [field.name for field in fields(Part) if field.name not in ("machine", "rows")]
        return replace(self, rows=(), **{name: mapped(of, getattr(self, name)) for name in names})


def paced(paired: Part, lone: Part, lone_frac: Num) -> Part:
    """The mean of microbatches of which `lone_frac` run as `lone`, the others as `paired`."""

    def mean(one: Any, other: Any, *names: str) -> dict[str, Any]:
        return {n: (1.0 - lone_frac) * getattr(one, n) + lone_frac * getattr(other, n) for n in names}

    pairs = zip(paired.rows, lone.rows, strict=True)
    rows = tuple(structs.replace(row, **mean(row, other, "spent_s")) for row, other in pairs)
    times = mean(paired, lone, "forward_s", "backward_s", "weight_s", "again_s", "core_s")
    return replace(paired, rows=rows, **times)


def price_parts(
    parts: dict[str, list[Op]], machine: Machine, *, hide: Iterable[str] = (),
    sum_bytes: float = 4.0, grad_bytes: float = 0.0,
) -> dict[str, Part]:  # fmt: skip
    """Time the ops of all `parts` together; the axes named in `hide` (tp, ep) overlap with compute.

    Every stage waits for the tokens, labels and masks of a microbatch; as that of the head sets the pace,
    this wait is the head's. Gradients are summed in elements of `sum_bytes`; where memory is told moment by
    moment, those of weights take `grad_bytes` an element as they are computed.
    """
    times = iter(op_times([op for ops in parts.values() for op in ops], machine))
    sizes = {"sum_bytes": sum_bytes, "grad_bytes": grad_bytes}
    return {
        name: _part(ops, [next(times) for _ in ops], machine, tuple(hide), fetches=name == HEAD, **sizes)
        for name, ops in parts.items()
    }


def _part(
    ops: Sequence[Op], times: Sequence[Num], machine: Machine, hide: Sequence[str], *, fetches: bool,
    sum_bytes: float, grad_bytes: float,
) -> Part:  # fmt: skip
    overheads = machine.overheads
    ops = _stopped(ops) if overheads.stops_early else ops
    priced = _hidden_behind_compute(_priced(ops, times, overheads), hide, machine)
    forward = [op for op in ops if op.phase == FORWARD]
    if overheads.stops_early:
        unread = _unread(ops)
        priced = [structs.replace(row, is_redone=id(row.op) not in unread) for row in priced]
    seconds: dict[str, Num] = defaultdict(float)
    for row in priced:
        seconds[row.phase] = seconds[row.phase] + row.spent_s
    waits = list(_waits(ops, seconds, machine))
    params = added(op.num_params - op.num_frozen for op in forward)
    stream_bytes_per_s = machine.base.memory_bytes_per_s * machine.efficiency.memory.memory_frac
    adding_s = overheads.adding_bytes(sum_bytes) * params / stream_bytes_per_s
    waits.append(waiting("add_gradients", WEIGHT, adding_s, SUM))
    waits += [waiting("next_microbatch", FORWARD, overheads.microbatch_s)] * fetches
    for wait in waits:
        seconds[wait.phase] = seconds[wait.phase] + wait.spent_s
    kept = activations(ops)
    return Part(
        machine=machine,
        rows=(*priced, *waits),
        forward_s=seconds[FORWARD],
        backward_s=seconds[BACKWARD],
        weight_s=seconds[WEIGHT],
        again_s=seconds[FORWARD] - added(row.spent_s for row in priced if not row.is_redone),
        core_s=added(_times(row.op.redone_frac, row.spent_s) for row in priced),
        **_links_s(priced, machine),
        saved_bytes=kept.saved_bytes,
        core_bytes=kept.saved_bytes - kept.kept_bytes,
        redone_bytes=kept.back_bytes,
        loose_bytes=_loose_bytes(ops) if grad_bytes else 0.0,
        held=(_held(op for op in forward if not op.is_expert), _held(op for op in forward if op.is_expert)),
        loss_room=_loss_room(ops),
        widest_bytes=largest(
            op.cost.write_bytes
            for op in ops
            if op.phase == BACKWARD and op.kind in ("matmul", "kernel") and not op.is_weight_grad
        ),
        exchange_bytes=largest(
            op.payload_bytes for op in ops if op.axis.startswith("tp") and op.collective != "all_reduce"
        ),
        live=_live(ops, grad_bytes) if grad_bytes else (),
    )


def _held(ops: Iterable[Op]) -> Held:
    """The weights that these ops bring."""
    numbers = [held_of(brought) for op in ops for brought in op.weights]
    return Held(*map(sum, zip(*numbers, strict=True))) if numbers else Held()


def _live(ops: Sequence[Op], grad_bytes: float) -> tuple[PartBytes, ...]:
    """The moments of a part; of a head, then those of multi-token prediction, its blocks left out."""
    pieces = [ops]
    if any(op.module == "mtp" for op in ops):
        ends = [op for op in ops if op.module in ENDS]
        further = [op for op in ends if op.module == "mtp" or op.name.startswith("mtp_")]
        pieces = [[op for op in ends if op not in further], further]
    found = [part_bytes(piece, grad_bytes) for piece in pieces]
    filled = [_loss_room(piece).filled_bytes for piece in pieces]
    return tuple(one.with_loss(one.saved + more) for one, more in zip(found, filled, strict=True))


def _stopped(ops: Sequence[Op]) -> list[Op]:
    """The ops of a part, of whose segments none is run again behind the last that keeps a tensor.

    What is dropped is made again to its end, where it is read.
    """
    segments = grouped((op for op in ops if op.segment and not op.drops), lambda op: op.segment)
    unread = set[int]().union(*map(_unread, segments.values()))
    return [structs.replace(op, redone_frac=0.0) if id(op) in unread else op for op in ops]


def _unread(ops: Sequence[Op]) -> set[int]:
    """The forward ops, by identity, behind the last that keeps a tensor; that one too if it made none of it.

    Recomputation stops once all that was kept is there again. Ops of one name run as one (ring attention).
    """
    forward = [op for op in ops if op.phase == FORWARD]
    stop, last = 0, ""
    for place, op in enumerate(forward):
        if op.keeps:
            is_made = any(kept is made for kept in op.keeps for made in op.makes)
            stop, last = place + is_made, op.name * is_made
    return {id(op) for op in forward[stop:] if op.name != last}


def _links_s(priced: Sequence[PricedOp], machine: Machine) -> dict[str, Num]:
    """For how long collectives hold the links inside a node and between nodes, by phase.

    Nor does an exchange start while the host of a rank that computes there is late (`op_host_s`).
    """
    late_s = {phase: _own_host_s((row.op for row in priced), phase, machine) for phase in (FORWARD, BACKWARD)}
    found = {f"{links}_{phase}_s": late_s[phase] for links in ("near", "far") for phase in late_s}
    if any(anywhere(link.ways) for link in machine.base.links):  # a torus has links by axis
        return found
    for row in priced:
        if row.op.kind == "collective":
            phase = FORWARD if row.phase == FORWARD else BACKWARD
            far = machine.leaves_node(row.op.group_size, row.op.stride)
            busy_s = _times(row.op.count, row.time_s)
            found[f"near_{phase}_s"] = found[f"near_{phase}_s"] + busy_s * (1.0 - far)
            found[f"far_{phase}_s"] = found[f"far_{phase}_s"] + busy_s * far
    return found


def _trains(op: Op) -> bool:
    """Whether an op brings weights that train."""
    return any(held.weight.trains for held in op.weights)


def _loose_bytes(ops: Sequence[Op]) -> Num:
    """What is kept by the loose ops of a part."""
    forward = [op for op in with_saved_bytes(ops) if op.phase == FORWARD]
    return added(op.saved_bytes for op in _loose(forward))


def _loose(forward: Sequence[Op]) -> list[Op]:
    """The ops behind which no weights of their part train: of a loss, and of what weighs experts' answers."""
    if any(op.module == "head" for op in forward):
        return [op for op in forward if op.module == "head" and op.kind != "matmul" and not _trains(op)]
    trains = any(_trains(op) for op in forward if op.module in ("moe", "shared_expert"))
    return [
        op
        for op in forward
        if op.module == "moe" and (op.name in ("router_softmax", "combine") or not trains)
    ]


def _priced(ops: Sequence[Op], times: Sequence[Num], overheads: Overheads) -> list[PricedOp]:
    """Each op with what it adds to its phase, after hiding behind the op that it names."""
    shares = _exposed_shares(ops, times, overheads)
    found = []
    for op, time_s in zip(ops, times, strict=True):
        if op.kind == "collective" and isinstance(op.group_size, float) and op.group_size == 1.0:
            continue
        spent_s = _times(op.count, time_s)
        if op.hides_behind:
            spent_s = spent_s * shares[_place_behind(op)]
        found.append(PricedOp(op, time_s, WEIGHT if op.is_weight_grad else op.phase, spent_s))
    return found


def _times(count: Num, seconds: Num) -> Num:
    """`count * seconds`; of a grid's arrays none is made where the count is 0 or 1 in all of it."""
    if isinstance(count, float) and count in (0.0, 1.0):
        return seconds if count else 0.0
    return count * seconds


_Behind = tuple[str, str, str, str]  # module, phase and name of an op, and which of its gradients


def _place_behind(op: Op) -> _Behind:
    return op.module, op.phase, op.hides_behind, op.behind_gradient


def _exposed_shares(ops: Sequence[Op], times: Sequence[Num], overheads: Overheads) -> dict[_Behind, Num]:
    """Share of their time that the collectives cost which hide behind one op (or one of its gradients).

    They share it, each in proportion to its own time.
    """
    hidden_s: dict[_Behind, Num] = defaultdict(float)
    axes: dict[_Behind, str] = {}
    for op, time_s in zip(ops, times, strict=True):
        if op.hides_behind:
            key = _place_behind(op)
            hidden_s[key] = hidden_s[key] + _times(op.count, time_s)
            axes[key] = op.axis
    covers = {key[:3] for key in hidden_s}
    cover_s: dict[_Behind, Num] = defaultdict(float)
    for op, time_s in zip(ops, times, strict=True):
        if op.kind != "collective" and (op.module, op.phase, op.name) in covers:
            for gradient in ("", "weight" if op.is_weight_grad else "input"):
                key = op.module, op.phase, op.name, gradient
                cover_s[key] = cover_s[key] + _times(op.count, time_s)
    return {
        key: exposed_share(all_s, cover_s[key], overheads.not_hidden_frac(axes[key]))
        for key, all_s in hidden_s.items()
    }


def exposed_share(comm_s: Num, cover_s: Num, not_hidden_frac: Num) -> Num:
    """Share of `comm_s` that is paid behind `cover_s` of compute: what sticks out, and interference."""
    sticks_out = larger(comm_s - cover_s, 0.0) / larger(comm_s, 1e-30)
    return sticks_out + not_hidden_frac * (1.0 - sticks_out)


def _hidden_behind_compute(priced: list[PricedOp], hide: Sequence[str], machine: Machine) -> list[PricedOp]:
    """`priced` with the collectives of the axes `hide` behind compute.

    Those of tensor parallelism hide behind all compute of their phase. Those of experts hide behind the other
    microbatch of a pair, whose backward runs beside the forward: behind all compute of both, and what sticks
    out of an axis that hid before.
    """
    for axis in hide:
        for phases in ((FORWARD, BACKWARD, WEIGHT),) if axis == "ep" else ((FORWARD,), (BACKWARD,)):
            mine = [row for row in priced if row.phase in phases]
            first = hide[: hide.index(axis)]
            busy_s = added(
                row.spent_s for row in mine if row.op.kind != "collective" or row.op.axis[:2] in first
            )
            behind = {id(row): row for row in mine if row.op.kind == "collective" and row.op.axis[:2] == axis}
            comm_s = added(row.spent_s for row in behind.values())
            share = exposed_share(comm_s, busy_s, _not_hidden_frac(axis, list(behind.values()), machine))
            priced = [
                structs.replace(row, spent_s=row.spent_s * share) if id(row) in behind else row
                for row in priced
            ]
    return priced


def _not_hidden_frac(axis: str, rows: Sequence[PricedOp], machine: Machine) -> Num:
    """Share of hidden collectives' time that is paid: of a dispatch at least the cores that it holds."""
    overheads = machine.overheads
    held = overheads.dispatch_cores / machine.small_cores * _is_per_rank(row.op for row in rows)
    return larger(overheads.not_hidden_frac(axis), held)


def _waits(ops: Sequence[Op], spent_s: Mapping[str, Num], machine: Machine) -> Iterator[PricedOp]:
    """What a phase waits for the CPU to launch its ops; all of that time where launches block or it computes.

    `spent_s`: what the ops of each phase take. Where a schedule splits the backward, ranks wait for each
    other before gradients of inputs, and the CPU comes ahead: it is late for those of weights.
    """
    overheads = machine.overheads
    for phase, late_in, busy_s in (
        (FORWARD, FORWARD, spent_s[FORWARD]),
        (BACKWARD, WEIGHT, spent_s[BACKWARD] + spent_s[WEIGHT]),
    ):
        late_s = larger(_launches_s(ops, phase, overheads) - busy_s * (not overheads.launches_block), 0.0)
        yield waiting("host", late_in, late_s + _own_host_s(ops, phase, machine))


def _own_host_s(ops: Iterable[Op], phase: str, machine: Machine) -> Num:
    """What the host adds to the matrix ops of a phase on ranks that compute there."""
    if not machine.op_host_s:
        return 0.0
    return machine.op_host_s * added(op.count for op in ops if op.phase == phase and op.kind in MATRIX_KINDS)


def _launches_s(ops: Sequence[Op], phase: str, overheads: Overheads) -> Num:
    """Time the CPU needs to launch the ops of a phase; a collective of one rank is not launched."""
    alike = [op for op in ops if op.phase == phase]
    launches = added(
        op.count * ((op.group_size > 1) * 1.0 if op.kind == "collective" else op.launches) for op in alike
    )
    of_experts = [op for op in alike if op.kind == "matmul" and op.is_expert]
    calls = added(op.count * op.shape[0] * (2.0 if op.dtype in NARROW_DTYPES else 1.0) for op in of_experts)
    each_s = overheads.host_s + overheads.launches_block * overheads.blocked_s
    on_host = each_s * launches + overheads.expert_call_s * calls
    if not any(op.is_expert for op in alike):
        return on_host
    is_fused = _is_per_rank(alike)
    return on_host + overheads.moe_host_s * (1.0 - 0.5 * is_fused - 0.5 * overheads.routing_in_graph)


def _is_per_rank(ops: Iterable[Op]) -> Num:
    """1 where tokens are sent once to each rank, else 0."""
    return smaller(added(op.count for op in ops if op.choices), 1.0)


def _loss_room(ops: Sequence[Op]) -> Room:
    """What the largest of the losses fills and books beyond what is kept of it."""
    most = Room(0.0, 0.0)
    for name in {op.name for op in ops if op.kernel == LOSS_KERNEL}:
        of_one = [op for op in ops if op.kernel == LOSS_KERNEL and op.name == name]
        kept_bytes = added(one.bytes for op in of_one for one in op.keeps)
        most = Room(*map(larger, most, (size - kept_bytes for size in room(of_one))))
    return most

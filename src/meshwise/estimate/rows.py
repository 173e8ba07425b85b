"""The ledger of one plan: every op, exchange and wait of a step, on the first rank of each kind of stage.

A rank is busy or waiting for the whole step, so the rows of each rank add up to `step_s`: its parts as often
as they run, its messages, what sticks out of its exchanges, the optimizer; and what it waits for: the bubble,
ranks that exchange or update more than it does, stragglers. Rows of their own, of module `memory`, say
what the rank holds at its peak (`live_bytes`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import lru_cache
from typing import Any

from msgspec import structs

from meshwise.core.numbers import added
from meshwise.core.units import Num
from meshwise.cost.schedule import SCHEDULES
from meshwise.estimate.memory import recomputed
from meshwise.estimate.priced_part import AGAIN, CORE_PHASE, SUM, Part, PricedOp
from meshwise.estimate.stage_cost import StageCost
from meshwise.estimate.step import StepCost, hop_bytes
from meshwise.estimate.timing import Machine
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import V_SHAPED, Stage
from meshwise.program.op import Op, on_links, op_row
from meshwise.program.parts import EMBEDDING, HEAD
from meshwise.program.walk import with_saved_bytes

Row = dict[str, Any]

SPENT = {
    "host": "host",
    "next_microbatch": "host",
    "add_gradients": "memory",
    "offload": "offload",
    "bubble": "bubble",
    "stragglers": "stragglers",
}
"""What the time of a row that is no op of the layout is spent on, by its name; see `spent_on`."""


def spent_on(row: Row) -> str:
    """The part of the step that a row's time belongs to: compute, memory, comm_tp, bubble, ..."""
    if row["op"] in SPENT:
        return SPENT[row["op"]]
    if row["phase"] == "optimizer":
        return "optimizer"
    if row["collective"]:
        return f"comm_{row['axis'][:2]}"
    return "memory" if (row["memory_s"] or 0.0) > (row["compute_s"] or 0.0) else "compute"


def step_rows(step: StepCost, cost: StageCost) -> Iterator[Row]:
    """All rows of the first rank of a stage."""
    mesh = step.of.mesh
    common = {"origin": "estimate", "rank": float(cost.stage.index) * float(mesh.stride("pp"))}
    m = float(mesh.num_microbatches)
    for row in _part_rows(step, cost):
        yield common | row | {"count": row.get("count", 1.0) * m}
    for row in (*_pipeline_rows(step, cost), *_once_a_step(step, cost)):
        yield common | row
    at_peak = common | {"module": "memory", "phase": "peak", "time_s": 0.0}
    for field in fields(cost.memory):
        yield at_peak | {"op": field.name, "live_bytes": float(getattr(cost.memory, field.name))}


# --- one microbatch ----------------------------------------------------------------------------


def part_rows(name: str, part: Part, phases: Iterable[str], *, waits: bool = True) -> Iterator[Row]:
    """The rows of one part, once, in the order of `phases`: forward, recompute, core, backward.

    `waits` False leaves out what is no op of the layout.
    """
    for phase in phases:
        for row in _with_saved_bytes(part):
            is_there = waits and row.spent_s if row.is_wait else row.op.count
            if not float(is_there) or (phase == AGAIN and not row.is_redone):
                continue
            runs_in = {"weight": "backward"}.get(row.phase, row.phase)
            if phase == CORE_PHASE:
                if float(row.op.redone_frac):
                    again = _row(name, part.machine, row, "recompute")
                    yield again | {"count": again["count"] * float(row.op.redone_frac)}
            elif runs_in == ("forward" if phase == AGAIN else phase):
                yield _row(name, part.machine, row, phase)


@lru_cache(maxsize=64)
def _with_saved_bytes(part: Part) -> list[PricedOp]:
    """The rows of a part, each forward op with what it is the first to keep: found once for all phases."""
    ops = with_saved_bytes([row.op for row in part.rows])
    return [structs.replace(row, op=op) for row, op in zip(part.rows, ops, strict=True)]


def runs_of_parts(step: StepCost, cost: StageCost) -> Iterator[tuple[str, Part, str, float]]:
    """What a stage runs for one microbatch: the name of each part, in which phase, and how often."""
    for stage, one in ((cost.stage, step.of), *zip(cost.towers, step.towers, strict=False)):
        prefix, (selective, full) = f"{one.name}." * bool(one.name), map(float, recomputed(stage, one.mesh))
        for (count, part), name in zip(one.contents(stage), one.parts, strict=True):
            shares = {"forward": 1.0}
            if one.mesh.trains:
                again = {AGAIN: full, CORE_PHASE: selective} if name not in (EMBEDDING, HEAD) else {}
                shares |= again | {"backward": 1.0}
            for phase, share in shares.items():
                if times := float(stage.share * count) * share:
                    yield f"{prefix}{name}", part, phase, times


def _part_rows(step: StepCost, cost: StageCost) -> Iterator[Row]:
    """What a stage does for one microbatch."""
    for name, part, phase, times in runs_of_parts(step, cost):
        for row in part_rows(name, part, (phase,)):
            yield row | {"count": row.get("count", 1.0) * times}
    for phase in ("forward", "backward"):
        waited_s = float(getattr(cost.time, f"offload_{phase}_s"))
        if waited_s > 0:
            yield _spent("step", "offload", waited_s, phase)


def _row(part: str, machine: Machine, row: PricedOp, phase: str) -> Row:
    op, count = row.op, float(row.op.count)
    if row.is_wait:
        spent_s = float(row.spent_s)
        return _spent(part, op.name, spent_s, phase) | ({"memory_s": spent_s} if op.kind == SUM else {})
    once_s = float(row.spent_s) / count if count else 0.0
    module = part if part.endswith(op.module) else f"{part}.{op.module}"
    found = op_row(op) | {"module": module, "phase": phase, "time_s": once_s}
    if op.kind == "collective":
        return found | {"comm_s": float(row.time_s), "exposed_s": once_s}
    compute_s, memory_s = machine.roofline_s(op)
    return found | {"compute_s": float(compute_s), "memory_s": float(memory_s)}


# --- the pipeline, and once a step --------------------------------------------------------------


def _pipeline_rows(step: StepCost, cost: StageCost) -> Iterator[Row]:
    """Messages to and from the neighbouring stages, and what a rank waits for while others work."""
    mesh = step.of.mesh
    if float(mesh.pp) == 1.0:
        return
    messages = [message for message in _messages(mesh, cost.stage) if message[-1]]
    num_messages = added(times for *_, times in messages)
    exposed_s = min(float(step.comm_pp_s) / num_messages, float(step.hop_s))
    for op, phase, kind, times in messages:
        row = on_links(kind, "pp", mesh.pp, hop_bytes(step.of))
        once = {"count": times, "comm_s": float(step.hop_s), "exposed_s": exposed_s}
        yield _spent("pipeline", op, exposed_s, phase) | row | once
    waited_s = float(step.comm_pp_s) - num_messages * exposed_s
    if waited_s > 0:
        yield _spent("pipeline", "wait_for_messages", waited_s, collective="send", axis="pp")
    own_s = float(cost.time.total_s * mesh.num_microbatches)
    yield _spent("pipeline", "bubble", float(step.work_s) + float(step.bubble_s) - own_s)


def _messages(mesh: Mesh, stage: Stage) -> Iterator[tuple[str, str, str, float]]:
    """What a stage sends and receives in a step: op, phase, collective, and how often.

    Each of its chunks has a neighbour before and one behind it, but at the ends of the model and where a
    V-shaped schedule turns round on the rank itself.
    """
    is_turn = SCHEDULES[int(mesh.schedule)] in V_SHAPED and float(stage.index) == float(mesh.pp) - 1.0
    behind = float(mesh.num_microbatches * (mesh.vpp - stage.share * stage.heads - is_turn))
    before = float(mesh.num_microbatches * (mesh.vpp - stage.share * stage.embeddings - is_turn))
    yield "activations", "forward", "send", behind
    yield "activations", "forward", "recv", before
    if mesh.trains:
        yield "gradients", "backward", "send", before
        yield "gradients", "backward", "recv", behind


def _once_a_step(step: StepCost, cost: StageCost) -> Iterator[Row]:
    """The exchanges of the replicas, the optimizer, and waiting for ranks that take longer."""
    mesh = step.of.mesh
    if mesh.trains:
        on_links_s = sum(float(seconds) for _, seconds in cost.exchanged)
        share = float(cost.comm_dp_s) / on_links_s if on_links_s else 0.0
        for exchange, seconds in cost.exchanged:
            yield _exchange_row(exchange, float(seconds), share)
        waited_s = float(step.comm_dp_s) - float(cost.comm_dp_s)
        if waited_s > 0:
            yield _spent("step", "wait_for_exchange", waited_s, collective="all_reduce", axis="dp")
        own_s = float(cost.optimizer_s)
        yield _spent("step", mesh.plan.optimizer, own_s, "optimizer")
        if float(step.optimizer_s) > own_s:
            yield _spent("step", "wait_for_optimizer", float(step.optimizer_s) - own_s, "optimizer")
    yield _spent("step", "stragglers", step.straggler_s)


def _spent(module: str, op: str, seconds: Num, phase: str = "step", **on: str) -> Row:
    """Time that is no op of the layout; `on`: the links that are waited for."""
    return {"module": module, "op": op, "phase": phase, "time_s": float(seconds), **on}


def _exchange_row(op: Op, seconds: float, share: float) -> Row:
    count, paid_s = float(op.count), seconds / float(op.count) * share
    row = on_links(op.collective, op.axis, op.group_size, op.payload_bytes)
    once = {"count": count, "comm_s": seconds / count, "exposed_s": paid_s}
    return _spent("step", op.name, paid_s, op.phase) | row | once

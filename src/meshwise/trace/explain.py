"""Predicted beside measured: where a job's step takes longer than the estimate, by class of work and by op.

Both sides are split into the same classes, and both sum to their step:

    matmul, attention, optimizer, other kernels     the device computes
    all_reduce, all_gather, ...                     transfers that no compute hides
    waiting                                         for the last rank of a collective, in a pipeline's bubble
    copies, idle                                    host late, everything else

The prediction is the ledger of an estimate, of a pipeline the mean over the stages that the ranks are of: an
op is a matmul if it does more than 16 FLOP a byte, which no elementwise op does; gradients that are reduced,
scattered and gathered again are all-reduced. The measurement is the mean over ranks and steps; a kernel
belongs to the class that its name tells, and kernels that run at the same time share that time. Exposed
transfer is divided among the collectives by their time on the wire.

Within a class, work joins the ops of the estimate that look the same in a trace:

    matmul          the same sizes (operands may be swapped) forward or backward, where shapes were recorded;
                    for a fused one those of its pieces, where these ran
    attention       forward or backward, by the kernel's name
    collective      the same number of ranks and bytes
    optimizer       all that PyTorch's `Optimizer.step` runs
    other kernels   the same part of the model, where modules were recorded (see below); this also joins
                    matmuls whose sizes no op has

Ops that look the same share their measured time as the estimate has it. What joins no op is one row of its
class, on either side.

Before that it is asked whether the traces are of the job that the user states: its device, number of ranks,
phase and model. A model and plan show in the matmuls: a weight of [d_in, d_out] in those of which two sizes
are d_in and d_out, forward and in both backward products. Most FLOP of a job are in such matmuls, however
the framework fuses or splits them, unless another model ran, or another plan cut it.

Which part of a model launched a kernel is told by the modules that were open then. A profiler that records
Python (`with_stack`) has an event for each call of a module, `nn.Module: Qwen2MLP_3`; programs mark others by
`record_function`. The class of a module tells its part in the words of a ledger: attention, mlp, moe, norm,
embedding, head, and layer for what a block does itself (residual sums). A module whose name says nothing
(`Linear`, `SiLU`) belongs to the part around it, and so does a norm of queries and keys to attention. What
autograd runs is of the part `backward`, whatever its module. A kernel whose launch was not recorded is of the
part that most often launches kernels of its name.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from meshwise.core.columns import distinct_columns
from meshwise.core.ledger import shape_text
from meshwise.core.notebook import Shown
from meshwise.core.refusals import told
from meshwise.core.units import duration
from meshwise.estimate.one_plan import Estimate
from meshwise.machine.hardware import MEASURED, Cluster, chips
from meshwise.model.architecture import Model, layer_kinds
from meshwise.model.weights import block_weights
from meshwise.plan.plan import plan_text
from meshwise.trace.breakdown import intervals, work
from meshwise.trace.columns import Traces
from meshwise.trace.events import NAMES, Ints, Kind, Trace, class_of_kernel, named_by, patterns
from meshwise.trace.intervals import length
from meshwise.trace.nesting import launchers, nearest, nested_in
from meshwise.trace.operators import callers, spent_ns
from meshwise.trace.rates import matmul_shape, matmul_shapes, op_rates
from meshwise.trace.steps import with_steps
from meshwise.trace.summary import Summary, waits_ns
from meshwise.trace.transfers import POINT_TO_POINT

_MATMUL_FLOP_PER_BYTE = 16.0
_BACKWARD = re.compile(r"bwd|backward|dgrad|dkdv|_dq", re.IGNORECASE)
_UNNAMED = "kernels of no class"
_PATTERNS = {what: patterns(NAMES[what]) for what in ("parts", "op_classes", "op_parts")}
"""What names of kernels, modules and ops of an estimate have in them, by class and by part of a model."""

Look = tuple[Any, ...]
"""What a trace shows of an op: its class and, where known, what tells it from others of the class."""
Looks = tuple[Look, Look, Look, Look]
"""The same, the most telling first: by sizes and direction, by sizes, by part of the model, by class."""
_NUM_LOOKS = 4
Place = tuple[str, str, str]
"""Module, op and phase."""
_Calls = list[tuple[Looks, float, int]]
"""How collectives of a rank look, their seconds on the wire, and their events."""


class StepWork(NamedTuple):
    """Seconds of a step on what looks alike, by one op of an estimate or by all work of a class."""

    looks: Looks
    place: Place
    seconds: float

    @property
    def of(self) -> str:
        """The class."""
        return str(self.looks[-1][0])


@dataclass(frozen=True, slots=True)
class OpDifference:
    """Seconds of one op, or of what joins no op of a class, in one step; None on a side that has none."""

    module: str
    op: str
    phase: str
    predicted_s: float | None
    measured_s: float | None

    @property
    def more_s(self) -> float:
        """By how much the measurement exceeds the prediction."""
        return (self.measured_s or 0.0) - (self.predicted_s or 0.0)


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Shown):
    """The rows, largest difference first, and what they say in words."""

    rows: list[OpDifference]
    classes: list[OpDifference]
    """The same time by class of work."""
    predicted_s: float | None
    measured_s: float
    findings: list[str]
    mismatches: list[str]
    """Why the traces are not of the stated job; then nothing is predicted."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        document: dict[str, Any] = asdict(self)
        step_s = {side: document.pop(f"{side}_s") for side in ("predicted", "measured")}
        return {"step_s": step_s} | document


def explain(summary: Summary, estimate: Estimate | None = None) -> Explanation:
    """The measured step of a job beside the predicted one, op by op, if the traces are of that job."""
    if estimate is None:
        return beside(summary)
    stated = (estimate.cluster, estimate.workload.kind, estimate.trains)
    mismatches = [*contradictions(summary, *stated), *_model(summary, estimate)]
    return beside(summary, partial(_predicted, estimate, summary.traces.ranks), mismatches)


def beside(
    summary: Summary, predicted: Callable[[Set[Look]], Iterable[StepWork]] = lambda _: (),
    mismatches: Sequence[str] = (),
) -> Explanation:  # fmt: skip
    """The measured step beside what is `predicted`, of matmuls of the sizes seen, if nothing mismatches."""
    measured = _measured(summary)
    seen = {one.looks[0][-4:] for one in measured}  # sizes of matmuls
    expected = [] if mismatches else [*predicted(seen)]
    classes = _joined(measured, expected, num_looks=0)
    rows = _joined(measured, expected) if expected else classes
    seconds = {row.op: row.measured_s or 0.0 for row in classes}
    step_s, expected_s = sum(seconds.values()), sum(one.seconds for one in expected) if expected else None
    joined_s = sum(row.measured_s or 0.0 for row in rows if row.module)
    busy_s = step_s - seconds.get("idle", 0.0) - seconds.get("waiting", 0.0)
    fracs = {"joined": joined_s / (busy_s or 1.0), "unnamed": seconds.get(_UNNAMED, 0.0) / (step_s or 1.0)}
    names = (one.name for one in summary.kernels if one.kind == "compute")
    unnamed = (name[:40] for name in names if _class_of_kernel(name) == _UNNAMED)
    about = {"joins": expected and step_s, "steps": summary.steps, "names": ", ".join([*unnamed][:3])}
    findings = [*mismatches, *_in_words(summary, classes, step_s, expected_s)]
    findings += told("explanation", **fracs, **about)
    return Explanation(rows, classes, expected_s, step_s, findings, [*mismatches])


def _sums(values: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """The values in sum, by their keys."""
    sums: dict[Any, float] = defaultdict(float)
    for key, value in values:
        sums[key] += value
    return sums


def _joined(
    measured: Sequence[StepWork], expected: Sequence[StepWork], *, num_looks: int = _NUM_LOOKS
) -> list[OpDifference]:
    """Rows of the ops that both sides have, by so many looks, and one of each class for what is left."""
    none: list[Any] = [0.0 if expected else None, 0.0]
    rows = defaultdict[Place, list[Any]](none.copy)
    for level in range(num_looks):
        here = _sums((one.looks[level], one.seconds) for one in measured if one.seconds)
        there = _sums((one.looks[level], one.seconds) for one in expected if one.seconds)
        both = {look for look in here.keys() & there.keys() if len(look) > 1}
        for one in expected:
            if (look := one.looks[level]) in both:
                rows[one.place][0] += one.seconds
                rows[one.place][1] += here[look] * one.seconds / there[look]
        measured = [one for one in measured if one.looks[level] not in both]
        expected = [one for one in expected if one.looks[level] not in both]
    for i, side in enumerate((expected, measured)):
        for one in side:
            rows["", one.of, "step"][i] += one.seconds
    found = [OpDifference(*place, *seconds) for place, seconds in rows.items() if any(seconds)]
    return sorted(found, key=lambda row: (-abs(row.more_s), row.module, row.op, row.phase))


def _class_of_kernel(name: str) -> str:
    return class_of_kernel(name) or _UNNAMED


def _predicted(estimate: Estimate, ranks: Sequence[int], seen: Set[Look]) -> Iterator[StepWork]:
    """Seconds of each op in the step of an estimate, the mean over the stages of a pipeline that `ranks` are.

    The halves of an all-reduce of gradients are one, and a matmul is what runs in its place (see `_pieces`).
    """
    rows, num_like = [*estimate.ledger.rows()], Counter(map(estimate.rank_like, ranks))
    of_gradients = [row for row in rows if row["op"].endswith("gradients")]
    halves = {row["op"] for row in of_gradients if row["collective"] == "all_gather"}
    for row in rows:
        if row["op"] in halves:
            row = {**row, "collective": "all_reduce"}
        place = (row["module"], f"{row['op']} {row['collective']}".strip(), row["phase"])
        count = row["count"] * num_like[row["rank"]] / len(ranks)
        for shape, share in _pieces(row, estimate.model, seen):
            looks = looks_of_op({**row, "shape": shape})
            yield StepWork(looks, place, share * count * (row["time_s"] or 0.0))


def _pieces(row: Mapping[str, Any], model: Model, seen: Set[Look]) -> Iterable[tuple[str, float]]:
    """The shapes of the matmuls that run for an op of the ledger, and the share of each.

    The estimate multiplies by queries, keys and values (and by gate and up) at once. A program may do so
    apart: then the matmuls of each are `seen`, and the fused one is not.
    """
    sizes = _numbers(row["shape"])
    for widths, at in itertools.product(_widths(model, row["op"]), range(len(sizes))):
        shares = [width / sum(widths) for width in widths]
        each = [[size * share if i == at else size for i, size in enumerate(sizes)] for share in shares]
        shapes = [*map(shape_text, each)]
        if len(shapes) > 1 and _sizes(row["shape"]) not in seen and seen >= {*map(_sizes, shapes)}:
            return zip(shapes, shares, strict=True)
    return [(row["shape"], 1.0)]


@cache
def _widths(model: Model, op: str) -> list[list[int]]:
    """Of each kind of block, how wide the matrices of an op are."""
    of_kinds = (block_weights(model, layer) for layer in layer_kinds(model))
    return [[one.shape[-1] for one in of if one.op == op and one.is_matrix] for of in of_kinds]


def looks_of_op(row: Mapping[str, Any]) -> Looks:
    """How an op of the ledger looks in a trace."""
    of, phase = _class_of_op(row), "forward" if row["phase"] == "forward" else "backward"
    if row["collective"]:
        return look_of(of, int(row["group_size"] or 0), _bytes(row["payload_bytes"]))
    if of == "matmul":
        sizes = _sizes(row["shape"])
        return (of, phase, *sizes), (of, *sizes), (of, part_of_op(row)), (of,)
    if of == "other kernels":
        return look_of(of, part_of_op(row))
    return look_of(of, *_telling(of, is_backward=phase == "backward"))


def look_of(*look: Any) -> Looks:
    """Of work that only one look tells from others of its class."""
    return look, look, look, look[:1]


def _telling(of: str, *, is_backward: bool) -> tuple[str, ...]:
    """What tells an op of a class without sizes from others."""
    if of == "attention":
        return ("backward" if is_backward else "forward",)
    return ("",) if of == "optimizer" else ()


def _sizes(shape: str) -> tuple[int, ...]:
    """Batch, rows and columns of the result (the smaller first), and inner size of a matmul."""
    sizes = _numbers(shape)
    *batch, rows, columns, inner = sizes if len(sizes) in (3, 4) else (0, 0, 0)
    return math.prod(batch), min(rows, columns), max(rows, columns), inner


def _bytes(number: float | None) -> str:
    """Bytes to three digits."""
    return f"{number or 0:.2e}"


def _class_of_op(row: Mapping[str, Any]) -> str:
    if row["collective"]:
        return _class_of_collective(row["collective"])
    if row["phase"] == "optimizer":
        return "optimizer"
    named = named_by(_PATTERNS["op_classes"], row["op"]) or _class_of_kernel(row["op"])
    if named in ("waiting", "idle", "attention", "optimizer"):
        return named
    moved = (row["read_bytes"] or 0.0) + (row["write_bytes"] or 0.0)
    return "matmul" if (row["flop"] or 0.0) > _MATMUL_FLOP_PER_BYTE * moved else "other kernels"


def _class_of_collective(kind: str) -> str:
    return "send_recv" if kind in POINT_TO_POINT else kind


def measured_steps(summary: Summary) -> tuple[Traces, int]:
    """The traces of the steps that are measured, and how many these are.

    They are those that neither warm up nor are cut off on any rank. What the host does after the work of the
    last of many shows in no kernel, so it is left out. Where no step is whole, or some were chosen, all of
    the work counts.
    """
    numbers = {step.number for step in summary.steps}
    whole = sorted(numbers.difference(step.number for step in summary.steps if step.part != "whole"))
    if not whole or summary.traces[0].selected is not None:
        return summary.traces, len(numbers)
    whole = whole[:-1] if len(whole) > 2 and whole[-1] == max(numbers) else whole
    return with_steps(summary.traces, f"{whole[0]}-{whole[-1]}"), len(whole)


def _measured(summary: Summary) -> list[StepWork]:
    """Seconds of work in a step by its looks, the mean over the ranks; they sum to the span."""
    traces, num_steps = measured_steps(summary)
    calls: dict[int, _Calls] = defaultdict(list)
    for one in summary.collectives:
        looks = look_of(_class_of_collective(one.name), int(one.group_size or 0), _bytes(one.bytes))
        for rank, event in one.events.items():
            calls[rank].append((looks, one.wire_s, event))
    found = traces.each(_spent, calls, waits_ns(summary.collectives))
    num = (num_steps or 1) * len(found)
    sums = _sums(itertools.chain(*(one.items() for one in found)))
    return [StepWork(looks, ("", looks[-1][0], "step"), value / num) for looks, value in sums.items()]


def _spent(trace: Trace, calls: _Calls, wait_ns: Mapping[int, int]) -> dict[Looks, float]:
    """Seconds of one rank by looks."""
    parts = intervals(trace, wait_ns).partition.seconds
    chosen = (one for one in calls if trace.selected is None or trace.selected[one[2]])
    wire = _sums((looks, wire_s) for looks, wire_s, _ in chosen)
    whole_s = sum(wire.values())
    wire = wire if whole_s else {look_of("transfer"): 1.0}
    spent = [(looks, parts["transfer"] * one / (whole_s or 1.0)) for looks, one in wire.items()]
    others = {"waiting": "wait", "copies": "memory", "idle": "idle"}
    beside = [(look_of(name), parts[part]) for name, part in others.items()]
    return _sums([*spent, *beside, *_kernels(trace).items()])


def _kernels(trace: Trace) -> dict[Looks, float]:
    """Seconds of compute by its looks on one rank; they sum to the time in which it computed."""
    done = work(trace)
    events = np.flatnonzero(done.kind == Kind.COMPUTE)
    own = spent_ns(trace)
    is_step = trace.named(lambda name: name.startswith("Optimizer.step")) & (trace.kind == Kind.ANNOTATION)
    in_optimizer = callers(trace, events, is_step) >= 0
    seconds: dict[Looks, float] = defaultdict(float)
    seconds[look_of("optimizer", "")] = float(own[events[in_optimizer]].sum()) / 1e9
    events = events[~in_optimizer]
    kinds = np.stack([trace.label[events], parts_of(trace, events), matmul_shapes(trace, events)])
    first, alike = distinct_columns(kinds.astype(np.float64))
    sums = np.bincount(alike, weights=own[events], minlength=len(first)) / 1e9
    for (label, part, shape), spent_s in zip(kinds[:, first].T.tolist(), sums.tolist(), strict=True):
        sizes = matmul_shape(trace, shape) if shape >= 0 else ""
        seconds[_looks_of_kernel(trace.labels[label][1], PARTS[part], sizes)] += spent_s
    total = sum(seconds.values())
    scale = length(done.spans[Kind.COMPUTE]) / 1e9 / total if total else 0.0
    return {looks: value * scale for looks, value in seconds.items()}


def _looks_of_kernel(name: str, part: str, sizes: str) -> Looks:
    """How a kernel looks that a part of the model launched, for a matmul of known sizes or none."""
    of = _class_of_kernel(name)
    if of == "matmul":
        of_part = (of, part) if part else (of,)
        direction = {"": (), "backward": ("backward",)}.get(part, ("forward",))
        of_sizes = (of, *direction, *_sizes(sizes)) if sizes else of_part
        return of_sizes, of_sizes, of_part, (of,)
    if of == "other kernels" and part:
        return look_of(of, part)
    return look_of(of, *_telling(of, is_backward=bool(_BACKWARD.search(name))))


def _in_words(
    summary: Summary, rows: list[OpDifference], step_s: float, expected_s: float | None
) -> list[str]:
    """The measured step beside the predicted one, and the class that differs most; a late rank may be why."""
    late = [one.text for one in summary.findings if 0 < len(one.ranks) < len(summary.traces)]
    is_predicted = expected_s is not None
    text = f"a step takes {duration(step_s)}" + f" where {duration(expected_s)} is predicted" * is_predicted
    if rows:
        text += f"; {duration(rows[0].measured_s or 0.0)} of it {rows[0].op}"
        text += f" instead of {duration(rows[0].predicted_s or 0.0)}" * is_predicted
        text += f": {late.pop(0)}" if rows[0].op == "waiting" and late else ""
    return [text, *late]


_LEAST_FRAC = 0.5
_OF_A_BACKWARD = re.compile(r"^autograd::engine|^Optimizer\.step|backward|bwd", re.IGNORECASE)


def contradictions(summary: Summary, cluster: Cluster, kind: str, trains: bool) -> list[str]:
    """What of the stated job the traces contradict, a sentence each.

    They are of another chip of the catalog or of none; of another number of ranks; of operators none is of a
    backward, or some are and none is stated.
    """
    traces, chip = summary.traces, cluster.chip
    devices = {str(one.device_properties.get("name") or "") if one.has_device else "CPUs" for one in traces}
    words = {word for device in devices for word in re.findall(r"\w+", device.lower())}
    others = {number for name in chips() if (number := _model_number(name)) in words}
    is_other = bool(others) and _model_number(chip.name) not in others
    sizes = [trace.world_size or 0 for trace in traces]
    labels = [label for trace in traces for label in zip(trace.labels, trace.label_kind, strict=False)]
    recorded = any(kind == Kind.CPU_OP and name.startswith("aten::") for (_, name), kind in labels)
    trained = any(_OF_A_BACKWARD.search(name) for (_, name), _ in labels)
    shown = {"devices": " and ".join(sorted(devices)), "is_other": is_other, "is_known": any(sizes)}
    has_none, num_ranks = devices == {"CPUs"} and chip.vendor != MEASURED, max(len(sizes), *sizes)
    shown |= {"has_none": has_none, "num_ranks": num_ranks, "recorded": recorded, "trained": trained}
    return told("stated job", cluster=cluster, kind=kind, trains=trains, **shown)


def reduces_all(summary: Summary) -> bool:
    """Whether the ranks all-reduce and neither gather nor scatter, as data parallelism without ZeRO does."""
    names = {one.name for one in summary.collectives}
    return "all_reduce" in names and names.isdisjoint(("all_gather", "reduce_scatter"))


def _model_number(chip: str) -> str:
    """`h100` of `h100-80g-sxm`, `4090` of `rtx-4090`."""
    return next((word for word in chip.split("-") if re.search(r"\d", word)), chip)


def _model(summary: Summary, stated: Estimate) -> Iterator[str]:
    """Less than half of the FLOP of recorded matmuls is of weights of the stated model."""
    matmuls = [one for one in op_rates(summary.traces) if one.kind == "matmul"]
    seen = [(_numbers(one.shape), one.count * one.flop) for one in matmuls]
    forward = stated.ledger.where(phase="forward")
    ops = [sizes for row in forward.rows() if len(sizes := _numbers(row["shape"])) == 4]
    weights = {frozenset(sizes[2:]) for sizes in ops}

    def fits(sizes: Sequence[int]) -> bool:
        return not weights.isdisjoint(map(frozenset, itertools.combinations(sizes, 2)))

    total, fitting = sum(flop for _, flop in seen), sum(flop for sizes, flop in seen if fits(sizes))
    if total and fitting < _LEAST_FRAC * total:
        largest = max(seen, key=lambda one: one[1])[0]
        of_stated = max(ops, key=lambda sizes: sizes[1] * sizes[2] * sizes[3])[1:]
        job = f"{stated.model.name} under {plan_text(stated.plan) or 'tp=1'}"
        compared = f"the largest there is {shape_text(largest)}, of the stated job {shape_text(of_stated)}"
        yield f"{fitting / total:.0%} of the matmul FLOP in the traces has sizes of {job}: {compared}"


def _numbers(shape: str) -> list[int]:
    """The numbers of a text like 1x512x4096x1024."""
    return [int(float(size)) for size in re.findall(r"[\d.e+]+", shape)]


# --- modules --------------------------------------------------------------------------------------

_MODULE = "nn.Module: "
_AUTOGRAD = "autograd::engine::evaluate_function"
PARTS = ("", *NAMES["parts"])


def part_of_op(row: Mapping[str, Any]) -> str:
    """The part that a row of a ledger belongs to."""
    place = "/".join(row[name] for name in ("phase", "module", "op"))
    return named_by(_PATTERNS["op_parts"], place) or str(row["module"]).rpartition(".")[2]


def parts_of(trace: Trace, events: Ints) -> Ints:
    """The part that launched each of `events`, its place in `PARTS`; 0 where no module is recorded."""
    if not any(name.startswith((_MODULE, _AUTOGRAD)) for _, name in trace.labels):
        return np.zeros(len(events), dtype=np.int64)
    part = np.array([part_of_label(*label) for label in trace.labels])[trace.label]
    call = launchers(trace)[events] if trace.has_device else events
    within = nested_in(trace, np.union1d(np.flatnonzero(part), call[call >= 0]))
    is_norm = part == PARTS.index("norm")
    outer = nearest(within, (part > 0) & ~is_norm)
    in_attention = is_norm & (outer >= 0) & (part[outer] == PARTS.index("attention"))
    at = nearest(within, (part > 0) & ~in_attention)[call]
    found = np.where((call >= 0) & (at >= 0), part[at], 0)
    alike = np.zeros((len(trace.labels), len(PARTS)))
    np.add.at(alike, (trace.label[events], found), found > 0)
    return np.where(call < 0, alike.argmax(axis=1)[trace.label[events]], found)


def part_of_label(category: str, name: str) -> int:
    """The part that an event of this name begins, if it is that of a module, a section or a backward."""
    if not name.startswith((_MODULE, _AUTOGRAD)) and category != "user_annotation":
        return 0
    return PARTS.index(part_named(name.removeprefix(_MODULE)))


def part_named(name: str) -> str:
    """The part of a model that the name of a module or a section tells; empty for none."""
    return named_by(_PATTERNS["parts"], name)

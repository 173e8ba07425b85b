"""Predicted beside measured: where a job's step takes longer than the estimate, by class of work and by op.

Both sides are split into the same classes, and both sum to their step:

    matmul, attention, optimizer, other kernels     the device computes
    all_reduce, all_gather, ...                     transfers that no compute hides
    waiting                                         for the last rank of a collective
    copies, idle                                    host late, pipeline bubbles, everything else

The prediction is the ledger of an estimate: an op is a matmul if it does more than 16 FLOP a byte, which no
elementwise op does. The measurement is the mean over ranks and steps; a kernel belongs to the class that its
name tells (those of unknown names are listed), and kernels that run at the same time share that time.
Exposed transfer is divided among the collectives by their time on the wire.

Within a class, work joins the ops of the estimate that look the same in a trace:

    matmul          the same sizes (operands may be swapped) forward or backward, where shapes were recorded
    attention       forward or backward, by the kernel's name
    collective      the same number of ranks and bytes
    optimizer       all that PyTorch's `Optimizer.step` runs
    other kernels   the same part of the model, where modules were recorded (`trace.modules`); this also joins
                    matmuls whose sizes no op has

Ops that look the same share their measured time as the estimate has it. What joins no op is one row of its
class, on either side.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import distinct_columns
from meshwise.core.ledger import Ledger
from meshwise.core.notebook import Shown
from meshwise.core.units import duration
from meshwise.trace.breakdown import work
from meshwise.trace.events import Ints, Kind, Trace
from meshwise.trace.intervals import length
from meshwise.trace.modules import PARTS, part_of_op, parts_of
from meshwise.trace.names import CLASSES
from meshwise.trace.nesting import launchers, nearest, parents
from meshwise.trace.op_rates import matmul_shape, matmul_shapes
from meshwise.trace.operators import self_time
from meshwise.trace.summary import Summary
from meshwise.trace.transfers import POINT_TO_POINT

_MATMUL_FLOP_PER_BYTE = 16.0
_BACKWARD = re.compile(r"bwd|backward|dgrad|dkdv|_dq", re.IGNORECASE)
_UNNAMED = "kernels of no class"
_IDLE = {"bubble", "launch", "host"}
_NUM_FINDINGS = 5
_SHARE = 0.02

Look = tuple[Any, ...]
"""What a trace shows of an op: its class and, where known, what tells it from others of the class."""
Looks = tuple[Look, Look, Look, Look]
"""The same, the most telling first: by sizes and direction, by sizes, by part of the model, by class."""
_NUM_LOOKS = 4
Place = tuple[str, str, str]
"""Module, op and phase."""
Work = dict[Looks, dict[Place, float]]
"""Seconds of a step."""


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


@dataclass(frozen=True, slots=True)
class Explanation(Shown):
    """The rows, largest difference first, and what they say in words."""

    rows: list[OpDifference]
    classes: list[OpDifference]
    """The same time by class of work."""
    predicted_s: float | None
    measured_s: float
    findings: list[str]
    unjoined: list[OpDifference]
    """Kernels of no class, each by its name; their times are in the row of that name."""

    @property
    def unjoined_frac(self) -> float:
        """Share of the measured step that these kernels take."""
        return (
            sum(row.measured_s or 0.0 for row in self.unjoined) / self.measured_s if self.measured_s else 0.0
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "step_s": {"predicted": self.predicted_s, "measured": self.measured_s},
            "rows": [asdict(row) for row in self.rows],
            "classes": [asdict(row) for row in self.classes],
            "findings": self.findings,
            "unjoined": [asdict(row) for row in self.unjoined],
            "unjoined_frac": self.unjoined_frac,
        }


def explain(summary: Summary, predicted: Ledger | None = None) -> Explanation:
    """The measured step of a job beside the `predicted` one (the ledger of an estimate), op by op."""
    num_steps = len({step.number for step in summary.steps}) or 1
    measured = _measured(summary, num_steps)
    expected = _predicted(predicted) if predicted is not None else {}
    known = predicted is not None
    seconds, expected_seconds = _by_class(measured), _by_class(expected)
    classes = _sorted(
        OpDifference("", op, "step", expected_seconds.get(op, 0.0) if known else None, seconds.get(op, 0.0))
        for op in seconds.keys() | expected_seconds.keys()
        if seconds.get(op) or expected_seconds.get(op)
    )
    rows = _joined(measured, expected) if known else classes
    step_s, expected_s = sum(seconds.values()), sum(expected_seconds.values()) if known else None
    findings = _in_words(classes, step_s, expected_s) + [
        one.text for one in summary.findings if len(one.ranks) == 1
    ]
    if known and step_s:
        joined_s = sum(row.measured_s or 0.0 for row in rows if row.module)
        busy_s = step_s - seconds.get("idle", 0.0) - seconds.get("waiting", 0.0)
        findings.append(f"{joined_s / (busy_s or 1.0):.0%} of the measured work is joined op by op")
    if not summary.steps:
        findings.append("no step is marked (torch.profiler's step()), so the whole trace counts as one step")
    unjoined = _unjoined(summary, seconds.get(_UNNAMED, 0.0))
    if unjoined and seconds[_UNNAMED] >= _SHARE * step_s:
        names = ", ".join(row.op[:40] for row in unjoined[:3])
        findings.append(f"kernels of no known class take {seconds[_UNNAMED] / step_s:.1%} of a step: {names}")
    return Explanation(rows, classes, expected_s, step_s, findings, unjoined)


def _sorted(rows: Iterable[OpDifference]) -> list[OpDifference]:
    return sorted(rows, key=lambda row: (-abs(row.more_s), row.module, row.op, row.phase))


def _by_class(work: Work) -> dict[str, float]:
    """Seconds of each class."""
    seconds: dict[str, float] = defaultdict(float)
    for looks, places in work.items():
        seconds[looks[-1][0]] += sum(places.values())
    return dict(seconds)


def _joined(measured: Work, expected: Work) -> list[OpDifference]:
    """Rows of the ops that both sides have, and one of each class for what either side has alone."""
    rows: dict[Place, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for level in range(_NUM_LOOKS):
        here, there = _by_look(measured, level), _by_look(expected, level)
        joined = {look for look in here.keys() & there.keys() if len(look) > 1}
        for look in joined:
            seconds, total = sum(here[look].values()), sum(there[look].values())
            for place, expected_s in there[look].items():
                rows[place][0] += expected_s
                rows[place][1] += seconds * expected_s / total
        measured, expected = (
            {looks: places for looks, places in side.items() if looks[level] not in joined}
            for side in (measured, expected)
        )
    for i, side in enumerate((expected, measured)):
        for op, alone_s in _by_class(side).items():
            rows["", op, "step"][i] += alone_s
    return _sorted(OpDifference(*place, *seconds) for place, seconds in rows.items() if any(seconds))


def _by_look(work: Work, level: int) -> dict[Look, dict[Place, float]]:
    """What takes any time, by one of its looks."""
    found: dict[Look, dict[Place, float]] = defaultdict(lambda: defaultdict(float))
    for looks, places in work.items():
        for place, seconds in places.items():
            if seconds:
                found[looks[level]][place] += seconds
    return found


def _unjoined(summary: Summary, total_s: float) -> list[OpDifference]:
    """The kernels of no class, the longest first; together they take `total_s` of a step."""
    own = {
        kernel.name: kernel.total_s
        for kernel in summary.kernels
        if kernel.kind == "compute" and _class_of_kernel(kernel.name) == _UNNAMED
    }
    whole = sum(own.values())
    longest = sorted(own.items(), key=lambda item: -item[1])
    return [OpDifference("", name, "step", None, total_s * seconds / whole) for name, seconds in longest]


def _class_of_kernel(name: str) -> str:
    return next((of for of, pattern in CLASSES.items() if pattern.search(name)), _UNNAMED)


def _predicted(ledger: Ledger) -> Work:
    """Seconds of each op in the step of an estimate."""
    work: Work = defaultdict(lambda: defaultdict(float))
    for row in ledger.rows():
        if seconds := row["count"] * (row["time_s"] or 0.0):
            op = f"{row['op']} {row['collective']}".strip()
            work[_looks_of_op(row)][row["module"], op, row["phase"]] += seconds
    return work


def _looks_of_op(row: Mapping[str, Any]) -> Looks:
    """How an op of the ledger looks in a trace."""
    of, phase = _class_of_op(row), "forward" if row["phase"] == "forward" else "backward"
    if row["collective"]:
        return _looks(of, _size(row["group_size"]), _bytes(row["payload_bytes"]))
    if of == "matmul":
        sizes = _sizes(row["shape"])
        return (of, phase, *sizes), (of, *sizes), (of, part_of_op(row)), (of,)
    if of == "other kernels":
        return _looks(of, part_of_op(row))
    return _looks(of, *_telling(of, is_backward=phase == "backward"))


def _looks(*look: Any) -> Looks:
    """Of work that only one look tells from others of its class."""
    return look, look, look, look[:1]


def _telling(of: str, *, is_backward: bool) -> tuple[str, ...]:
    """What tells an op of a class without sizes from others."""
    if of == "attention":
        return ("backward" if is_backward else "forward",)
    return ("",) if of == "optimizer" else ()


def _sizes(shape: str) -> tuple[int, ...]:
    """Batch, rows and columns of the result (the smaller first), and inner size of a matmul."""
    sizes = [int(float(size)) for size in re.findall(r"[\d.e+]+", shape)]
    *batch, rows, columns, inner = sizes if len(sizes) in (3, 4) else (0, 0, 0)
    return math.prod(batch), min(rows, columns), max(rows, columns), inner


def _size(number: float | None) -> int:
    return int(number or 0)


def _bytes(number: float | None) -> str:
    """Bytes to three digits."""
    return f"{number or 0:.2e}"


def _class_of_op(row: Mapping[str, Any]) -> str:
    if row["collective"]:
        return _class_of_collective(row["collective"])
    if row["op"] == "stragglers":
        return "waiting"
    if row["op"] in _IDLE:
        return "idle"
    named = next((name for name in ("attention", "optimizer") if CLASSES[name].search(row["op"])), "")
    if named:
        return named
    moved = (row["read_bytes"] or 0.0) + (row["write_bytes"] or 0.0)
    return "matmul" if (row["flop"] or 0.0) > _MATMUL_FLOP_PER_BYTE * moved else "other kernels"


def _class_of_collective(kind: str) -> str:
    return "send_recv" if kind in POINT_TO_POINT else kind


def _measured(summary: Summary, num_steps: int) -> Work:
    """Seconds of work in a step by its looks, the mean over the ranks; they sum to the span."""
    seconds: dict[Looks, float] = defaultdict(float)
    wire: dict[int, dict[Looks, float]] = defaultdict(lambda: defaultdict(float))
    for one in summary.collectives:
        for rank in one.wait_s:
            wire[rank][_looks(_class_of_collective(one.name), _size(one.group_size), _bytes(one.bytes))] += (
                one.wire_s
            )
    for trace, parts in zip(summary.traces, summary.partitions, strict=True):
        for looks, value in _kernels(trace).items():
            seconds[looks] += value
        whole = sum(wire[trace.rank].values())
        for looks, value in wire[trace.rank].items():
            seconds[looks] += parts.seconds["transfer"] * value / whole if whole else 0.0
        unnamed = 0.0 if whole else parts.seconds["transfer"]
        others = {"waiting": parts.seconds["wait"], "copies": parts.seconds["memory"], "transfer": unnamed}
        for name, value in (others | {"idle": parts.seconds["idle"]}).items():
            seconds[_looks(name)] += value
    return {
        looks: {("", looks[-1][0], "step"): value / (num_steps * len(summary.traces))}
        for looks, value in seconds.items()
    }


def _kernels(trace: Trace) -> dict[Looks, float]:
    """Seconds of compute by its looks on one rank; they sum to the time in which it computed."""
    done = work(trace)
    events = np.flatnonzero(done.kind == Kind.COMPUTE)
    own = trace.duration_ns if trace.has_device else self_time(trace, parents(trace))
    in_optimizer = _in_optimizer(trace, events)
    seconds: dict[Looks, float] = defaultdict(float)
    seconds[_looks("optimizer", "")] = float(own[events[in_optimizer]].sum()) / 1e9
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


def _in_optimizer(trace: Trace, events: Ints) -> NDArray[np.bool_]:
    """Which of these operators or kernels a step of PyTorch's optimizers runs or launches."""
    is_step = np.array([name.startswith("Optimizer.step") for _, name in trace.labels] or [False])
    step = nearest(parents(trace), is_step[trace.label] & (trace.kind == Kind.ANNOTATION))
    at = launchers(trace)[events] if trace.has_device else events
    return (at >= 0) & (step[at] >= 0)


def _looks_of_kernel(name: str, part: str, sizes: str) -> Looks:
    """How a kernel looks that a part of the model launched, for a matmul of known sizes or none."""
    of = _class_of_kernel(name)
    if of == "matmul":
        of_part = (of, part) if part else (of,)
        direction = {"": (), "backward": ("backward",)}.get(part, ("forward",))
        of_sizes = (of, *direction, *_sizes(sizes)) if sizes else of_part
        return of_sizes, of_sizes, of_part, (of,)
    if of == "other kernels" and part:
        return _looks(of, part)
    return _looks(of, *_telling(of, is_backward=bool(_BACKWARD.search(name))))


def _in_words(rows: list[OpDifference], step_s: float, expected_s: float | None) -> list[str]:
    """From the predicted to the measured step, the largest differences first."""
    if expected_s is None:
        return [f"a step takes {duration(step_s)}; give --cluster (and --model) for a prediction"]
    found = [f"a step takes {duration(step_s)} where {duration(expected_s)} is predicted"]
    for row in rows[:_NUM_FINDINGS]:
        predicted, measured = row.predicted_s or 0.0, row.measured_s or 0.0
        if abs(row.more_s) >= _SHARE * max(step_s, expected_s):
            more = "longer" if row.more_s > 0 else "shorter"
            times = f"{duration(measured)} instead of {duration(predicted)}"
            found.append(f"{row.op}: {duration(abs(row.more_s))} {more} than predicted ({times})")
    return found

"""Predicted beside measured: where a job's step takes longer than the estimate, by class of work.

Both sides are split into the same classes, and both sum to their step:

    matmul, attention, optimizer, other kernels     the device computes
    all_reduce, all_gather, ...                     transfers that no compute hides
    waiting                                         for the last rank of a collective
    copies, idle                                    host late, pipeline bubbles, everything else

The prediction is the ledger of an estimate: an op is a matmul if it does more than 16 FLOP a byte, which no
elementwise op does. The measurement is the mean over ranks and steps; a kernel belongs to the class that its
name tells (those of unknown names are listed), and kernels that run at the same time share that time.
Exposed transfer is divided among the collectives by their time on the wire. What has no counterpart on the
other side stands with its own time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshwise.core.ledger import Ledger
from meshwise.core.notebook import Shown
from meshwise.core.units import duration
from meshwise.trace.breakdown import work
from meshwise.trace.events import Kind, Trace
from meshwise.trace.intervals import length
from meshwise.trace.nesting import parents
from meshwise.trace.operators import self_time
from meshwise.trace.summary import Summary

_MATMUL_FLOP_PER_BYTE = 16.0
_CLASSES = (
    ("attention", re.compile(r"flash|fmha|attention|attn|sdpa|sage_fwd|softmax", re.IGNORECASE)),
    ("optimizer", re.compile(r"adam|multi_tensor|sgd|optimizer", re.IGNORECASE)),
    (
        "matmul",
        re.compile(r"gem[mv]|matmul|xmma|cutlass|cublas|nvjet|::(add)?mm$|\bb(add)?mm|Cijk_", re.IGNORECASE),
    ),
    ("convolution", re.compile(r"conv(?!ert)|[dw]grad|winograd|im2col|nchw|nhwc|cudnn", re.IGNORECASE)),
    (
        "other kernels",
        re.compile(
            r"elementwise|vectorized|unrolled|reduce|norm|softmax|embedding|index|gather|scatter|copy|cat(_|array)|"
            r"fill|[gs]elu|silu|relu|tanh|sigmoid|swi(sh|glu)|act_and_mul|dropout|triton|rope|rotary|loss|nll|sort|"
            r"top_?k|transpose|cast|convert|quant|routing|moe_|cumsum|scan|arange|compare|where|philox|kv_?cache|"
            r"distribution|pool|upsample|tensorop|aten::(add|sub|mul|div|neg|exp|log|pow|sqrt|rsqrt|mean|sum|ones)_?$",
            re.IGNORECASE,
        ),
    ),
)
_UNNAMED = "kernels of no class"
_IDLE = {"bubble", "launch", "host"}
_NUM_FINDINGS = 5
_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of one class in one step; None on the side that knows nothing of it."""

    module: str
    op: str
    phase: str
    predicted_s: float | None
    measured_s: float | None


@dataclass(frozen=True, slots=True)
class Explanation(Shown):
    """The rows, largest difference first, and what they say in words."""

    rows: list[Row]
    predicted_s: float | None
    measured_s: float
    findings: list[str]
    unjoined: list[Row]
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
            "findings": self.findings,
            "unjoined": [asdict(row) for row in self.unjoined],
            "unjoined_frac": self.unjoined_frac,
        }


def explain(summary: Summary, predicted: Ledger | None = None) -> Explanation:
    """The measured step of a job beside the `predicted` one (the ledger of an estimate), class by class."""
    num_steps = len({step.number for step in summary.steps}) or 1
    measured = _measured(summary, num_steps)
    expected = _predicted(predicted) if predicted is not None else {}
    known = predicted is not None
    rows = [
        Row("", op, "step", expected.get(op, 0.0) if known else None, measured.get(op, 0.0))
        for op in measured.keys() | expected.keys()
        if measured.get(op) or expected.get(op)
    ]
    rows.sort(key=lambda row: (-abs((row.measured_s or 0.0) - (row.predicted_s or 0.0)), row.op))
    step_s, expected_s = sum(measured.values()), sum(expected.values()) if known else None
    findings = _in_words(rows, step_s, expected_s) + [
        one.text for one in summary.findings if len(one.ranks) == 1
    ]
    if not summary.steps:
        findings.append("no step is marked (torch.profiler's step()), so the whole trace counts as one step")
    unjoined = _unjoined(summary, measured.get(_UNNAMED, 0.0))
    if unjoined and measured[_UNNAMED] >= _SHARE * step_s:
        names = ", ".join(row.op[:40] for row in unjoined[:3])
        findings.append(
            f"kernels of no known class take {measured[_UNNAMED] / step_s:.1%} of a step: {names}"
        )
    return Explanation(rows, expected_s, step_s, findings, unjoined)


def _unjoined(summary: Summary, total_s: float) -> list[Row]:
    """The kernels of no class, the longest first; together they take `total_s` of a step."""
    own = {
        kernel.name: kernel.total_s
        for kernel in summary.kernels
        if kernel.kind == "compute" and _class_of_kernel(kernel.name) == _UNNAMED
    }
    whole = sum(own.values())
    longest = sorted(own.items(), key=lambda item: -item[1])
    return [Row("", name, "step", None, total_s * seconds / whole) for name, seconds in longest]


def _class_of_kernel(name: str) -> str:
    return next((of for of, pattern in _CLASSES if pattern.search(name)), _UNNAMED)


def _predicted(ledger: Ledger) -> dict[str, float]:
    """Seconds of each class in the step of an estimate."""
    seconds: dict[str, float] = defaultdict(float)
    for row in ledger.rows():
        seconds[_class_of_op(row)] += row["count"] * (row["time_s"] or 0.0)
    return dict(seconds)


def _class_of_op(row: Mapping[str, Any]) -> str:
    if row["collective"]:
        return str(row["collective"])
    if row["op"] == "stragglers":
        return "waiting"
    if row["op"] in _IDLE:
        return "idle"
    named = next((name for name, pattern in _CLASSES[:2] if pattern.search(row["op"])), "")
    if named:
        return named
    moved = (row["read_bytes"] or 0.0) + (row["write_bytes"] or 0.0)
    return "matmul" if (row["flop"] or 0.0) > _MATMUL_FLOP_PER_BYTE * moved else "other kernels"


def _measured(summary: Summary, num_steps: int) -> dict[str, float]:
    """Seconds of each class in a step, the mean over the ranks; they sum to the span."""
    seconds: dict[str, float] = defaultdict(float)
    wire: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for one in summary.collectives:
        for rank in one.wait_s:
            wire[rank][one.name] += one.wire_s
    for trace, parts in zip(summary.traces, summary.partitions, strict=True):
        for name, value in _kernel_classes(trace).items():
            seconds[name] += value
        whole = sum(wire[trace.rank].values())
        for name, value in wire[trace.rank].items():
            seconds[name] += parts.seconds["transfer"] * value / whole if whole else 0.0
        unnamed = 0.0 if whole else parts.seconds["transfer"]
        others = {"waiting": parts.seconds["wait"], "copies": parts.seconds["memory"], "transfer": unnamed}
        for name, value in (others | {"idle": parts.seconds["idle"]}).items():
            seconds[name] += value
    return {name: value / (num_steps * len(summary.traces)) for name, value in seconds.items()}


def _kernel_classes(trace: Trace) -> dict[str, float]:
    """Seconds of compute by class on one rank; they sum to the time in which it computed."""
    done = work(trace)
    events = np.flatnonzero(done.kind == Kind.COMPUTE)
    own = trace.duration_ns if trace.has_device else self_time(trace, parents(trace))
    sums = np.bincount(trace.label[events], weights=own[events], minlength=len(trace.labels))
    seconds: dict[str, float] = defaultdict(float)
    for label in np.flatnonzero(sums).tolist():
        name = trace.labels[label][1]
        seconds[_class_of_kernel(name)] += sums[label]
    total = sum(seconds.values())
    scale = length(done.spans[Kind.COMPUTE]) / 1e9 / total if total else 0.0
    return {name: value * scale for name, value in seconds.items()}


def _in_words(rows: list[Row], step_s: float, expected_s: float | None) -> list[str]:
    """From the predicted to the measured step, the largest differences first."""
    if expected_s is None:
        return [f"a step takes {duration(step_s)}; give --model, --cluster and --plan for a prediction"]
    found = [f"a step takes {duration(step_s)} where {duration(expected_s)} is predicted"]
    for row in rows[:_NUM_FINDINGS]:
        predicted, measured = row.predicted_s or 0.0, row.measured_s or 0.0
        if abs(measured - predicted) >= _SHARE * max(step_s, expected_s):
            more = "longer" if measured > predicted else "shorter"
            times = f"{duration(measured)} instead of {duration(predicted)}"
            found.append(f"{row.op}: {duration(abs(measured - predicted))} {more} than predicted ({times})")
    return found

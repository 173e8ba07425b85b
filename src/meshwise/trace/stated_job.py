"""Whether traces are of the job that the user states: its device, number of ranks, phase and model.

A model and plan show in the matmuls: a weight of [d_in, d_out] in those of which two sizes are d_in and
d_out, forward and in both backward products. Most FLOP of a job are in such matmuls, however the framework
fuses or splits them, unless another model ran, or another plan cut it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from meshwise.estimate.one_plan import Estimate
from meshwise.machine.hardware import MEASURED, Chip, chips
from meshwise.plan.plan import plan_text
from meshwise.trace.events import Kind, Trace
from meshwise.trace.rates import op_rates
from meshwise.trace.summary import Summary

_LEAST_FRAC = 0.5
_BACKWARD = re.compile(r"^autograd::engine|^Optimizer\.step|backward|bwd", re.IGNORECASE)


def contradictions(summary: Summary, stated: Estimate) -> list[str]:
    """What of the stated job the traces contradict, a sentence each."""
    num_ranks = max([len(summary.traces), *(trace.world_size or 0 for trace in summary.traces)])
    traces, chip = summary.traces, stated.cluster.chip
    found = _device(traces, chip), _ranks(summary, num_ranks, stated), _phase(traces, stated)
    return list(itertools.chain(*found, _model(summary, stated)))


def reduces_all(summary: Summary) -> bool:
    """Whether the ranks all-reduce and neither gather nor scatter, as data parallelism without ZeRO does."""
    names = {one.name for one in summary.collectives}
    return "all_reduce" in names and names.isdisjoint(("all_gather", "reduce_scatter"))


def _device(traces: Iterable[Trace], chip: Chip) -> Iterator[str]:
    """The traces are of another chip of the catalog, or of ranks without a device."""
    devices = {str(one.device_properties.get("name") or "") if one.has_device else "CPUs" for one in traces}
    models = {word for device in devices for word in re.findall(r"\w+", device.lower())}
    others = {model for name in chips() if (model := _model_number(name)) in models}
    if (devices == {"CPUs"} and chip.vendor != MEASURED) or (
        others and _model_number(chip.name) not in others
    ):
        yield f"the traces are of {' and '.join(sorted(devices))}, the stated cluster is of {chip.name}"


def _model_number(chip: str) -> str:
    """`h100` of `h100-80g-sxm`, `4090` of `rtx-4090`."""
    return next((word for word in chip.split("-") if re.search(r"\d", word)), chip)


def _ranks(summary: Summary, num_ranks: int, stated: Estimate) -> Iterator[str]:
    known = any(trace.world_size for trace in summary.traces)
    if num_ranks > stated.cluster.num_chips or (known and num_ranks != stated.cluster.num_chips):
        yield f"the job has {num_ranks} ranks, the stated cluster {stated.cluster.num_chips} chips"


def _phase(traces: Iterable[Trace], stated: Estimate) -> Iterator[str]:
    """Operators were recorded and none of them is of a backward, or some are and none is stated."""
    labels = [label for trace in traces for label in zip(trace.labels, trace.label_kind, strict=False)]
    recorded = any(kind == Kind.CPU_OP and name.startswith("aten::") for (_, name), kind in labels)
    trained = any(_BACKWARD.search(name) for (_, name), _ in labels)
    if recorded and stated.trains and not trained:
        yield "the traces show a forward pass alone, and a training step is stated; state the kind of pass"
    elif trained and not stated.trains:
        yield f"the traces show a backward, which the stated {stated.workload.kind} has none of"


def _model(summary: Summary, stated: Estimate) -> Iterator[str]:
    """Less than half of the FLOP of recorded matmuls is of weights of the stated model."""
    matmuls = [one for one in op_rates(summary.traces) if one.kind == "matmul"]
    seen = [(_sizes(one.shape), one.count * one.flop) for one in matmuls]
    forward = stated.ledger.where(phase="forward")
    ops = [sizes for row in forward.rows() if len(sizes := _sizes(row["shape"])) == 4]
    weights = {frozenset(sizes[2:]) for sizes in ops}
    total = sum(flop for _, flop in seen)
    fitting = sum(flop for sizes, flop in seen if not weights.isdisjoint(_pairs(sizes)))
    if total and fitting < _LEAST_FRAC * total:
        largest = max(seen, key=lambda one: one[1])[0]
        of_stated = max(ops, key=lambda sizes: sizes[1] * sizes[2] * sizes[3])[1:]
        yield (
            f"{fitting / total:.0%} of the matmul FLOP in the traces has sizes of {stated.model.name} under "
            f"{plan_text(stated.plan) or 'tp=1'}: the largest there is {_text(largest)}, of the stated job "
            f"{_text(of_stated)}"
        )


def _pairs(sizes: Iterable[int]) -> Iterator[frozenset[int]]:
    return map(frozenset, itertools.combinations(sizes, 2))


def _sizes(shape: str) -> list[int]:
    """The numbers of a text like 1x512x4096x1024."""
    return [int(float(size)) for size in re.findall(r"[\d.e+]+", shape)]


def _text(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))

"""The predicted step beside the measured ones in one timeline for ui.perfetto.dev."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwise.core.errors import DataError
from meshwise.estimate.one_plan import Estimate
from meshwise.report.estimate_trace import timeline_events
from meshwise.trace.merge import Merged, write_merged
from meshwise.trace.steps import marks, whole_steps
from meshwise.trace.summary import Summary

_FIRST_PID = 1_000_000


def write_both(summary: Summary, estimate: Estimate, path: Path) -> Merged:
    """Write the traces of a job and, above them, the predicted step, which begins with the first whole one.

    Raises DataError where no step is marked or the file cannot be written, PlanError for a step without a
    backward.
    """
    whole = whole_steps(summary.steps)
    if not whole:
        raise DataError("no whole step is marked in the traces; call the profiler's step() after each one")
    offsets = summary.alignment.offsets_ns
    marked = marks(summary.traces)
    on_step = {rank: one.start_ns[one.number == whole[0]] for rank, one in marked.items()}
    begins = [int(start[0]) - offsets[rank] for rank, start in on_step.items() if len(start)]
    shift_us = (min(begins) - summary.origin_ns) / 1000
    beside = [_placed(event, shift_us) for event in timeline_events(estimate)]
    return write_merged(summary, path, beside=beside)


def _placed(event: dict[str, Any], shift_us: float) -> dict[str, Any]:
    """An event of the prediction as one of a process of its own, above the measured ones."""
    moved = event | {"pid": _FIRST_PID + event["pid"]}
    if "ts" in event:
        moved["ts"] = event["ts"] + shift_us
    if event["name"] == "process_name":
        moved["args"] = {"name": f"predicted {event['args']['name']}"}
    if event["name"] == "process_sort_index":
        moved["args"] = {"sort_index": event["args"]["sort_index"] - _FIRST_PID}
    return moved

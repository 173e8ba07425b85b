"""Timelines for ui.perfetto.dev or chrome://tracing: a pipeline, the step of a plan.

The Trace Event format: one process per rank with one track, a complete event (`ph: X`, microseconds)
per action, and metadata events (`M`) that name processes and tracks. Times are rounded to whole
nanoseconds before they are written, so that adjacent events never overlap. The two
actions of a DualPipe pair have the same extent and show as one inside the other.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshwise.core.errors import PlanError
from meshwise.core.files import write_bytes
from meshwise.core.refusals import refuse
from meshwise.cost.simulate import KINDS, Timeline
from meshwise.estimate.one_plan import Estimate
from meshwise.estimate.step import play
from meshwise.plan.stages import Stage, chunks, layers_of_chunks

_CATEGORIES = ("forward", "backward", "backward_input", "backward_weight")
"""Of the kinds of actions, in the order of `KINDS`."""


def write_events(events: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Write events as one trace file, whole or not at all. Raises DataError if it cannot be written."""
    write_bytes(Path(path), msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))


def metadata(name: str, rank: int, args: dict[str, Any]) -> dict[str, Any]:
    """A metadata event about the process of `rank`."""
    return {"ph": "M", "name": name, "pid": rank, "tid": 0, "args": args}


def complete(
    name: str, category: str, rank: int, start_ns: int, end_ns: int, args: dict[str, Any]
) -> dict[str, Any]:
    """A complete event on the track of `rank`; times in whole nanoseconds, written as microseconds."""
    event = {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": 0}
    return event | {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000, "args": args}


# --- the step of a plan --------------------------------------------------------------------------
#
# The pipeline is simulated (`estimate.step`), microbatch by microbatch. What happens once a step follows on
# every rank, as long as the slowest needs: the data-parallel exchange that nothing hides, the optimizer, and
# the wait for stragglers. Ranks of one stage that differ only along tp, cp or dp do the same at the same
# time, so one of them stands for all.


def write_timeline(estimate: Estimate, path: str | Path) -> None:
    """Write the timeline of an `Estimate` to `path`, whole or not at all.

    Raises PlanError for a step without a backward, DataError for a place that cannot be written.
    """
    write_events(timeline_events(estimate), path)


def timeline_events(estimate: Estimate) -> list[dict[str, Any]]:
    """The events of all pipeline ranks in the Trace Event format."""
    refuse("timeline", PlanError, estimate=estimate)
    timeline = play(estimate.step, hop_s=float(estimate.step.hop_s))
    names = _names(timeline, chunks(estimate.model, layers_of_chunks(estimate.model, estimate.mesh)))
    return [*names, *action_events(timeline), *_once_a_step(estimate, timeline)]


def _names(timeline: Timeline, held: list[Stage]) -> Iterator[dict[str, Any]]:
    """The name of each rank and of its track, and the layers that it holds."""
    for rank in range(timeline.num_ranks):
        mine = [held[stage] for stage in np.unique(timeline.stage[timeline.rank == rank])]
        layers = f"{int(sum(chunk.num_layers for chunk in mine))} layers"
        ends = ["embedding"] * any(chunk.embeddings for chunk in mine), ["head"] * any(c.heads for c in mine)
        yield metadata("process_name", rank, {"name": f"rank {rank}"})
        yield metadata("process_sort_index", rank, {"sort_index": rank})
        yield metadata("process_labels", rank, {"labels": " + ".join([*ends[0], layers, *ends[1]])})
        yield metadata("thread_name", rank, {"name": f"pipeline {timeline.schedule}"})


def action_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Every rank's actions in the order of their start."""
    ends_ns = (np.rint(1e9 * t).astype(np.int64) for t in (timeline.start_s, timeline.end_s))
    columns = (timeline.rank, timeline.kind, timeline.microbatch, timeline.stage, timeline.chunk, *ends_ns)
    for rank, kind, microbatch, stage, chunk, start, end in zip(*(c.tolist() for c in columns), strict=True):
        args = {"microbatch": microbatch, "stage": stage, "chunk": chunk}
        yield complete(f"{KINDS[kind]}{microbatch}", _CATEGORIES[kind], rank, start, end, args)


def _once_a_step(estimate: Estimate, timeline: Timeline) -> Iterator[dict[str, Any]]:
    step = estimate.step
    parts = {
        "data-parallel exchange": ("comm_dp", step.comm_dp_s),
        estimate.plan.optimizer: ("optimizer", step.optimizer_s),
        "stragglers": ("stragglers", step.straggler_s),
    }
    ends_s = np.cumsum([timeline.makespan_s, *(float(seconds) for _, seconds in parts.values())])
    ends_ns = np.rint(1e9 * ends_s).astype(np.int64).tolist()
    for rank in range(timeline.num_ranks):
        for (name, (category, _)), start, end in zip(parts.items(), ends_ns, ends_ns[1:], strict=False):
            if end > start:
                yield complete(name, category, rank, start, end, {})

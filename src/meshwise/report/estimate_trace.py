"""The step of a plan as a timeline that ui.perfetto.dev opens: one process per pipeline rank.

The pipeline is simulated (`estimate.step`), microbatch by microbatch. What happens once a step follows on
every rank, as long as the slowest needs: the data-parallel exchange that nothing hides, the optimizer, and
the wait for stragglers. Ranks of one stage that differ only along tp, cp or dp do the same at the same
time, so one of them stands for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.core.errors import PlanError
from meshwise.cost.simulate import Timeline
from meshwise.estimate.one_plan import Estimate
from meshwise.estimate.step import play
from meshwise.plan.stages import Stage, chunks, layers_of_chunks
from meshwise.report.chrome_trace import chrome_events, complete, metadata, write_events


def write_timeline(estimate: Estimate, path: str | Path) -> None:
    """Write the timeline of an `Estimate` to `path`, whole or not at all.

    Raises PlanError for a step without a backward, DataError for a place that cannot be written.
    """
    write_events(timeline_events(estimate), path)


def timeline_events(estimate: Estimate) -> list[dict[str, Any]]:
    """The events of all pipeline ranks in the Trace Event format."""
    if not estimate.trains:
        raise PlanError(f"a timeline shows a training step, not {estimate.workload.kind}; use kind train")
    hop_s = float(estimate.step.hop_s)
    timeline = play(estimate.model, estimate.mesh, estimate.step, estimate.machine, hop_s=hop_s)
    held = chunks(estimate.model, layers_of_chunks(estimate.model, estimate.mesh))
    return [*chrome_events(timeline), *_labels(timeline, held), *_once_a_step(estimate, timeline)]


def _labels(timeline: Timeline, held: list[Stage]) -> Iterator[dict[str, Any]]:
    """The layers of each rank, shown beside its name."""
    for rank in range(timeline.num_ranks):
        mine = [held[stage] for stage in np.unique(timeline.stage[timeline.rank == rank])]
        layers = f"{int(sum(chunk.num_layers for chunk in mine))} layers"
        ends = ["embedding"] * any(chunk.embeddings for chunk in mine), ["head"] * any(c.heads for c in mine)
        yield metadata("process_labels", rank, {"labels": " + ".join([*ends[0], layers, *ends[1]])})


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

"""Draws the figures of docs/pipeline.md and prints its tables: `python docs/figures/pipeline.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from meshwise.cost import schedule as closed_form
from meshwise.cost.simulate import Timeline, simulate
from meshwise.report.pipeline_plot import plot_timelines

CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}


def timeline(schedule: str, pp: int, m: int, **options: object) -> Timeline:
    """A schedule with F = B = W = 1 per stage, in chunks where the schedule has them."""
    v = CHUNKS.get(schedule, 1)
    return simulate(schedule, 1 / v, 1 / v, 1 / v, pp=pp, m=m, v=v, **options)  # type: ignore[arg-type]


def table(pp: int, m: int) -> str:
    """Bubble and memory of every schedule, played, with F = B = W and free communication."""
    lines = [
        "| schedule | published bubble | bubble, all ranks wait | share of the phase "
        "| peak in flight by rank | weights per rank |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for index, name in enumerate(closed_form.SCHEDULES):
        played = timeline(name, pp, m)
        published = float(closed_form.published_bubble_s(index, pp, CHUNKS.get(name, 1), 1.0, 1.0, 1.0))
        bubble = played.idle_s.max()
        peaks = ", ".join(f"{peak:g}" for peak in played.peak_in_flight)
        lines.append(
            f"| `{name}` | {published:g} | {bubble:g} | {bubble / played.makespan_s:.1%} | {peaks} "
            f"| {closed_form.weight_copies(index):g}× |"
        )
    return "\n".join(lines)


def hops_table(pp: int, microbatches: tuple[int, ...]) -> str:
    """How many hops between ranks the phase waits for, played, with short hops."""
    hop_s = 2.0**-10
    lines = [
        "| schedule | " + " | ".join(f"m = {m}" for m in microbatches) + " |",
        "| --- |" + " --- |" * len(microbatches),
    ]
    for name in closed_form.SCHEDULES:
        waits = [
            (timeline(name, pp, m, p2p_s=hop_s).makespan_s - timeline(name, pp, m).makespan_s) / hop_s
            for m in microbatches
        ]
        lines.append(f"| `{name}` | " + " | ".join(f"{wait:g}" for wait in waits) + " |")
    return "\n".join(lines)


def main() -> None:
    here = Path(__file__).parent
    titles = {}
    for name in closed_form.SCHEDULES:
        played = timeline(name, 4, 8)
        peak = played.peak_in_flight.max()
        titles[f"{name}: bubble {played.idle_s.max():g}, at most {peak:g} microbatches in flight"] = played
    plot_timelines(titles, here / "pipeline_schedules.png", unit_name="F = B = W of one stage")

    head = np.array([1.0, 1.0, 1.0, 1.5])
    plot_timelines(
        {
            "1f1b, equal stages": timeline("1f1b", 4, 8),
            "1f1b, last stage 1.5 times the work (LM head)": simulate("1f1b", head, head, head, pp=4, m=8),
            "1f1b, rank 1 a straggler, 1.3 times slower": timeline("1f1b", 4, 8, slowdown=[1, 1.3, 1, 1]),
            "1f1b, a hop takes 0.3": timeline("1f1b", 4, 8, p2p_s=0.3),
            "1f1b, a hop takes 0.3 and holds the sender": timeline(
                "1f1b", 4, 8, p2p_s=0.3, p2p_overlaps=False
            ),
            "interleaved, a hop takes 0.3": timeline("interleaved", 4, 8, p2p_s=0.3),
        },
        here / "pipeline_uneven.png",
        unit_name="F = B = W of one stage",
    )
    print(table(8, 32), hops_table(8, (16, 64, 256)), sep="\n\n")


if __name__ == "__main__":
    main()

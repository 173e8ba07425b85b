"""A step of post-training as a page: phases of what was asked, or of every candidate, one bar each."""

from __future__ import annotations

import itertools

from meshwise.core.units import duration
from meshwise.report.chart import COLORS, Bars, Chart, ChartAxis, Picture
from meshwise.report.html import Page, Section, Text
from meshwise.report.rl_table import phases_table, split_table
from meshwise.rl.answer import RlAnswer
from meshwise.rl.step import PHASES, RlStep


def rl_page(answer: RlAnswer) -> Page:
    """The step, and where the layout was open every candidate."""
    step = answer.step
    of = step.job
    headline = "; ".join(step.problems) or "a step takes " + duration(step.step_s)
    sections: list[Section] = [_phases(answer)] if step.step_s is not None else []
    if answer.split is not None:
        sections.append(split_table(answer.split))
    sections.append(Text("Notes", step.notes))
    title = f"{of.model.name} post-trained on {of.cluster.num_chips} x {of.cluster.chip.name}"
    return Page(title, headline, sections, not answer.is_no)


def rl_picture(answer: RlAnswer) -> Picture:
    """The phases."""
    return Picture([[_phases(answer)]], answer.step.job.model.name)


def _phases(answer: RlAnswer) -> Chart:
    steps = list(answer.split.best) if answer.split else [answer.step]
    steps = [step for step in steps if step.step_s is not None]
    names = [f"{i}: {_name(step)}" for i, step in enumerate(steps, 1)]
    starts, marks = [0.0] * len(steps), []
    for phase, color in zip(PHASES, itertools.cycle(COLORS), strict=False):
        values = [step.phases_s[phase] for step in steps]
        marks.append(Bars(names, values, [color] * len(steps), list(starts), phase))
        starts = [start + value for start, value in zip(starts, values, strict=True)]
    longest, seconds = max(answer.step.phases_s.items(), key=lambda item: item[1])
    finding = f"The longest phase of the first is {longest}, {duration(seconds)}."
    axis = ChartAxis("a step", "s", low=0.0)
    return Chart(
        "Phases of a step",
        marks,
        axis,
        ChartAxis(),
        finding,
        phases_table(answer.step),
        120 + 30 * len(steps),
    )


def _name(step: RlStep) -> str:
    split = f"{step.gpus['rollout']} + {step.gpus['train']}" if step.job.is_split else "shared"
    return f"{step.job.mode}, {split}"

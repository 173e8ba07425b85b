"""A step of post-training by reinforcement: phases, memory, cost, and every candidate of an open layout."""

import itertools
from collections.abc import Iterator, Sequence

from meshwise.core.refusals import told
from meshwise.core.units import duration, with_prefix
from meshwise.report.answer import COLORS, Bars, Chart, ChartAxis, Page, Section, Text
from meshwise.report.table import TABLES, WORDS, Table, percent, records_table
from meshwise.rl.best_split import RlAnswer
from meshwise.rl.step import PHASES, RlStep
from meshwise.rl.step_log import RlExplanation
from meshwise.search.search import MEMORY_FRAC

_OF_PHASES: dict[str, str] = WORDS["rl_phases"]


def parts(answer: RlAnswer) -> Iterator[Section]:
    """The step, its phases, memory and cost, and all candidates of an open layout."""
    step, document = answer.step, answer.to_json()
    names = document | {"of": step.job, "staler": answer.staler if answer.best else None}
    names |= {"scored": ", ".join(step.job.scorers) or "none"}
    names |= {"training": document["train_plan"] or "dp", "rollout": document["rollout_plan"] or "tp=1"}
    yield from told("job of rl", **names)
    if step.step_s is not None:
        yield from told("step of rl", **names)
        yield _phases(answer)
        names |= {f"{pool}_idle": percent(frac) for pool, frac in step.idle_frac.items()}
        yield from told("idle time of rl", **names)
    if answer.cost:
        yield "; ".join(told("costs of rl", cost=answer.cost))
    for pool, held in (("rollout", step.engine_bytes), ("training", step.trainer_bytes)):
        each = ", ".join(f"{name} {with_prefix(part, 'B')}" for name, part in held.items() if part)
        yield f"{pool} GPU: {with_prefix(sum(held.values()), 'B')} ({each})"
    yield Text("Notes", step.notes, "note: ")
    if answer.best:
        yield from _split(answer)


def page(answer: RlAnswer) -> Page:
    """The same as a page."""
    of, first = answer.step.job, answer.step.step_s
    headline = "; ".join(answer.step.problems) or f"a step takes {duration(first)}"
    title = f"{of.model.name} post-trained on {of.cluster.num_chips} x {of.cluster.chip.name}"
    return Page(title, headline, list(parts(answer)), not answer.is_no)


def _split(split: RlAnswer) -> Iterator[Section]:
    """Every candidate that was priced, the best first; what other splits take, and what more memory gains."""
    yield _candidates([*split.best, *split.on_fewer], split.front)
    splits = ", ".join(f"{gpus}: {duration(about_s)}" for gpus, about_s in split.about_s)
    yield from told("candidates of rl", of=split, splits=splits, share=MEMORY_FRAC)


def _phases(answer: RlAnswer) -> Chart:
    """The phases of what was asked, or of every candidate, one bar each; the table is of the first."""
    steps = [step for step in answer.best or (answer.step,) if step.step_s is not None]
    names = [f"{i}: {name}" for i, name in enumerate(_names(steps), 1)]
    starts, marks = [0.0] * len(steps), []
    for phase, color in zip(PHASES, itertools.cycle(COLORS), strict=False):
        values = [step.phases_s[phase] for step in steps]
        marks.append(Bars(names, values, [color] * len(steps), list(starts), phase))
        starts = [start + value for start, value in zip(starts, values, strict=True)]
    phases, total = answer.step.phases_s, answer.step.step_s or 1.0
    longest = max(phases, key=lambda name: phases[name])
    several = " Bars are the first rows of the candidates." * (len(steps) > 1)
    finding = f"The longest phase of the first is {longest}, {duration(phases[longest])}.{several}"
    spent = {name: seconds for name, seconds in phases.items() if seconds}
    rows = [(name, duration(s), percent(s / total), _OF_PHASES[name]) for name, s in spent.items()]
    table = Table("", ("phase", "time", "share", "what"), rows, left={"phase", "what"})
    axis, height = ChartAxis("time of a step", "s", low=0.0), 120 + 30 * len(steps)
    return Chart("Phases of a step", marks, axis, finding=finding, table=table, height=height)


def _candidates(steps: Sequence[RlStep], front: Sequence[RlStep] = ()) -> Table:
    """A row for each candidate; those of the front are marked."""
    return records_table("Candidates", steps, TABLES["candidates"], in_front=front)


def _names(steps: Sequence[RlStep]) -> Iterator[str]:
    """What tells each candidate from the others, as their table says it; of one its mode."""
    of = _candidates(steps)
    told = [one for one in zip(of.columns, zip(*of.rows, strict=True), strict=True) if one[0] != "a step"]
    differ = [(name, cells) for name, cells in told if len({*cells}) > 1] or told[:1]
    return (", ".join(f"{name} {cells[i]}" for name, cells in differ) for i in range(len(steps)))


# --- a step log beside the prediction ------------------------------------------------------------


def log_parts(found: RlExplanation) -> Iterator[Section]:
    """Each phase as measured and as predicted, and findings."""
    rows = [row for row in found.rows if row["measured_s"] or row["predicted_s"]]
    step_s = found.step.step_s if found.step else None
    rows.append({"phase": "step", "measured_s": found.log.step_s, "predicted_s": step_s})
    yield f"{found.log.num_steps} steps"
    yield records_table("", rows, TABLES["step log"])
    yield from found.findings

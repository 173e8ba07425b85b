"""The best plan of each of many machines: tables, and a picture of their speed and of what a token costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwise.core.files import read_catalog
from meshwise.core.units import duration, with_prefix
from meshwise.estimate.token_budget import TokenBudget
from meshwise.plan.plan import plan_text
from meshwise.report import chart as plot
from meshwise.report.answer import Section
from meshwise.report.search import run_cells
from meshwise.report.table import Table
from meshwise.search.study import MEASURES, Study


def parts(study: Study, budget: TokenBudget | None = None) -> Iterator[Section]:
    """Print the best plan of each machine, per GPU against the first, and the fronts it is on."""
    budget = budget or TokenBudget()
    fronts = {measure: set(study.front(measure, budget)) for measure in MEASURES}
    has_goal = study.goal.deadline is not None or study.goal.spend is not None
    found = [(i, point, point.best) for i, point in enumerate(study.points) if point.best is not None]
    runs = {i: study.goal.run(best, budget) for i, _, best in found}
    cells = {i: run_cells(run["with_failures"] if has_goal else run) for i, run in runs.items()}
    keys = list(study.points[0].changes) if study.points else []
    figures = []
    for i, point, plan in found:
        rate, joules = plan.tokens_per_s, point.measures(budget)["joules_per_token"]
        per_gpu = "" if (speedup := study.speedup(i)) is None else f"{speedup:.1%}"
        named = " ".join(FRONTS[measure] for measure in MEASURES if i in fronts[measure])
        row = duration(plan.step_s), f"{plan.mfu:.1%}", with_prefix(rate, "", 3), per_gpu
        figures.append((*point.changes.values(), *row, with_prefix(joules, "J", 3), named))
    columns = (*keys, "step", "MFU", "tokens/s", "per GPU", "J/token", "front")
    yield Table("", columns, figures, left=("front",))
    run_columns = next(iter(cells.values()), {})
    plans = [
        (
            *point.changes.values(),
            *(cells[i].values() if i in cells else [None] * len(run_columns)),
            best.workload.microbatch if (best := point.best) else None,
            plan_text(best.plan) if best else "nothing fits",
        )
        for i, point in enumerate(study.points)
    ]
    yield Table("", (*keys, *run_columns, "microbatch", "plan"), plans, left=("plan",))
    yield "front: no other machine has both a shorter time per token and less of it"
    if has_goal:
        yield _choice(study, study.chosen(budget), cells)


def _choice(study: Study, chosen: int | None, runs: Mapping[int, Mapping[str, str]]) -> str:
    """The point that meets deadline and budget, with failures, or that none does."""
    if chosen is None:
        return "no machine keeps the deadline and the budget, failures included"
    point, run = study.points[chosen], runs[chosen]
    machine = ", ".join(f"{key}={value}" for key, value in point.changes.items())
    taken = ", ".join(f"{value} {name}" if name == "days" else value for name, value in run.items())
    by = "fewest days" if study.goal.deadline is None else "fewest GPU-hours"
    return f"chosen, {by}: {machine} ({taken}, failures included)"


FRONTS: dict[str, str] = read_catalog("words.toml")["fronts"]
"""What the fronts are called in a table."""


def picture(study: Study) -> plot.Picture:
    """Machines by their speed, and by what a token costs on them."""
    found = [(point, point.measures()) for point in study.points if point.best is not None]
    names = [", ".join(f"{key} {value}" for key, value in point.changes.items()) for point, _ in found]
    chips = [values["num_chips"] for _, values in found]
    tokens_per_s = [1.0 / values["s_per_token"] for _, values in found]
    if len(set(chips)) == len(chips) > 1:
        ideal = [tokens_per_s[0] * num / chips[0] for num in chips]
        best = plot.Series(chips, tokens_per_s, "best plan", size=7)
        marks = [plot.Series(chips, ideal, "in proportion to the GPUs", plot.OTHER_COLOR, "dash"), best]
        axis = plot.ChartAxis("GPUs", log=True, numbers="count", ticks=chips)
        speed = plot.Chart("Speed", marks, axis, plot.ChartAxis("tokens/s", log=True))
    else:
        bars = plot.Bars(names, tokens_per_s, [plot.COLORS[0]] * len(names))
        speed = plot.Chart("Speed", [bars], plot.ChartAxis("tokens/s", low=0.0))
    front = {id(study.points[i]) for i in study.front("gpu_s_per_token")}
    hours = [1e6 / 3600 * values["gpu_s_per_token"] for _, values in found]
    colors = [plot.FRONT_COLOR if id(point) in front else plot.COLORS[0] for point, _ in found]
    dots: list[plot.Mark] = [
        plot.Series([x], [y], color=color, line="", size=7)
        for x, y, color in zip(tokens_per_s, hours, colors, strict=True)
    ]
    axes = plot.ChartAxis("tokens/s", log=True), plot.ChartAxis("GPU-hours a million tokens", low=0.0)
    cost = plot.Chart(
        "Cost", [*dots, plot.Names(tokens_per_s, hours, names, colors)], *axes,
        "Red: no other machine is both faster and cheaper.", height=360,
    )  # fmt: skip
    return plot.Picture([[speed, cost]])

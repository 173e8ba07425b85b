"""What a search found: the fastest plans that fit, what they lean on; on a page the space as a picture.

What a card fine-tunes is a table too: a row a model and method that fits, the largest that do not below.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any
from urllib.parse import urlencode

from meshwise.core.columns import grouped
from meshwise.core.refusals import told
from meshwise.core.units import dollars, duration, long_duration, mass, parameters, with_prefix
from meshwise.estimate.adverse import Adversity, together
from meshwise.estimate.one_plan import Estimate
from meshwise.estimate.token_budget import TokenBudget
from meshwise.launch.arguments import with_version
from meshwise.launch.runs import running
from meshwise.launch.settings import TRAINING
from meshwise.plan.plan import DATA_PARALLEL, plan_text
from meshwise.report import answer as plot
from meshwise.report.answer import Page, PageLink, Section, Text
from meshwise.report.table import TABLES, WORDS, Table, difference_text, pair_row, records_table
from meshwise.search.basis import NOTABLE, Basis
from meshwise.search.best_plans import Found
from meshwise.search.difference import Reason
from meshwise.search.fit_card import CardFit, CardRun
from meshwise.search.next_step import largest_cost
from meshwise.search.search import Result
from meshwise.search.study import MEASURES, Study


def parts(
    result: Result,
    budget: TokenBudget | None = None,
    shown: Callable[[str, int], object] = lambda plan, _: plan or DATA_PARALLEL,
) -> Iterator[Section]:
    """How many plans there were, the fastest that fit, and how a plan differs that was asked for.

    `budget`: a run whose length, cost and energy are shown too; `shown`: how a plan (and its microbatch) is.
    """
    budget = budget or TokenBudget()
    yield Text("", how_many(result))
    if result.best:
        yield Text("", list(answer_lines(result)))
        yield plans_table(result, shown)
        runs = [run_cells(budget.run(found)) for found in result.best]
        if runs[0]:
            lines = [(*run.values(), plan_text(of.plan)) for run, of in zip(runs, result.best, strict=True)]
            title = "what it costs" + ", failures included" * (budget.tokens is not None)
            yield Table(title, (*runs[0], "plan"), lines, left=("plan",))
    else:
        yield Text("", why_none(result))
    if result.not_tried:
        larger = ", ".join(f"{key} above {most}" for key, most in result.not_tried.items())
        yield f"not tried: {larger} (--no-capped, or KEY=*)"
    yield Text("Notes", result.notes, "note: ")
    if result.beside is not None and result.best:
        yield _term_by_term(result.best[0], result.beside)
        yield from [why_slower(found)] if (found := result.reasons) else []


def page(
    result: Result, *, color: str = "tp", job: Mapping[str, str] | None = None, most: int = 2000,
    budget: TokenBudget | None = None,
) -> Page:  # fmt: skip
    """What a search found; its picture has at most `most` plans of the space, colored by the key `color`.

    `job`: the state of the page in the browser, so that plans lead to it.
    """
    if not result.best:
        headline, *changes = why_none(result)
        counts, _, *others = parts(result)
        return Page("Search", headline, [Text("", changes), counts, *others], ok=False)
    best = result.best[0]

    def state(text: str, microbatch: int) -> dict[str, str]:
        return {**(job or {}), "plan": text, "microbatch": str(microbatch)}

    pinned = state(plan_text(best.plan), best.workload.microbatch).items()
    beside = {f"a.{name}": value for name, value in pinned}

    def link(text: str, microbatch: int) -> PageLink:
        return PageLink(text or DATA_PARALLEL, "#explore?" + urlencode(state(text, microbatch) | beside))

    title = f"{best.model.name} on {best.cluster.num_chips} x {best.cluster.chip.name}"
    rank = f"{_first(result)} of {result.plans_considered:,} plans"
    headline = f"{rank}: {_with_step(result, best, result.bases[0])} a step, MFU {best.mfu:.1%}"
    space, about = _space(result, result.sample(most), color, link), "Pareto front: less memory costs time"
    pareto = records_table(about, result.pareto, TABLES["front"], link=link, is_robust=result.robust)
    counts, answers, plans, *others = parts(result, shown=link, budget=budget)
    return Page(title, headline, [answers, plans, space, *others, pareto, counts])


def how_many(result: Result) -> list[str]:
    """How many plans there are, how many of them were priced, and how many of those fit."""
    ruled_out = result.plans_considered - result.plans_priced
    return told("plans of a search", of=result, ruled_out=ruled_out if result.complete else 0)


def answer_lines(result: Result) -> Iterator[str]:
    """The first plan, the first that a framework runs today and the simplest as fast, where they differ.

    The one that a framework runs comes first where it is as fast.
    """
    what, first = _first(result), (result.best[0], result.bases[0])
    named, longer_frac = {what: first}, result.slower_frac or 0.0
    if result.runnable and longer_frac >= NOTABLE:
        named[f"{what} that a framework runs, {longer_frac:.1%} longer"] = result.runnable
    elif result.runnable and longer_frac > 0.0:
        named = {f"{what} that a framework runs": result.runnable, f"{what}, by {longer_frac:.2%}": first}
    for name, (found, of) in named.items():
        yield f"{name}: {_told(result, found, of)}"
        yield f"  leans on {of.leans_on}"
    if result.runnable is None and not first[1].runs_in:
        model, chip, seq = first[0].model, first[0].cluster.chip, int(first[0].mesh.seq)
        able = ", ".join(name for name in running(model, chip, seq) if name in TRAINING)
        yield from told("run by none", able=able, model=model, chip=chip)
    if result.offloaded:
        share = result.ranked_s(*result.offloaded) / result.ranked_s(*first)
        yield f"with states on the host, {1.0 - share:.0%} less: {_told(result, *result.offloaded)}"
    if result.simplest and result.simplest[0].plan != next(iter(named.values()))[0].plan:
        yield f"as fast, as far as the interval tells, and simplest: {_told(result, *result.simplest)}"


def _first(result: Result) -> str:
    """What the first plan of a search is."""
    return "most robust" if result.robust else "fastest"


def _told(result: Result, found: Estimate, of: Basis) -> str:
    """A plan with the step by which it is ranked, and who runs it."""
    runs_in = f"runs in {', '.join(map(with_version, of.runs_in))}" if of.runs_in else "no framework runs it"
    return f"{_with_step(result, found, of)}; {runs_in}"


def _with_step(result: Result, found: Estimate, of: Basis) -> str:
    step = duration(found.step_s)
    taken = f"robust {duration(of.robust_s)} ({step} as estimated)" if result.robust else step
    return f"{plan_text(found.plan) or DATA_PARALLEL}, microbatch {found.workload.microbatch}, {taken}"


def plans_table(result: Result, shown: Callable[[str, int], object]) -> Table:
    """The fastest plan of each family; `shown` makes the cell of a plan of its text and microbatch."""
    found = [{"of": of, "basis": basis} for of, basis in zip(result.best, result.bases, strict=True)]
    return records_table("", found, TABLES["plans"], shown=shown, largest_cost=largest_cost)


def run_cells(run: Mapping[str, Any]) -> dict[str, str]:
    """What a run of tokens takes, failures included, as far as it is known."""
    run = run.get("with_failures", run)
    shown = {
        "reason": ("days", lambda reason: "never ends"),
        "days": ("days", lambda days: f"{days:,.0f}" if days >= 100 else f"{days:.3g}"),
        "usd_per_million_tokens": ("$ a M tokens", lambda usd: f"{usd:.3g}"),
        "cost": ("cost", dollars),
        "energy_joules": ("energy", lambda joules: with_prefix(joules / 3600, "Wh", 3)),
        "co2_kg": ("CO2", mass),
    }
    return {title: show(run[key]) for key, (title, show) in shown.items() if key in run}


def search_rows(document: Mapping[str, Any]) -> Iterator[list[Any]]:
    """The plans of the document of a search or a study as a table, its head first."""
    best = ({"kind": "best", **_flat(one)} for one in document.get("best", ()))
    front = ({"kind": "pareto", **one} for one in document.get("pareto", ()))
    found = [*map(_flat, document.get("points", ())), *best, *front]
    columns = list(dict.fromkeys(key for one in found for key in one))
    yield columns
    yield from ([one.get(key) for key in columns] for one in found)


def _flat(one: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's numbers alone, those of its memory, time and run with failures by name."""
    scalars = {key: value for key, value in one.items() if not isinstance(value, dict)}
    flat = {key: " ".join(value) if isinstance(value, list) else value for key, value in scalars.items()}
    flat |= {f"with_failures_{name}": value for name, value in one.get("with_failures", {}).items()}
    flat |= {f"{name}_s": seconds for name, seconds in one.get("time_s", {}).items()}
    return flat if "time_s" not in one else flat | {"memory_bytes": one["memory_bytes"]["total"]}


def _term_by_term(best: Estimate, beside: Estimate) -> Table | str:
    """The best plan and the one asked for: the whole first, then the terms, the largest difference first."""
    asked = plan_text(beside.plan) or "default plan"
    if (best.plan, best.workload) == (beside.plan, beside.workload):
        return f"the best plan is the one asked for: {asked}"
    terms = sorted(best.time_s, key=lambda name: -abs(beside.time_s[name] - best.time_s[name]))
    seconds = {"step": (best.step_s, beside.step_s)}
    seconds |= {name: (best.time_s[name], beside.time_s[name]) for name in terms}
    sizes = (best.memory_bytes["total"], beside.memory_bytes["total"])
    known = {name: pair for name, pair in seconds.items() if max(pair) > 1e-3 * best.step_s}
    rows = [pair_row(name, *pair, duration) for name, pair in known.items()]
    rows.insert(1, pair_row("memory needed", *sizes, lambda size: with_prefix(size, "B")))
    return Table(f"the best plan beside the one asked for ({asked})", ("", "best", "asked for", "more"), rows)


def why_slower(found: Sequence[Reason]) -> Table:
    """What leads from the plan asked for to the best, key by key."""

    def mostly(reason: Reason) -> str:
        moved = [name for name, more in reason.more_s.items() if abs(more) > 0.1 * abs(reason.gain_s)]
        return ", ".join(f"{name} {difference_text(reason.more_s[name])}" for name in moved[:2])

    return records_table("from the plan asked for to the best", found, TABLES["reasons"], mostly=mostly)


def why_none(result: Result) -> list[str]:
    """Why there is no plan, how far the nearest is from fitting, and what would fit after which change."""
    miss = result.nearest_miss
    if miss is None:
        return [f"no plan: {result.reason}"]
    short = with_prefix(miss.memory_bytes - result.capacity_bytes, "B")
    lines = [
        f"none fits: the nearest plan is {short} short of {with_prefix(result.capacity_bytes, 'B')}: "
        f"{plan_text(miss.plan)}, microbatch {miss.microbatch}"
    ]
    for change in result.changes:
        what = f"with another {change.key}" if change.key else f"on {change.num_chips:,} chips"
        on_host = f" and {with_prefix(change.host_bytes, 'B')} of each host" if change.host_bytes else ""
        found = change.found
        size = f"{with_prefix(found.memory_bytes, 'B')}{on_host}, {duration(found.step_s)} a step"
        plan = plan_text(found.plan) or "the default plan"
        lines.append(f"fits {what}: {plan}, microbatch {found.microbatch} ({size})")
    return lines if result.changes else [*lines, "use larger chips, or a shorter sequence"]


def _space(
    result: Result, sample: Sequence[Found], color: str, link: Callable[[str, int], PageLink]
) -> plot.Chart:
    """Step time against memory: a sample of the space, colored by the key `color`, and the Pareto front."""
    by_value = grouped(sample, lambda one: one.values.get(color))
    values = sorted(by_value, key=lambda value: (isinstance(value, str), value is None, value))
    marks: list[plot.Mark] = []
    for value, shade in zip(values, itertools.cycle(plot.COLORS), strict=False):
        points = [(of.step_s, of.memory_bytes, of.text, of.microbatch) for of in by_value[value]]
        marks.append(_plans(f"{color}={value}", points, link, color=shade, line="", opacity=0.55))
    front = [(one.step_s, one.memory_bytes, plan_text(one.plan), one.microbatch) for one in result.pareto]
    marks.append(_plans("Pareto front", front, link, color=plot.FRONT_COLOR))
    shades = plot.INK, "#cc00cc", "#009999"  # of no value
    for (name, point), shade in zip(_marked(result), shades, strict=False):
        marks.append(_plans(name, [point], link, color=shade, **MARKED))
    named = front[:: max(len(front) // 8, 1)]
    texts = [f"{text or 'default plan'}, microbatch {microbatch}" for _, _, text, microbatch in named]
    x, y = [one[0] for one in named], [one[1] for one in named]
    marks.append(plot.Names(x, y, texts, [plot.INK] * len(named)))
    marks.append(plot.Bound(result.capacity_bytes, "y", line="dot"))
    finding = (
        f"{len(sample):,} plans drawn from {result.plans_considered:,}; those below the dotted line fit "
        f"({with_prefix(result.capacity_bytes, 'B')})."
    )
    step = "robust step" if result.robust else "step"
    axes = plot.ChartAxis(step, "s", log=True), plot.ChartAxis("memory of the fullest rank", "B", log=True)
    return plot.Chart("The space: step time against memory", marks, *axes, finding, height=460)


MARKED: dict[str, Any] = {"line": "", "symbol": "circle-open", "size": 13}
"""How plans look that stand out."""


def _marked(result: Result) -> Iterator[tuple[str, tuple[float, float, str, int]]]:
    """The first plan, the first that a framework runs where it is another, and the one asked for."""
    runnable, first = result.runnable and result.runnable[0], _first(result)
    named = {first: result.best[0], f"{first} that a framework runs": runnable, "asked for": result.beside}
    seen: list[tuple[str, int]] = []
    for name, found in named.items():
        if found is not None and (at := (plan_text(found.plan), found.workload.microbatch)) not in seen:
            seen.append(at)
            under = together(found.model, found.cluster, found.plan) if result.robust else Adversity()
            yield name, (under.step_s(found), found.memory_bytes["total"], *at)


def _plans(
    name: str, points: list[tuple[float, float, str, int]], link: Callable[[str, int], PageLink], **look: Any
) -> plot.Series:
    look = {"size": 6} | look
    return plot.Series(
        [point[0] for point in points], [point[1] for point in points], name,
        texts=[f"{text}, microbatch {microbatch}" for _, _, text, microbatch in points],
        links=[link(text, microbatch).href for _, _, text, microbatch in points], **look,
    )  # fmt: skip


def picture(result: Result) -> plot.Picture:
    """The Pareto front of a search, each plan with its name."""
    front = _space(result, [], "", lambda text, _: PageLink(text, ""))
    finding = f"Less memory costs time; plans below the line fit ({with_prefix(result.capacity_bytes, 'B')})."
    return plot.Picture([[replace(front, title="Pareto front of step time and memory", finding=finding)]])


# --- a study: the best plan of each of many machines ---------------------------------------------


def study_parts(study: Study, budget: TokenBudget | None = None) -> Iterator[Section]:
    """Print the best plan of each machine, per GPU against the first, and the fronts it is on."""
    budget = budget or TokenBudget()
    fronts = {FRONTS[measure]: set(study.front(measure, budget)) for measure in MEASURES}
    rows: list[dict[str, Any]] = [
        {"of": point, "best": point.best, "run": point.run(budget), "per_gpu": study.speedup(i)}
        | {"front": " ".join(name for name, on in fronts.items() if i in on)}
        for i, point in enumerate(study.points)
    ]
    changes = {key: f"of.changes['{key}']" for point in study.points[:1] for key in point.changes}
    found = [row for row in rows if row["best"]]
    yield records_table("", found, changes | TABLES["machines"], joules=budget.joules_per_token)
    taken = dict.fromkeys(name for row in found for name in run_cells(row["run"]))
    runs = {name: f"cells(run).get('{name}', 'unknown' if best else '')" for name in taken}
    columns = changes | runs | TABLES["plan of a machine"]
    included = "failures included" * (budget.tokens is not None)
    yield records_table(included, rows, columns, cells=run_cells, data_parallel=DATA_PARALLEL)
    what = "front: no other machine has both a shorter time per token and less of it"
    yield ", ".join(filter(None, (what, included)))
    endless = [f"{row['of'].name}: {row['run']['reason']}" for row in rows if "reason" in row["run"]]
    yield Text("Notes", study.notes + endless, "note: ")


FRONTS: dict[str, str] = WORDS["fronts"]
"""What the fronts are called in a table."""


def study_page(study: Study, budget: TokenBudget | None = None) -> Page:
    """Its tables, and its picture below them."""
    (charts,) = study_picture(study, budget).rows
    return Page("Machines", "", [*study_parts(study, budget), *charts])


def study_picture(study: Study, budget: TokenBudget | None = None) -> plot.Picture:
    """Machines by their speed, and by the GPU-hours that a token takes; of a run, failures included."""
    included = "Failures are included." * (budget is not None and budget.tokens is not None)
    found = [(point, values) for point in study.points if (values := point.measures(budget))]
    names = [point.name for point, _ in found]
    chips = [values["num_chips"] for _, values in found]
    tokens_per_s = [1.0 / values["s_per_token"] for _, values in found]
    if len(set(chips)) == len(chips) > 1:
        ideal = [tokens_per_s[0] * num / chips[0] for num in chips]
        best = plot.Series(chips, tokens_per_s, "best plan", size=7)
        marks = [plot.Series(chips, ideal, "in proportion to the GPUs", plot.OTHER_COLOR, "dash"), best]
        axis = plot.ChartAxis("GPUs", log=True, numbers="count", ticks=chips)
        speed = plot.Chart("Speed", marks, axis, plot.ChartAxis("tokens/s", log=True), included)
    else:
        bars = plot.Bars(names, tokens_per_s, [plot.COLORS[0]] * len(names))
        speed = plot.Chart("Speed", [bars], plot.ChartAxis("tokens/s", low=0.0), finding=included)
    front = {id(study.points[i]) for i in study.front("gpu_s_per_token", budget)}
    hours = [1e6 / 3600 * values["gpu_s_per_token"] for _, values in found]
    colors = [plot.FRONT_COLOR if id(point) in front else plot.COLORS[0] for point, _ in found]
    dots: list[plot.Mark] = [
        plot.Series([x], [y], color=color, line="", size=7, texts=[name])
        for x, y, name, color in zip(tokens_per_s, hours, names, colors, strict=True)
    ]
    low = None if max(hours, default=0.0) > 10.0 * min(hours, default=0.0) else 0.0
    cost = plot.Chart(
        "GPU-hours", [*dots, plot.Names(tokens_per_s, hours, names, colors)],
        plot.ChartAxis("tokens/s", log=True),
        plot.ChartAxis("GPU-hours a million tokens", log=low is None, low=low),
        f"Red: no other machine is both faster and takes fewer. {included}", height=360,
    )  # fmt: skip
    return plot.Picture([[speed, cost]])


# --- what a card fine-tunes -----------------------------------------------------------------------

TITLES, MEANINGS = WORDS["methods"], WORDS["method_meanings"]


def card_parts(found: CardFit, *, everything: bool = False) -> Iterator[Section]:
    """How each model that fits is trained, what does not fit, and the command to go on with."""
    whole = found.card.chip.memory_bytes
    usable = f"{with_prefix(found.memory_frac * whole, 'B')} of its {with_prefix(whole, 'B')}"
    each = f"{found.batch} sequences of {found.seq:,} tokens a step"
    yield f"{found.card.chip.name}, {usable}: fine-tuning with Hugging Face's modules, {each}"
    shown = [one for one in found.runs if one.fits or everything]
    if shown:
        yield card_table(found, shown)
        for method in dict.fromkeys(one.method for one in shown):
            yield f"{TITLES[method]}: {MEANINGS[method]}"
        yield intervals_text(shown)
    yield from too_large(found)
    for why in dict.fromkeys(found.refused.values()):
        names = ", ".join(name for name, same in found.refused.items() if same == why)
        yield f"not priced: {names}: {why}"
    if fitting := [one for one in found.runs if one.fits]:
        yield Text("Next", next_commands(fitting[-1]), verbatim=True)


def card_table(found: CardFit, runs: list[CardRun]) -> Table:
    """A row a run; models and their sizes stand once."""
    rows = [one.to_json(found.tokens, found.price) for one in runs]
    for last, row in itertools.pairwise([{"model": ""}, *rows]):
        row["repeats"] = row["model"] == last["model"]
    whole = [] if found.tokens is None else [f"{with_prefix(found.tokens, '')} tokens"]
    columns = TABLES["cards"] | dict.fromkeys(whole, "long_duration(hours and 3600 * hours)")
    shown = {"parameters": parameters, "long_duration": long_duration, "dollars": dollars, "titles": TITLES}
    return records_table("", rows, columns | {"cost": "dollars(row.get('cost'))"}, no_wrap=True, **shown)


def intervals_text(runs: list[CardRun]) -> str:
    """How far off the tokens a second of each method may be."""
    parts: dict[str, dict[str, None]] = {}
    for one in runs:
        low, high = (f"{one.run.step_s / end - 1:+.0%}" for end in reversed([*one.run.step_s_interval]))
        parts.setdefault(f"{low} to {high}", {})[TITLES[one.method]] = None
    each = "; ".join(f"{', '.join(methods)} {ends}" for ends, methods in parts.items())
    return f"8 of 10 measured runs differ from the tokens/s by: {each}"


def too_large(found: CardFit) -> list[str]:
    """The models that no method fits, with what the smallest needs."""
    needs = []
    for name, runs in groupby(found.runs, key=lambda one: one.run.model.name):
        same = list(runs)
        if not any(one.fits for one in same):
            least = min(same, key=lambda one: one.run.memory_bytes["total"])
            size = with_prefix(least.run.memory_bytes["total"], "B", 3)
            needs.append(f"{name} ({size} by {TITLES[least.method]})")
    return [f"too large: {', '.join(needs)}"] if needs else []


def next_commands(one: CardRun) -> list[str]:
    """How to look into the largest model that fits, and how to start it."""
    row, run = one.to_json(None, None), one.run
    job = (
        f"{run.model.name} --cluster {run.cluster.name} --plan {row['plan_text']} "
        f"--batch {run.workload.batch} --microbatch {run.workload.microbatch} --seq {run.workload.seq}"
    )
    return [f"next: meshwise estimate {job}", f"      meshwise launch {job} --to peft"]

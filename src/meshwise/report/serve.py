"""What an inference server gives: the answer, why, and what else there is; on a page the trade-offs drawn."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshwise.core.columns import grouped
from meshwise.core.refusals import told
from meshwise.core.units import duration, with_prefix
from meshwise.report.answer import COLORS, FRONT_COLOR, Chart, ChartAxis, Page, Picture, Section, Series, Text
from meshwise.report.table import TABLES, Table, records_table
from meshwise.serve.answer import Deployment, ServingAnswer
from meshwise.serve.load import Fleet, LoadResult
from meshwise.serve.screen import layout_text
from meshwise.serve.serving import Serving, memory_of_one, remedies
from meshwise.serve.size import Choice, Sizing


def parts(answer: ServingAnswer, *, with_files: bool = True) -> Iterator[Section]:
    """The answer, then why, then what else there is: alternatives, running sequences, what runs the fleet."""
    document = answer.to_json()
    if answer.sizing is not None and answer.load is not None:
        yield from _sized(answer, answer.sizing, answer.load, document)
    else:
        yield from _no_layout(answer.sizing) if answer.sizing else ()
        yield from _one(answer, document) if answer.has_layout else ()
    if answer.sizing is not None and answer.has_details:
        yield from _details(answer.sizing)
    if answer.has_details and document["passes"]:
        yield passes_table(document)
    said = answer.load.notes[:1] if answer.load and answer.load.queue_grows else []
    notes = [note for note in document["notes"] if note not in said]
    yield Text("Notes", notes if document["passes"] else [], "note: ")
    if answer.deployment is not None:
        yield from _deployment(answer.deployment, with_files=with_files)


def _sized(
    answer: ServingAnswer, sizing: Sizing, load: LoadResult, document: Mapping[str, Any]
) -> Iterator[Section]:
    """The fewest GPUs, or dollars, for a load within its limits."""
    yield from sized_lines(sizing, load)
    yield from _no_layout(sizing)
    yield from _costs(answer)
    yield latency_table(document)
    yield from _fleet_lines(document)
    found = sizing.to_json()
    if found["best_of_each"]:
        yield "the best of each chip, of one pool and of two:"
        yield choices_table(found["best_of_each"], ("batch", "binds", "tokens/s\na GPU"))
    else:
        yield "simulated:"
        yield choices_table(found["simulated"][-4:])


def _no_layout(sizing: Sizing) -> Iterator[str]:
    """That nothing keeps the limits, and which limits something would, or how many GPUs."""
    more = sizing.too_large
    pools = _pools(more.fleet) if more else ""
    yield from told("no layout", sizing=sizing, more=more, rate=sizing.rate or 0.0, pools=pools)


def sized_lines(sizing: Sizing, load: LoadResult) -> Iterator[str]:
    """What holds a load within its limits, what that gives, and why it takes so much."""
    choice = sizing.chosen
    assert choice is not None
    names = {"sizing": sizing, "choice": choice, "rate": sizing.rate or 0.0, "load": load}
    names |= {"pools": _pools(choice.fleet), "most": choice.to_json()["max_sequences_per_dp_rank"]}
    yield from told("sized fleet", **names)
    yield from _within(load, load.to_json())
    yield from told("why that fleet", **names)


def _within(load: LoadResult, document: Mapping[str, Any]) -> Iterator[str]:
    """How many requests keep the limits, if there are any."""
    asked = " and ".join(told("asked limits", limits=load.limits))
    yield from told("within limits", asked=asked, limits=load.limits, **document)


def _pools(fleet: Fleet) -> str:
    found = f"{fleet.workers} x {_layout(fleet.serving)}"
    if fleet.prefill:
        found = f"prefill {fleet.prefill_workers} x {_layout(fleet.prefill)}, decode {found}"
    return found


def _layout(of: Serving) -> str:
    text = layout_text(of)
    plan = text if text.startswith("tp=") else f"tp=1,{text}"
    return f"({plan} on {of.num_chips} {of.cluster.chip.name})"


def _one(answer: ServingAnswer, document: Mapping[str, Any]) -> Iterator[Section]:
    """One server, under its load if there is one; what memory and an idle engine give."""
    yield f"{document['model']} on {_name(answer)}"
    yield from told("served instances", answer=answer)
    if answer.load is not None:
        yield from _load(answer.load)
        yield from _costs(answer)
    yield from _idle(answer, document)


def _idle(answer: ServingAnswer, document: Mapping[str, Any]) -> list[str]:
    """What memory and an idle engine give; how many sequences keep a limit is the last."""
    helps = () if document["max_sequences"] else remedies(answer.serving)
    found = ", ".join(f"{text} ({with_prefix(total, 'B')})" for text, total in helps)
    full = f"{_out_of_memory(answer.serving)}; what alone makes room: {found or 'fewer tokens or more GPUs'}"
    target_ms = None if answer.token_s is None else 1e3 * answer.token_s
    return told("one server", full=full, target_ms=target_ms, **document)


def _out_of_memory(of: Serving) -> str:
    """By how much not even one sequence fits, and what holds the memory."""
    return told("memory of one sequence", memory=memory_of_one(of))[0]


def _costs(answer: ServingAnswer) -> Iterator[Section]:
    """Watts and dollars, where they are known."""
    yield from told(
        "costs of a server", answer=answer, cost=answer.cost, **{"power_watts": None} | answer.energy
    )


def passes_table(document: Mapping[str, Any]) -> Table:
    """A row for each number of running sequences; what prompts leave, unless others take these."""
    without = "with\nprompts" if document.get("prefill_workers") else ""
    shown = {name: of for name, of in TABLES["passes"].items() if name != without}
    return records_table("", document["passes"], shown)


def _details(sizing: Sizing) -> Iterator[Section]:
    """What was simulated, and the trade-offs."""
    document = sizing.to_json()
    yield from told("sizing of a fleet", **document)
    every = -(-len(document["pareto"]) // MAX_TRADE_OFFS) or 1
    simulated, trade_offs = document["simulated"], document["pareto"][::every]
    if simulated:
        yield from ("simulated, of each kind the cheapest first:", choices_table(simulated))
    if trade_offs:
        yield from ("trade-offs, in closed form:", choices_table(trade_offs))


MAX_TRADE_OFFS = 16
"""Rows of the table of trade-offs; the document and the picture have all."""


def choices_table(choices: Sequence[dict[str, Any]], without: Sequence[str] = ()) -> Table:
    """Layouts and batches with what they give, as simulated where they were; some columns left out."""
    chips = {row[f"{pool}chip"] for row in choices for pool in ("", "prefill_")} - {None}

    def workers(number: int, chip: str, layout: str) -> str:
        words = (f"{number} x", chip if len(chips) > 1 else "", layout)
        return " ".join(word for word in words if word) if layout else ""

    shown = {name: of for name, of in TABLES["choices"].items() if name not in without}
    return records_table("", choices, shown, workers_text=workers)


def _load(load: LoadResult) -> Iterator[Section]:
    """What clients measure."""
    document, fleet = load.to_json(), load.fleet
    window = document["window"] or {"half_width_95_frac": {}}
    half = max(window["half_width_95_frac"].values(), default=None)
    counted = told("counted requests", half=half, **document)[0]
    yield from told("server under load", fleet=fleet, pools=_pools(fleet), counted=counted, **document)
    if load.queue_grows:
        yield load.notes[0]
        return
    yield from _within(load, document)
    yield from _fleet_lines(document)
    yield latency_table(document)


def _fleet_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """What caches gave, and how many replicas there were, where that is a question."""
    below = document["prompt_tokens_loaded_frac"].items()
    tiers = "".join(f", {frac:.1%} of them on the {name}" for name, frac in below if frac)
    yield from told("caches and replicas", tiers=tiers, **document)


def latency_table(document: Mapping[str, Any]) -> Table:
    """How long requests take under a load."""
    names = {"ttft_s": "first token", "tpot_s": "token after it", "e2e_s": "whole request"}
    columns = tuple(document["ttft_s"])
    rows = [(title, *map(duration, map(document[name].get, columns))) for name, title in names.items()]
    return Table("", ("", *columns), rows)


def _deployment(deployment: Deployment, *, with_files: bool) -> Iterator[Section]:
    """What runs the fleet, the commands, and what is not expressed."""
    for name, text in deployment.files.items():
        if with_files and name != "load.jsonl":
            yield Text(name, [f"\n--- {name}\n{text.rstrip()}"], verbatim=True)
        else:
            yield f"{name}: {text.count(chr(10)):,} lines"
    commands = [f"  {command}" for command in deployment.commands]
    yield Text("Apply", ["apply, then load:", *commands], verbatim=True)
    if deployment.not_expressed:
        yield Text("Not expressed", ["not expressed:", *(f"  {one}" for one in deployment.not_expressed)])


def page(answer: ServingAnswer, sizing: Sizing | None = None) -> Page:
    """The same as a page; the trade-offs of `sizing` (by default the answer's own) are drawn beside it."""
    sizing, headline = sizing or answer.sizing, _headline(answer)
    sections: list[Section] = [part for part in parts(answer) if part != headline]
    if sizing and answer.sizing is None and (bests := [one.to_json() for one in sizing.bests]):
        sections.append(replace(choices_table(bests), title="The best of each chip, of one pool and of two"))
    if answer.load is not None:
        sections.append(_latency(answer.load))
    if any(row["fits"] for row in answer.passes):
        sections.append(_trade(answer))
    if sizing and sizing.trade_offs:
        sections.append(_layouts(sizing))
    fleet = answer.load.fleet if answer.load else None
    served_by = _pools(fleet) if fleet and fleet.num_chips > fleet.serving.num_chips else _name(answer)
    return Page(f"{answer.serving.model.name} served by {served_by}", headline, sections, not answer.is_no)


def _headline(answer: ServingAnswer) -> str:
    """The answer in a sentence, which its parts repeat no more."""
    of, load, sizing = answer.serving, answer.load, answer.sizing
    if sizing and (said := next(sized_lines(sizing, load) if load else _no_layout(sizing), "")):
        return said
    if not answer.max_sequences:
        return _out_of_memory(of)
    if load is None:
        room = f"room for {answer.max_sequences:,} sequences of {of.prompt} + {of.output} tokens"
        fits = f"first token after {duration(answer.first_token_s)}, {room}"
        return _idle(answer, answer.to_json())[-1] if answer.is_no else fits
    if load.queue_grows:
        return load.notes[0]
    if answer.is_no:
        return next(_within(load, load.to_json()))
    document, named = load.to_json(), {"first token after": "ttft_s", "a token after it": "tpot_s"}
    known = ((name, at) for name, key in named.items() if (at := document[key])["p50"] is not None)
    return ", ".join(f"{name} {duration(at['p50'])} (p99 {duration(at['p99'])})" for name, at in known)


def _name(answer: ServingAnswer) -> str:
    """Where it is served, and the plan but for what needs no saying."""
    if not answer.has_layout:
        return "no layout"
    of, plan = answer.serving, answer.serving.plan
    silent = {"imbalance": 1.0, "cp": 1, "pp": 1}
    if of.model.moe is None:
        silent |= {key: plan[key] for key in ("ep", "etp")}
    shown = {name: value for name, value in plan.items() if value and value != silent.get(name)}
    keys = (
        f"{name}={value:.4g}" if name == "imbalance" else f"{name}={value}" for name, value in shown.items()
    )
    return f"{of.num_chips} x {of.cluster.chip.name}: {', '.join(keys)}"


_AXES = ChartAxis("output tokens/s a user", low=0.0), ChartAxis("output tokens/s a GPU", low=0.0)


def _trade(answer: ServingAnswer) -> Chart:
    """What a user and a GPU get at each number of running sequences, the time for prompts included."""
    rows = sorted((row for row in answer.passes if row["fits"]), key=lambda row: row["sequences"])
    line = Series(
        [row["with_prefill_per_s"] / row["sequences"] for row in rows],
        [row["with_prefill_per_s_per_gpu"] for row in rows],
        texts=[f"{row['sequences']:,} running, {duration(row['token_s'])} a token" for row in rows],
        size=6,
    )
    finding = (
        f"With {rows[-1]['sequences']:,} sequences a user gets {line.x[-1]:,.3g} tokens/s "
        f"and a GPU gives {line.y[-1]:,.0f}, the time for prompts included."
    )
    title = "User speed against GPU throughput of this layout"
    return Chart(title, [line], *_AXES, finding, passes_table(answer.to_json()), 380)


def _layouts(sizing: Sizing) -> Chart:
    """Every choice by chip, those with a prefill pool hollow, and the front that none is beyond."""

    def look(choice: Choice) -> tuple[str, bool]:
        pools = filter(None, (choice.fleet.prefill, choice.fleet.serving))
        return " + ".join({of.cluster.chip.name: "" for of in pools}), choice.fleet.prefill is not None

    groups = grouped(sizing.choices, look)
    colors = dict(zip(dict.fromkeys(name for name, _ in groups), itertools.cycle(COLORS), strict=False))
    marks = [
        Series(*_speeds(members), name + ", separate prefill" * apart, colors[name], "", size=5,
               symbol="circle-open" if apart else "circle")
        for (name, apart), members in groups.items()
    ]  # fmt: skip
    rows = [one.to_json() for one in sizing.trade_offs]
    texts = [f"{row['num_gpus']} GPUs: {row['workers']} x {row['layout']}" for row in rows]
    marks.append(Series(*_speeds(sizing.trade_offs), "Pareto front", FRONT_COLOR, size=4, texts=texts))
    finding = f"What no other of {sizing.num_considered:,} layouts and batches beats, prompts counted in."
    user = replace(_AXES[0], log=True, low=None)
    return Chart("Pareto front of all layouts", marks, user, _AXES[1], finding, choices_table(rows), 420)


def _speeds(choices: Sequence[Choice]) -> tuple[list[float], list[float]]:
    """Tokens a second of a user, and of a GPU."""
    return [1.0 / one.tpot_s for one in choices], [one.tokens_per_s_per_gpu for one in choices]


def picture(answer: ServingAnswer) -> Picture:
    """The trade-offs between all layouts of a sizing."""
    assert answer.sizing is not None
    title = f"{answer.serving.model.name} on {answer.serving.cluster.name}"
    return Picture([[_layouts(answer.sizing)]], title)


def _latency(load: LoadResult) -> Chart:
    served, shares = load.served, np.linspace(0, 100, 101)
    latencies = {"first token": served.ttft_s, "each token after": served.tpot_s}
    lines = [
        Series(np.percentile(seconds, shares), shares, name, color)
        for (name, seconds), color in zip(latencies.items(), COLORS, strict=False)
        if seconds.size
    ]
    document = load.to_json()
    finding = f"Requests within a latency: {document['num_requests']:,} requests on {document['engine']}."
    seconds, share = ChartAxis("latency", "s", log=True), ChartAxis("% of requests", low=0.0, high=101.0)
    return Chart("Latency under load", lines, seconds, share, finding, latency_table(document))

"""A server as a page: user speed against GPU throughput by running sequences, and latency under load."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshwise.core.units import duration
from meshwise.report.chart import COLORS, FRONT_COLOR, Chart, ChartAxis, Picture, Series
from meshwise.report.html import Page, Section, Text
from meshwise.report.serve_table import choices_table, latency_table, passes_table, sized_lines
from meshwise.report.table import Table
from meshwise.serve.answer import ServingAnswer
from meshwise.serve.size import Choice, Sizing


def serve_page(answer: ServingAnswer, sizing: Sizing | None = None) -> Page:
    """What a server gives; the trade-offs of `sizing` (by default the answer's own) are drawn beside it."""
    of, fits, sizing = answer.serving, answer.max_sequences > 0, sizing or answer.sizing
    headline = "out of memory: not one sequence fits beside the weights"
    if fits:
        headline = (
            f"first token after {duration(answer.first_token_s)}, room for {answer.max_sequences:,} "
            f"sequences of {of.prompt} + {of.output} tokens"
        )
    if answer.sizing is not None and answer.load is not None:
        headline = "; ".join(sized_lines(answer))
    elif answer.load is not None:
        found = answer.load
        headline += (
            f"; under load the median first token takes {duration(float(np.median(found.served.ttft_s)))}, "
            f"{found.to_json()['output_tokens_per_s_per_gpu']:,.0f} tokens/s a GPU"
        )
    sections: list[Section] = []
    if sizing and sizing.bests:
        best = [one.to_json() for one in sizing.bests]
        sections.append(replace(choices_table(best), title="The best of each chip, of one pool and of two"))
    sections += _under_load(answer) if answer.load is not None else []
    sections += [_trade(answer)] if answer.passes else []
    sections += [_layouts(sizing)] if sizing and sizing.trade_offs else []
    sections.append(Text("Notes", answer.to_json()["notes"]))
    return Page(f"{of.model.name} served by {_name(answer)}", headline, sections, not answer.is_no)


def _name(answer: ServingAnswer) -> str:
    stated = (f"{key}={value}" for key, value in answer.serving.plan.items() if value not in (None, False, 1))
    plan = ", ".join(stated) or "one GPU"
    return f"{answer.serving.cluster.num_chips} x {answer.serving.cluster.chip.name}: {plan}"


_AXES = ChartAxis("output tokens/s a user", low=0.0), ChartAxis("output tokens/s a GPU", low=0.0)


def _trade(answer: ServingAnswer) -> Chart:
    rows = [row for row in answer.passes if row["fits"]]
    line = Series(
        [row["tokens_per_s_per_sequence"] for row in rows],
        [row["with_prefill_per_s_per_gpu"] for row in rows],
        texts=[f"{row['sequences']:,} running, {duration(row['token_s'])} a token" for row in rows],
        size=6,
    )
    most = max(rows, default=None, key=lambda row: row["sequences"])
    finding = "" if most is None else (
        f"With {most['sequences']:,} sequences a user gets {most['tokens_per_s_per_sequence']:,.0f} tokens/s "
        f"and a GPU gives {most['with_prefill_per_s_per_gpu']:,.0f}, the time for prompts included."
    )  # fmt: skip
    title = "User speed against GPU throughput of this layout"
    return Chart(title, [line], *_AXES, finding, passes_table(answer.to_json()), 380)


def _layouts(sizing: Sizing) -> Chart:
    """Every choice by chip, those with a prefill pool hollow, and the front that none is beyond."""
    groups: dict[tuple[str, bool], list[Choice]] = {}
    for choice in sizing.choices:
        pools = choice.fleet.prefill
        chips = dict.fromkeys(one.cluster.chip.name for one in (pools, choice.fleet.serving) if one)
        groups.setdefault((" + ".join(chips), pools is not None), []).append(choice)
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


def serve_picture(answer: ServingAnswer) -> Picture:
    """The trade-offs between all layouts of a sizing."""
    assert answer.sizing is not None
    return Picture(
        [[_layouts(answer.sizing)]], f"{answer.serving.model.name} on {answer.serving.cluster.name}"
    )


def _under_load(answer: ServingAnswer) -> list[Section]:
    load = answer.load
    assert load is not None
    served, shares = load.served, np.linspace(0, 100, 101)
    latencies = {"first token": served.ttft_s, "each token after": served.tpot_s}
    lines = [
        Series(np.percentile(seconds, shares), shares, name, color)
        for (name, seconds), color in zip(latencies.items(), COLORS, strict=False)
        if seconds.size
    ]
    document = load.to_json()
    shown = ("requests_per_s", "busy_frac", "peak_sequences", "peak_cache_frac", "num_preemptions")
    counts = [(name, f"{document[name]:,.4g}") for name in shown]
    counts += [(name, f"{value:,.4g}") for name, value in answer.cost.items()]
    finding = f"Requests within a latency: {document['num_requests']:,} requests on {document['engine']}."
    return [
        Chart(
            "Latency under load", lines, ChartAxis("latency", "s", log=True),
            ChartAxis("% of requests", low=0.0, high=101.0), finding, latency_table(document),
        ),
        Table("The server under load", ("quantity", "value"), counts),
    ]  # fmt: skip

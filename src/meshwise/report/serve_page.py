"""A server as a page: user speed against GPU throughput by running sequences, and latency under load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwise.core.units import duration, with_prefix
from meshwise.report.html import COLORS, Chart, Page, Section, Table, Text
from meshwise.serve.answer import Answer
from meshwise.serve.load import Load, statistics


def serve_page(answer: Answer, others: Sequence[Answer] = (), *, price: float | None = None) -> Page:
    """What a server gives; `others` are drawn beside it. `price` of a GPU-hour: also the cost of tokens."""
    of, fits = answer.serving, answer.max_sequences > 0
    headline = "out of memory: not one sequence fits beside the weights"
    if fits:
        headline = (
            f"first token after {duration(answer.first_token_s)}, room for {answer.max_sequences:,} "
            f"sequences of {of.prompt} + {of.output} tokens"
        )
    if answer.load is not None:
        found = answer.load
        headline += (
            f"; under load the median first token takes {duration(float(np.median(found.served.ttft_s)))}, "
            f"{found.output_tokens_per_s / of.cluster.num_chips:,.0f} tokens/s a GPU"
        )
    sections: list[Section] = [_trade(answer, others, price)] if answer.passes else []
    sections += _under_load(answer.load) if answer.load is not None else []
    sections.append(Text("Notes", answer.to_json()["notes"]))
    return Page(f"{of.model.name} served by {_name(answer)}", headline, sections, fits)


def _name(answer: Answer) -> str:
    plan = ", ".join(f"{key}={value}" for key, value in answer.serving.plan.items())
    return f"{answer.serving.cluster.num_chips} x {answer.serving.cluster.chip.name}: {plan}"


def _trade(answer: Answer, others: Sequence[Answer], price: float | None) -> Chart:
    data = []
    for i, one in enumerate((answer, *others)):
        rows = [row for row in one.passes if row["fits"]]
        data.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": _name(one),
                "x": [row["tokens_per_s_per_sequence"] for row in rows],
                "y": [row["with_prefill_per_s_per_gpu"] for row in rows],
                "text": [f"{row['sequences']:,} running, {duration(row['token_s'])} a token" for row in rows],
                "hovertemplate": "%{text}<br>%{x:.3s} tokens/s a user, %{y:.3s} a GPU<extra></extra>",
                "line": {"color": COLORS[i % len(COLORS)], "width": 2 if one is answer else 1},
            }
        )  # fmt: skip
    table = [
        (
            f"{row['sequences']:,}", duration(row["token_s"]), f"{row['tokens_per_s_per_sequence']:,.1f}",
            f"{row['tokens_per_s_per_gpu']:,.0f}", f"{row['with_prefill_per_s_per_gpu']:,.0f}",
            with_prefix(row["memory_bytes"]["total"], "B"), "yes" if row["fits"] else "no",
            *([] if price is None else [f"{price / 3600e-6 / row['with_prefill_per_s_per_gpu']:.4g}"]),
        )
        for row in answer.passes
    ]  # fmt: skip
    columns = ["sequences", "a token", "tokens/s a user", "tokens/s a GPU", "with prompts", "memory", "fits"]
    columns += [] if price is None else ["price of 1M tokens"]
    most = max((row for row in answer.passes if row["fits"]), default=None, key=lambda row: row["sequences"])
    finding = "" if most is None else (
        f"With {most['sequences']:,} sequences a user gets {most['tokens_per_s_per_sequence']:,.0f} tokens/s "
        f"and a GPU gives {most['with_prefill_per_s_per_gpu']:,.0f}, the time for prompts included."
    )  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "tokens/s a user"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "tokens/s a GPU, prompts included"}, "rangemode": "tozero"},
    }
    title = "User speed against GPU throughput"
    return Chart(title, data, layout, finding, Table("", columns, table), 420)


def _under_load(load: Load) -> list[Section]:
    served, shares = load.served, np.linspace(0, 100, 101)
    latencies = {"first token": served.ttft_s, "each token after": served.tpot_s[served.output > 1]}
    data = [
        {
            "type": "scatter", "mode": "lines", "name": name,
            "x": np.percentile(seconds, shares), "y": shares,
            "line": {"color": color}, "hovertemplate": "%{y:.0f} % within %{x:.3s}s<extra></extra>",
        }
        for (name, seconds), color in zip(latencies.items(), COLORS, strict=False)
        if seconds.size
    ]  # fmt: skip
    document, columns = load.to_json(), ("", "mean", "p50", "p90", "p99")
    rows = [
        (name, *(duration(value) if value is not None else "" for value in statistics(seconds).values()))
        for name, seconds in latencies.items()
    ]
    layout = {
        "xaxis": {"type": "log", "tickformat": "~s", "title": {"text": "latency [s]"}},
        "yaxis": {"title": {"text": "% of requests"}, "range": [0, 101]},
    }
    shown = ("requests_per_s", "busy_frac", "peak_sequences", "peak_cache_frac", "num_preemptions")
    counts = [(name.replace("_", " "), f"{document[name]:,.4g}") for name in shown]
    finding = f"Requests within a latency: {document['num_requests']:,} requests on {document['engine']}."
    return [
        Chart("Latency under load", data, layout, finding, Table("", columns, rows)),
        Table("The server under load", ("quantity", "value"), counts),
    ]

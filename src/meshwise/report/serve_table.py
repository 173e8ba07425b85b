"""What an inference server gives, as text and a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from meshwise.core.units import duration, with_prefix
from meshwise.report.table import Table
from meshwise.serve.answer import ServingAnswer
from meshwise.serve.deployment import Deployment
from meshwise.serve.energy import energy
from meshwise.serve.load import LoadResult
from meshwise.serve.size import Sizing

_HEADINGS = (
    *("sequences", "a token", "tokens/s\na GPU", "with\nprompts", "memory", "experts"),
    *("slots of\neach", "dropped", "empty", "largest part"),
)


def print_serving(answer: ServingAnswer, console: Console) -> None:
    """Print what fits, the first token, and a row for each number of running sequences."""
    document = answer.to_json()
    cluster, plan = document["cluster"], document["plan"]
    silent = {"imbalance": 1.0, "cp": 1, "pp": 1}
    shown = {name: value for name, value in plan.items() if value and value != silent.get(name)}
    keys = ", ".join(
        f"{name}={value:.4g}" if name == "imbalance" else f"{name}={value}" for name, value in shown.items()
    )
    console.print(f"{document['model']} on {cluster['num_chips']} x {cluster['chip']}: {keys}")
    console.print(
        f"weights {with_prefix(document['weight_bytes'], 'B')} a GPU, cache "
        f"{with_prefix(document['cache_bytes_per_sequence'], 'B')} a GPU for a sequence of "
        f"{document['prompt']} + {document['output']} tokens"
    )
    console.print(
        f"first token after {duration(document['first_token_s'])}; "
        f"{document['prompt_tokens_per_s_per_gpu']:,.0f} prompt tokens/s a GPU"
    )
    if document["max_sequences"]:
        console.print(f"room for {document['max_sequences']:,} sequences")
    else:
        console.print(
            "out of memory: not one sequence fits beside the weights; use more GPUs or a narrower type"
        )
    if answer.token_s is not None:
        within = document["sequences_within_limit"]
        console.print(f"within {1e3 * answer.token_s:g} ms a token: {within:,} sequences")
    if answer.sizing is not None:
        _print_sizing(answer, answer.sizing, console)
    if answer.load is not None:
        _print_load(answer.load, console)
    if answer.load is not None and (power := energy(answer.load))["power_watts"]:
        console.print(
            "{gpus:,.0f} W of GPUs, {wall:,.0f} W at the wall".format(**power["power_watts"])
            + f"; {power['joule_per_output_token']:.3g} J an output token"
        )
    if answer.cost:
        console.print(
            "${usd_per_hour:,.2f} an hour; ${usd_per_million_input_tokens:.3g} a million tokens in, "
            "${usd_per_million_output_tokens:.3g} out".format(**answer.cost)
        )
    if document["passes"]:
        console.print(passes_table(document))
        for note in document["notes"]:
            console.print(f"note: {note}")


def passes_table(document: Mapping[str, Any]) -> Table:
    """A row for each number of running sequences."""
    rows = []
    for row in document["passes"]:
        name, seconds = max(row["time_s"].items(), key=lambda part: part[1])
        rows.append(
            (
                f"{row['sequences']:,}",
                duration(row["token_s"]),
                f"{row['tokens_per_s_per_gpu']:,.0f}",
                f"{row['with_prefill_per_s_per_gpu']:,.0f}",
                with_prefix(row["memory_bytes"]["total"], "B") if row["fits"] else "too much",
                f"{row['distinct_experts']:.0f}" if row["distinct_experts"] else "",
                *_slots(row["experts"]),
                f"{name} {seconds / row['token_s']:.0%}",
            )
        )
    return _filled(_HEADINGS, rows, left=_HEADINGS[-1:])


def _slots(experts: Mapping[str, Any] | None) -> Sequence[str]:
    """Slots of an expert, choices dropped and slots left empty; blank where experts take all tokens."""
    if not experts or not experts["capacity"]:
        return "", "", ""
    return f"{experts['capacity']:,}", f"{experts['dropped_frac']:.1%}", f"{experts['padded_frac']:.1%}"


def _filled(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str]) -> Table:
    """A table without the columns that are empty in all `rows`."""
    filled = [i for i in range(len(headings)) if any(row[i] for row in rows)]
    return Table("", [headings[i] for i in filled], [[row[i] for i in filled] for row in rows], left=left)


_CHOICES = (
    *("GPUs", "workers", "prefill\nworkers", "batch", "first\ntoken ms", "token\nms", "tokens/s\na GPU"),
    *("binds", "within"),
)


def _print_sizing(answer: ServingAnswer, sizing: Sizing, console: Console) -> None:
    """Print what was chosen, the finalists and the trade-offs."""
    document = sizing.to_json()
    console.print(
        f"{document['configurations_considered']:,} configurations in {duration(document['elapsed_s'])} "
        f"({document['configurations_per_s']:,.0f}/s)"
    )
    if answer.load is not None:
        holds = (
            "the fewest GPUs within the limits" if sizing.best else "no choice keeps the limits; the nearest"
        )
        enough = f"{answer.load.percentile:g} % of the requests must keep them"
        console.print(f"{holds}: {answer.load.fleet.num_chips} ({enough})")
        if answer.load.fleet.prefill:
            console.print("the figures above and the passes below are of a decode worker")
        console.print("simulated, fewest GPUs first:")
        console.print(choices_table(document["simulated"]))
    elif not sizing.choices:
        console.print("no layout of this cluster fits and keeps the limits")
        if sizing.least_ttft_s is not None and sizing.least_tpot_s is not None:
            least = f"{duration(sizing.least_ttft_s)}, of a token {duration(sizing.least_tpot_s)}"
            console.print(f"the least of a first token is {least}; allow more than that")
    every = -(-len(document["pareto"]) // MAX_TRADE_OFFS) or 1
    if document["pareto"]:
        console.print("trade-offs, in closed form:")
        console.print(choices_table(document["pareto"][::every]))


MAX_TRADE_OFFS = 16
"""Rows of the table of trade-offs; the document and the picture have all."""


def choices_table(choices: Sequence[dict[str, Any]]) -> Table:
    """Layouts and batches with what they give: as simulated, where they were."""
    chips = {row[f"{pool}chip"] for row in choices for pool in ("", "prefill_")} - {None}
    rows = [_choice(row, names_chip=len(chips) > 1) for row in choices]
    return _filled(_CHOICES, rows, left=_CHOICES[1:3])


def _choice(row: dict[str, Any], *, names_chip: bool) -> tuple[str, ...]:
    """The cells of a choice: as simulated, where it was."""

    def workers(pool: str) -> str:
        words = (f"{row[f'{pool}workers']} x", row[f"{pool}chip"] if names_chip else "", row[f"{pool}layout"])
        return " ".join(word for word in words if word) if row[f"{pool}layout"] else ""

    def mean(name: str) -> float:
        return float(row[f"simulated_{name}"]["mean"] if f"simulated_{name}" in row else row[name])

    per_gpu = row.get("simulated_output_tokens_per_s_per_gpu", row["tokens_per_s_per_gpu"])
    return (
        f"{row['num_gpus']:,}", workers(""), workers("prefill_"), f"{row['max_sequences_per_dp_rank']:,}",
        f"{1e3 * mean('ttft_s'):,.4g}", f"{1e3 * mean('tpot_s'):,.4g}", f"{per_gpu:,.0f}", row["binds"],
        f"{row['simulated_within_limits_frac']:.0%}" if "holds" in row else "",
    )  # fmt: skip


def _print_load(load: LoadResult, console: Console) -> None:
    """Print what clients measure."""
    document = load.to_json()
    console.print(
        f"under load ({document['engine']}, {_counted(document)}): {document['requests_per_s']:.4g} "
        f"requests/s, {document['output_tokens_per_s_per_gpu']:,.0f} output tokens/s a GPU; up to "
        f"{document['peak_sequences']:,} sequences, {document['peak_cache_frac']:.0%} of the cache"
    )
    if load.queue_grows:
        console.print(load.notes[0])
        return
    if document["within_limits_frac"] is not None:
        console.print(
            f"{document['within_limits_frac']:.1%} of the requests within the limits: "
            f"goodput {document['goodput_per_s']:.4g} requests/s"
        )
    for line in _fleet_lines(document):
        console.print(line)
    console.print(latency_table(document))


def _fleet_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """What caches gave, and how many replicas there were, where that is a question."""
    if found := document["prompt_tokens_found_frac"]:
        below = document["prompt_tokens_loaded_frac"].items()
        tiers = "".join(f", {frac:.1%} of them on the {name}" for name, frac in below if frac)
        shown = f"{found:.1%} of the prompt tokens were found in a cache{tiers}"
        yield shown + (f" (router: {document['router']})" if document["workers"] > 1 else "")
    if scaling := document["autoscale"]:
        yield (
            f"autoscaled: {scaling['mean_replicas']:.3g} replicas on average, {scaling['most_replicas']} at "
            f"most; {scaling['requests_per_s']:.3g} requests/s each, {scaling['start_s']:g} s to start one"
        )


def _counted(document: Mapping[str, Any]) -> str:
    """Which requests count, and how sure the means of their latencies are."""
    window = document["window"]
    if window is None:
        return f"all of {document['num_requests']:,} requests"
    counted = f"{window['num_counted']:,} of {window['num_simulated']:,} simulated requests"
    halves = window["half_width_95_frac"].values()
    return f"{counted}, without warm-up and end" + (f", means +-{max(halves):.0%}" if halves else "")


def latency_table(document: Mapping[str, Any]) -> Table:
    """How long requests take under a load."""
    names = {"ttft_s": "first token", "tpot_s": "token after it", "e2e_s": "whole request"}
    columns = tuple(document["ttft_s"])
    rows = [(title, *map(duration, map(document[name].get, columns))) for name, title in names.items()]
    return Table("", ("", *columns), rows)


def print_deployment(deployment: Deployment, console: Console, *, with_files: bool) -> None:
    """Print what runs the fleet, the commands, and what is not expressed."""
    for name, text in deployment.files.items():
        if with_files and name != "load.jsonl":
            console.print(f"\n--- {name}\n{text.rstrip()}", markup=False, soft_wrap=True)
        else:
            console.print(f"{name}: {text.count(chr(10)):,} lines", markup=False)
    console.print("apply, then load:")
    for command in deployment.commands:
        console.print(f"  {command}", markup=False, soft_wrap=True)
    if deployment.not_expressed:
        console.print("not expressed:")
    for sentence in deployment.not_expressed:
        console.print(f"  {sentence}", markup=False)

"""What an inference server gives, as text and a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from meshwise.core.units import duration, with_prefix
from meshwise.report.table import Table
from meshwise.serve.answer import ServingAnswer
from meshwise.serve.deployment import Deployment
from meshwise.serve.energy import energy
from meshwise.serve.load import LoadResult
from meshwise.serve.screen import layout_text
from meshwise.serve.serving import Serving
from meshwise.serve.size import Sizing

_HEADINGS = (
    *("sequences", "a token", "tokens/s\na GPU", "with\nprompts", "memory", "experts"),
    *("slots of\neach", "dropped", "empty", "largest part"),
)


def print_serving(answer: ServingAnswer, console: Console) -> None:
    """Print the answer, then why, then what else there is: alternatives, or running sequences."""
    document = answer.to_json()
    if answer.sizing is not None and answer.load is not None:
        _print_sized(answer, document, console)
    else:
        _print_one(answer, document, console)
    if answer.sizing is not None and answer.has_details:
        _print_details(answer.sizing, console)
    if answer.has_details and document["passes"]:
        console.print(passes_table(document))
    if document["passes"]:
        for note in document["notes"]:
            console.print(f"note: {note}")


def _print_sized(answer: ServingAnswer, document: Mapping[str, Any], console: Console) -> None:
    """The fewest GPUs, or dollars, for a load within its limits."""
    sizing, load = answer.sizing, answer.load
    assert sizing is not None and load is not None
    for line in sized_lines(answer):
        console.print(line)
    _print_costs(answer, console)
    console.print(latency_table(document))
    for line in _fleet_lines(document):
        console.print(line)
    found = sizing.to_json()
    if found["best_of_each"]:
        console.print("the best of each chip, of one pool and of two:")
        console.print(choices_table(found["best_of_each"], ("batch", "binds", "tokens/s\na GPU")))
    else:
        console.print("simulated:")
        console.print(choices_table(found["simulated"][-4:]))


def sized_lines(answer: ServingAnswer) -> Iterator[str]:
    """What holds a load within its limits, what that gives, and why it takes so much."""
    sizing, load = answer.sizing, answer.load
    assert sizing is not None and load is not None
    choice = sizing.best or sizing.nearest
    assert choice is not None
    fleet, document = choice.fleet, load.to_json()
    pools = f"{fleet.workers} x {_layout(fleet.serving)}"
    if fleet.prefill:
        pools = f"prefill {fleet.prefill_workers} x {_layout(fleet.prefill)}, decode {pools}"
    num = fleet.num_chips
    gpus, verb = (f"{num} GPUs", "hold") if num > 1 else ("1 GPU", "holds")
    if sizing.best is None:
        verb = "do not hold" if num > 1 else "does not hold"
    settings = f"max_sequences={choice.sequences}"
    rate = f"{sizing.rate or 0.0:.4g} requests/s"
    yield f"{gpus} {verb} {rate}: {pools}; {load.engine.title}, {settings}"
    asked = " and ".join(
        f"{duration(limit_s)} {what}"
        for limit_s, what in (
            (load.limits.ttft_s, "to the first token"),
            (load.limits.tpot_s, "a token after it"),
        )
        if limit_s < math.inf
    )
    if asked:
        yield (
            f"{document['within_limits_frac']:.1%} of the requests within {asked} "
            f"({load.limits.percentile:g} % must be): goodput {document['goodput_per_s']:.4g} requests/s"
        )
    if (more := sizing.headroom_frac) is not None:
        yield f"headroom: {more:.0%} more traffic keeps the limits" if more else "headroom: less than 10 %"
    why = _WHY.get(choice.binds, "")
    if why:
        yield "why so many: " + why.format(batch=f"{choice.sequences:,} sequences a dp rank")


_WHY = {
    "memory": "the cache of a GPU has no room for more than {batch}",
    "token": "with more than {batch} a token takes too long",
    "first token": "with more than {batch} the first token takes too long",
    "rate": "one worker holds more than that, and none is smaller",
}
"""What keeps a batch from growing (`Choice.binds`), in words."""


def _layout(of: Serving) -> str:
    text = layout_text(of)
    plan = text if text.startswith("tp=") else f"tp=1,{text}"
    return f"({plan} on {of.num_chips} {of.cluster.chip.name})"


def _print_one(answer: ServingAnswer, document: Mapping[str, Any], console: Console) -> None:
    """One server, under its load if there is one; what memory and an idle engine give."""
    cluster, plan = document["cluster"], document["plan"]
    silent = {"imbalance": 1.0, "cp": 1, "pp": 1}
    shown = {name: value for name, value in plan.items() if value and value != silent.get(name)}
    keys = ", ".join(
        f"{name}={value:.4g}" if name == "imbalance" else f"{name}={value}" for name, value in shown.items()
    )
    console.print(f"{document['model']} on {cluster['num_chips']} x {cluster['chip']}: {keys}")
    if answer.num_instances > 1:
        load = "which share the load" if answer.load else "of which this is one"
        console.print(f"no plan was stated: the cluster holds {answer.num_instances} such instances, {load}")
    if answer.load is not None:
        _print_load(answer.load, console)
        _print_costs(answer, console)
    console.print(
        f"weights {with_prefix(document['weight_bytes'], 'B')} a GPU, cache "
        f"{with_prefix(document['cache_bytes_per_sequence'], 'B')} a GPU for a sequence of "
        f"{document['prompt']} + {document['output']} tokens"
    )
    first_s, kernels_s = document["first_token_s"], document["first_token_kernels_s"]
    kernels = f" (kernels {duration(kernels_s)})" if first_s != kernels_s else ""
    console.print(
        f"first token after {duration(first_s)}{kernels}; "
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


def _print_costs(answer: ServingAnswer, console: Console) -> None:
    """Watts and dollars, where they are known."""
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
    *("GPUs", "$ an\nhour", "workers", "prefill\nworkers", "batch", "first\ntoken ms", "token\nms"),
    *("tokens/s\na GPU", "binds", "within"),
)


def _print_details(sizing: Sizing, console: Console) -> None:
    """Print what was simulated, and the trade-offs."""
    document = sizing.to_json()
    console.print(
        f"{document['configurations_considered']:,} configurations in {duration(document['elapsed_s'])} "
        f"({document['configurations_per_s']:,.0f}/s)"
    )
    if document["simulated"]:
        console.print("simulated, of each kind the cheapest first:")
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


def choices_table(choices: Sequence[dict[str, Any]], without: Sequence[str] = ()) -> Table:
    """Layouts and batches with what they give, as simulated where they were; some columns left out."""
    chips = {row[f"{pool}chip"] for row in choices for pool in ("", "prefill_")} - {None}
    rows = [_choice(row, names_chip=len(chips) > 1) for row in choices]
    kept = [i for i, name in enumerate(_CHOICES) if name not in without]
    names = [_CHOICES[i] for i in kept]
    return _filled(names, [[row[i] for i in kept] for row in rows], left=_CHOICES[2:4])


def _choice(row: dict[str, Any], *, names_chip: bool) -> tuple[str, ...]:
    """The cells of a choice: as simulated, where it was."""

    def workers(pool: str) -> str:
        words = (f"{row[f'{pool}workers']} x", row[f"{pool}chip"] if names_chip else "", row[f"{pool}layout"])
        return " ".join(word for word in words if word) if row[f"{pool}layout"] else ""

    def mean(name: str) -> float:
        return float(row[f"simulated_{name}"]["mean"] if f"simulated_{name}" in row else row[name])

    usd = row["usd_per_hour"]
    per_gpu = row.get("simulated_output_tokens_per_s_per_gpu", row["tokens_per_s_per_gpu"])
    return (
        f"{row['num_gpus']:,}", f"{usd:,.2f}" if usd else "", workers(""), workers("prefill_"),
        f"{row['max_sequences_per_dp_rank']:,}", f"{1e3 * mean('ttft_s'):,.4g}",
        f"{1e3 * mean('tpot_s'):,.4g}", f"{per_gpu:,.0f}", row["binds"],
        f"{within:.0%}" if (within := row.get("simulated_within_limits_frac")) is not None else "",
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

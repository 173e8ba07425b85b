"""`meshwise serve`: what a server of a model gives: how many fit, each token's time, under load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwise import api
from meshwise.cli import complete
from meshwise.cli.options import ClusterOption, HtmlOption, JsonOption, Model
from meshwise.cli.output import console, print_json, write_html
from meshwise.core.errors import WorkloadError
from meshwise.core.files import csv_text, write_text


def serve(
    model: Model,
    cluster: ClusterOption,
    plan: Annotated[
        str, typer.Option(help="tp, ep, etp, dtype, kv_dtype: tp=8,ep=8,dtype=fp8; the rest is dp. [tp=all]")
    ] = "",
    prompt: Annotated[int | None, typer.Option(help="Tokens of a prompt. [2048]")] = None,
    output: Annotated[int | None, typer.Option(help="Tokens generated after it. [256]")] = None,
    rate: Annotated[float | None, typer.Option(help="Load: requests a second.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Load: clients that each send a request when the last has ended.")
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option(
            help="Load: a trace (CSV arrival,prompt,output; Azure; Mooncake JSONL), or CSV prompt,output."
        ),
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(help="Requests of the load. [1000 at a rate, 10 a client]")
    ] = None,
    burstiness: Annotated[
        float | None, typer.Option(help="Gamma shape of the gaps between arrivals at a rate. [1: Poisson]")
    ] = None,
    length_ratio: Annotated[
        float | None, typer.Option(help="Lengths are uniform from this share of the stated ones up. [1]")
    ] = None,
    length_sigma: Annotated[
        float | None, typer.Option(help="Lengths are lognormal around the stated means, logs spread by this.")
    ] = None,
    shared_prefix: Annotated[
        int | None, typer.Option(help="Tokens that all prompts begin with; the engine caches them.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Instances that take the requests in turn.")] = 1,
    prefill_plan: Annotated[
        str, typer.Option(help="Plan of instances that only take prompts; those of --plan then only decode.")
    ] = "",
    prefill_cluster: Annotated[
        str,
        typer.Option(
            help="Their cluster, of other chips or another number. [as --cluster]",
            autocompletion=complete.clusters,
        ),
    ] = "",
    prefill_workers: Annotated[int, typer.Option(help="How many of them.")] = 1,
    experts_on: Annotated[
        str, typer.Option(help="More GPUs, which hold the experts alone: h200-sxm:16. [the cluster's]")
    ] = "",
    speculate: Annotated[
        str, typer.Option(help="Guesses that a pass checks, and their odds: drafts=3,accept=0.8.")
    ] = "",
    draft_model: Annotated[
        str | None,
        typer.Option(help="The model that guesses. [multi-token prediction]", autocompletion=complete.models),
    ] = None,
    expert_skew: Annotated[
        float, typer.Option(help="Power law of the experts' loads: that of rank r is r^-SKEW. [even]")
    ] = 0.0,
    expert_loads: Annotated[
        Path | None, typer.Option(help="Text of the tokens that each expert was sent, instead.")
    ] = None,
    redundant_experts: Annotated[int, typer.Option(help="Slots for copies of the busiest experts.")] = 0,
    capacity_factor: Annotated[
        float | None,
        typer.Option(help="Also say what experts of at most this times their even share would drop."),
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Trade-offs of all layouts: tokens/s a user against a GPU.")
    ] = False,
    price: Annotated[
        str, typer.Option(help="Dollars a GPU and hour: 2.5, or h100-80g-sxm=2.5,b200-sxm=4.")
    ] = "",
    csv: Annotated[Path | None, typer.Option(help="Write the layouts considered to this CSV file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the trade-offs (png, svg, pdf).")] = None,
    engine: Annotated[
        str, typer.Option(help="vllm, sglang or trtllm, with settings: vllm,max_tokens=2048. [vllm]")
    ] = "",
    sequences: Annotated[
        str, typer.Option(help="Running sequences of the instance: 1,8,64. [powers of two, up to what fits]")
    ] = "",
    token_ms: Annotated[
        float | None,
        typer.Option(help="Latency target per output token; also report the largest batch that meets it."),
    ] = None,
    ttft_ms: Annotated[
        float | None, typer.Option(help="Latency target for the first token under load.")
    ] = None,
    memory_frac: Annotated[float, typer.Option(help="Share of the memory that the engine may take.")] = 0.9,
    engine_ms: Annotated[float, typer.Option(help="The engine's own time between two passes.")] = 0.0,
    html: HtmlOption = None,
    json: JsonOption = False,
) -> None:
    """Estimate an inference server: latency, throughput, what fits.

    Kernels are timed by models fitted to measurements of serving kernels; routing is even, nothing overlaps.
    With --rate, --concurrency or --requests the engine is simulated pass by pass, queue included.
    With --rate, --ttft-ms and --token-ms, and no tp in the plan, the answer is the fewest GPUs of the cluster
    (or of several: h100-80g-sxm:64,b200-sxm:64) that keep the limits; exit 1 if none do.
    """
    found = api.serve(
        model, cluster, plan, prompt=prompt, output=output, sequences=_counts(sequences),
        token_s=None if token_ms is None else token_ms / 1e3,
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        memory_frac=memory_frac, engine_s=engine_ms / 1e3, rate=rate, concurrency=concurrency,
        requests=requests, num_requests=num_requests, burstiness=burstiness, length_ratio=length_ratio,
        length_sigma=length_sigma, shared_prefix=shared_prefix, engine=engine, workers=workers,
        prefill_plan=prefill_plan, prefill_cluster=prefill_cluster, prefill_workers=prefill_workers,
        experts_on=experts_on,
        speculate=speculate, draft_model=draft_model, expert_skew=expert_skew, expert_loads=expert_loads,
        redundant_experts=redundant_experts, capacity_factor=capacity_factor, pareto=pareto, price=price,
    )  # fmt: skip
    if (csv or plot) and found.sizing is None:
        raise WorkloadError("--csv and --plot show layouts; add --pareto, or limits and a rate without tp")
    if csv is not None and found.sizing is not None:
        rows = found.sizing.rows
        write_text(csv, csv_text([list(rows[0]), *(row.values() for row in rows)] if rows else []))
    if plot is not None and found.sizing is not None:
        from meshwise.report.pages import draw

        draw(found, plot)
    write_html(found, html)
    if json:
        print_json(found.to_json())
    else:
        from meshwise.report.serve_table import print_serving

        print_serving(found, console())
    if found.is_no:
        raise typer.Exit(1)


def _counts(text: str) -> list[int]:
    """`1,8,64` as numbers."""
    words = [word.strip() for word in text.split(",")] if text else []
    for word in words:
        if not word.isdecimal():
            raise WorkloadError(f"--sequences: {word!r} is no number of sequences; write for example 1,8,64")
    return [int(word) for word in words]

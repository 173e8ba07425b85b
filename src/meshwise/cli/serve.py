"""`meshwise serve`: what a server of a model gives: first token, tokens after it, how many fit."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwise import api
from meshwise.cli.estimate import ClusterOption, Model
from meshwise.cli.output import console, print_json
from meshwise.core.errors import WorkloadError


def add_to(parent: typer.Typer) -> None:
    """Mount the command."""
    parent.command()(serve)


def serve(
    model: Model,
    cluster: ClusterOption,
    plan: Annotated[
        str, typer.Option(help="tp, ep, etp, dtype, kv_dtype: tp=8,ep=8,dtype=fp8; the rest is dp. [tp=all]")
    ] = "",
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 2048,
    output: Annotated[int, typer.Option(help="Tokens generated after it.")] = 256,
    sequences: Annotated[
        str, typer.Option(help="Running sequences of the instance: 1,8,64. [powers of two, up to what fits]")
    ] = "",
    token_ms: Annotated[
        float | None,
        typer.Option(help="Latency target per output token; also report the largest batch that meets it."),
    ] = None,
    memory_frac: Annotated[float, typer.Option(help="Share of the memory that the engine may take.")] = 0.9,
    engine_ms: Annotated[float, typer.Option(help="The engine's own time between two passes.")] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Estimate an inference server: time to first token, time per token, what fits, tokens a second.

    Kernels are timed by models fitted to measurements of serving kernels; routing is even, nothing overlaps.
    """
    found = api.serve(
        model, cluster, plan, prompt=prompt, output=output, sequences=_counts(sequences),
        token_s=None if token_ms is None else token_ms / 1e3,
        memory_frac=memory_frac, engine_s=engine_ms / 1e3,
    )  # fmt: skip
    if json:
        print_json(found.to_json())
    else:
        from meshwise.report.serve_table import print_serving

        print_serving(found, console())
    if not found.max_sequences:
        raise typer.Exit(1)


def _counts(text: str) -> list[int]:
    """`1,8,64` as numbers."""
    words = [word.strip() for word in text.split(",")] if text else []
    for word in words:
        if not word.isdecimal():
            raise WorkloadError(f"--sequences: {word!r} is no number of sequences; write for example 1,8,64")
    return [int(word) for word in words]

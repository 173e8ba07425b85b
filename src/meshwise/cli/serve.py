"""`meshwise serve`: what a server of a model gives: first token, tokens after it, how many fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from meshwise.serve.serving import Serving


def add_to(parent: typer.Typer) -> None:
    """Mount the command."""
    parent.command()(serve)


def serve(
    model: Annotated[str, typer.Argument(help="A preset (deepseek-v3) or the path of a config.json.")],
    cluster: Annotated[
        str, typer.Option("--cluster", help="A preset, chip:count (h200-sxm:8), or a TOML file.")
    ],
    plan: Annotated[
        str, typer.Option(help="tp, ep, etp, dtype, kv_dtype: tp=8,ep=8,dtype=fp8; the rest is dp. [tp=all]")
    ] = "",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 2048,
    output: Annotated[int, typer.Option(min=1, help="Tokens generated after it.")] = 256,
    sequences: Annotated[
        str, typer.Option(help="Running sequences of the instance: 1,8,64. [powers of two, up to what fits]")
    ] = "",
    token_ms: Annotated[
        float | None,
        typer.Option(help="A token may take so long: also say how many sequences that allows."),
    ] = None,
    memory_frac: Annotated[float, typer.Option(help="Share of the memory that the engine may take.")] = 0.9,
    engine_ms: Annotated[float, typer.Option(help="The engine's own time between two passes.")] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Estimate an inference server: time to first token, time per token, what fits, tokens a second.

    Kernels are timed by models fitted to measurements of serving kernels; routing is even, nothing overlaps.
    """
    from meshwise.core.errors import WorkloadError
    from meshwise.machine.hardware import find_cluster
    from meshwise.model.find import find_model
    from meshwise.plan.plan import parse_plan
    from meshwise.serve import serving as est

    where = find_cluster(cluster)
    of = est.serving(
        find_model(model), where, parse_plan(plan or f"tp={where.num_chips}"),
        prompt=prompt, output=output, memory_frac=memory_frac, engine_s=engine_ms / 1e3,
    )  # fmt: skip
    most = est.max_sequences(of) * of.dp
    rows = est.rows(of, _sequences(sequences, of.dp) if sequences else est.batches(of))
    limit: int | None = None
    if token_ms is not None:
        if not token_ms > 0:
            raise WorkloadError(f"--token-ms is {token_ms}; it must be above zero")
        limit = est.sequences_within(of, token_ms / 1e3)
    document: dict[str, Any] = {
        "model": of.model.name,
        "cluster": {"name": where.name, "chip": where.chip.name, "num_chips": where.num_chips},
        "plan": {name: getattr(of.plan, name) for name in est.PLAN_KEYS},
        "prompt": prompt,
        "output": output,
        "weight_bytes": est.weight_bytes(of),
        "cache_bytes_per_sequence": est.sequence_bytes(of),
        "max_sequences": most,
        "first_token_s": est.first_token_s(of),
        "prompt_tokens_per_s_per_gpu": prompt / est.prompt_s(of) / of.plan.tp,
        "sequences_within_limit": limit,
        "batches": rows,
        "notes": est.notes(of),
    }
    if json:
        from meshwise.cli.output import print_json

        print_json(document)
    else:
        _show(of, document, token_ms)
    if not most:
        raise typer.Exit(1)


def _sequences(text: str, dp: int) -> list[int]:
    from meshwise.core.errors import WorkloadError

    counts = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not (count := int(word)) or count % dp:
            raise WorkloadError(
                f"--sequences: {word!r} is not a number of sequences above zero that dp={dp} divides"
            )
        counts.append(count)
    return counts


def _show(of: Serving, document: dict[str, Any], token_ms: float | None) -> None:
    from rich.table import Table

    from meshwise.cli.output import console
    from meshwise.core.units import duration, with_prefix
    from meshwise.serve.serving import PLAN_KEYS

    out = console()
    degrees = ", ".join(f"{name}={getattr(of.plan, name)}" for name in PLAN_KEYS)
    out.print(f"{of.model.name} on {of.cluster.num_chips} x {of.cluster.chip.name}: {degrees}")
    out.print(
        f"weights {with_prefix(document['weight_bytes'], 'B')} a GPU, cache "
        f"{with_prefix(document['cache_bytes_per_sequence'], 'B')} a GPU for a sequence of {of.prompt} + "
        f"{of.output} tokens"
    )
    out.print(
        f"first token after {duration(document['first_token_s'])}; "
        f"{document['prompt_tokens_per_s_per_gpu']:,.0f} prompt tokens/s a GPU"
    )
    if not document["max_sequences"]:
        out.print("out of memory: not one sequence fits beside the weights; use more GPUs or a narrower type")
    else:
        out.print(f"room for {document['max_sequences']:,} sequences")
    if token_ms is not None:
        out.print(f"within {token_ms:g} ms a token: {document['sequences_within_limit']:,} sequences")
    if not document["batches"]:
        return
    table = Table()
    for heading in ("sequences", "a token", "tokens/s", "a GPU", "with prompts", "memory", "largest parts"):
        table.add_column(heading, justify="left" if heading == "largest parts" else "right")
    for row in document["batches"]:
        parts = sorted(row["time_s"].items(), key=lambda part: -part[1])[:3]
        shares = ", ".join(f"{name} {seconds / row['token_s']:.0%}" for name, seconds in parts if seconds)
        table.add_row(
            f"{row['sequences']:,}",
            duration(row["token_s"]),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['with_prefill_per_s_per_gpu']:,.0f}",
            with_prefix(row["memory_bytes"]["total"], "B") if row["fits"] else "out of memory",
            shares,
        )
    out.print(table)
    for note in document["notes"]:
        out.print(f"note: {note}")

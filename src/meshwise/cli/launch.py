"""`meshwise launch`: what starts a plan under another framework."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwise import api
from meshwise.cli.options import ClusterOption, JsonOption, Model, PlanOption, SeqOption
from meshwise.cli.output import console, print_json

if TYPE_CHECKING:
    from meshwise.launch.write import Launch


def launch(
    model: Model,
    cluster: ClusterOption,
    batch: Annotated[int, typer.Option(help="Global batch in sequences; in serving, those running.")],
    to: Annotated[
        str,
        typer.Option(
            help="megatron-lm, megatron-bridge, torchtitan, deepspeed, accelerate, vllm, sglang or "
            "tensorrt-llm."
        ),
    ],
    plan: PlanOption = "",
    seq: SeqOption = None,
    microbatch: Annotated[int | None, typer.Option(help="Sequences of a microbatch [1].")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the files into this folder.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write the settings that run a plan of MODEL under a framework."""
    found = api.launch(model, cluster, plan, to=to, batch=batch, seq=seq, microbatch=microbatch)
    written = found.write(output) if output is not None else []
    if json:
        print_json(found.to_json())
    else:
        _print(found, written)


def _print(found: Launch, written: list[Path]) -> None:
    out = console()
    out.print(f"{found.framework}, checked against {found.version}", markup=False)
    if found.not_expressed:
        out.print("not expressed:")
        for sentence in found.not_expressed:
            out.print(f"  {sentence}", markup=False)
    for path in written:
        out.print(f"wrote {path}", markup=False)
    if not written:
        for file in found.files:
            out.print(f"\n--- {file.path}\n{file.text.rstrip()}", markup=False, soft_wrap=True)

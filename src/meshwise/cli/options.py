"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwise.cli import complete

Model = Annotated[
    str,
    typer.Argument(help="A preset (gpt3-175b) or the path of a config.json.", autocompletion=complete.models),
]
OptionalModel = Annotated[
    str | None,
    typer.Argument(
        help="A preset, the path of a config.json, or left to --from.", autocompletion=complete.models
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="A preset, chip:count (a100-80g-sxm:512), or a TOML file.",
        autocompletion=complete.clusters,
    ),
]
PlanOption = Annotated[str, typer.Option(help="tp=8,pp=4,... (keys: meshwise list plan) or a TOML file.")]
SeqOption = Annotated[int | None, typer.Option(help="Tokens of a sequence [what the model allows].")]
PriceOption = Annotated[float | None, typer.Option(help="Dollars of a GPU-hour, with --tokens.")]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", help="Write the result as one self-contained HTML page.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

"""The command line: `meshwise VERB ...`. Each command parses, calls one function, prints.

Exit codes: 0 done, 1 the answer is no, 2 wrong input (one sentence on stderr), 3 a missing extra or
device. Only typer is imported here; a command imports what it needs when it runs.
"""

from __future__ import annotations

import importlib
import sys

import typer

from meshwise.core.errors import MeshwiseError

app = typer.Typer(
    name="meshwise",
    help="What a distributed transformer costs before it runs, and where prediction and run differ.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _module in (
    "estimate",
    "search",
    "programs",
    "frontier",
    "validate",
    "fit",
    "catalog",
    "trace",
    "profile",
    "moe",
    "serve",
    "sweep",
):
    importlib.import_module(f"meshwise.cli.{_module}").add_to(app)


def main() -> None:
    """Run the command line; a problem the user can act on is one sentence and an exit code."""
    try:
        app()
    except MeshwiseError as error:
        print(f"meshwise: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(0)

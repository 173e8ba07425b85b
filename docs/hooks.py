"""Pages that mkdocs makes from the code: every verb with its options and examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File, Files

INTRODUCTION = """# Verbs

Every verb prints tables, or one JSON document with `--json`. Defaults of options can stand in a file:
[options in a file](../howto/defaults.md).
"""


def on_files(files: Files, config: Any) -> Files:
    """Add `reference/verbs.md`."""
    files.append(File.generated(config, "reference/verbs.md", content=verbs_page()))
    return files


def verbs_page() -> str:
    """The help of every verb as one page."""
    import typer.main

    from meshwise.cli import app

    return INTRODUCTION + "".join(_sections(typer.main.get_command(app), "meshwise"))


def _sections(command: Any, name: str) -> Iterator[str]:
    from meshwise.cli.defaults import verbs_of

    for words, _ in verbs_of(command):
        verb = command
        for word in words.split():
            verb = verb.commands[word]
        if verb.hidden:
            continue
        context = verb.make_context(f"{name} {words}", [], resilient_parsing=True)
        yield f"\n## {words}\n\n```text\n{verb.get_help(context)}\n```\n"

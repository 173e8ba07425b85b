"""One or two examples under the help of every verb."""

from __future__ import annotations

import re
import textwrap

from meshwise.core.files import read_catalog

EXAMPLES: dict[str, list[str]] = read_catalog("examples.toml")


def epilog(name: str) -> str | None:
    """The examples of a command as the end of its help; of a group, one of each of its first two commands."""
    inside = [lines[0] for verb, lines in EXAMPLES.items() if verb.startswith(f"{name} ")]
    lines = EXAMPLES.get(name, inside[:2])
    return "\b\nExamples:\n" + "\n".join(map(_shown, lines)) if lines else None


def _shown(line: str) -> str:
    """One command, broken before options, as a shell reads it, where it is wider than a terminal."""
    together = re.sub(r"(--\S+) (?!-)", "\\1\N{NO-BREAK SPACE}", f"meshwise {line}")
    parts = textwrap.wrap(
        together, 75, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
    )
    return " \\\n".join(parts).replace("\N{NO-BREAK SPACE}", " ")

"""Runs the examples of pages again and writes what they print: `python docs/rerun.py docs/*.md`.

An example is a block fenced as `console` that begins with `$ meshwise ...` or `$ for ...` (a line that
ends in a backslash goes on), its output below; or a block fenced as `python` right before one fenced as
`text`, which is what it prints. Python blocks of a page share their names. So no number of a page is
older than the code.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

CONSOLE = re.compile(r"```console\n(\$ (?:meshwise|for) (?:[^\n]*\\\n)*[^\n]*\n)((?:(?!```)[^\n]*\n)*)```\n")
PYTHON = re.compile(r"```python\n((?:(?!```)[^\n]*\n)*)```\n\n```text\n((?:(?!```)[^\n]*\n)*)```\n")


def rerun(page: str) -> str:
    """`page` with the outputs of today; a command that fails raises CalledProcessError."""
    names: dict[str, Any] = {}
    page = CONSOLE.sub(lambda found: f"```console\n{found[1]}{_shell(found[1])}```\n", page)
    return PYTHON.sub(
        lambda found: f"```python\n{found[1]}```\n\n```text\n{_python(found[1], names)}```\n", page
    )


def _shell(example: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    command = "set -o pipefail; " + example.removeprefix("$ ")
    done = subprocess.run(["bash", "-c", command], env=settings, text=True, stdout=subprocess.PIPE)
    if done.returncode != 1:  # the answer is no
        done.check_returncode()
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.rstrip().splitlines())


def _python(code: str, names: dict[str, Any]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, names)
    return out.getvalue()


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        page = path.read_text(encoding="utf-8")
        path.write_text(rerun(page), encoding="utf-8")


if __name__ == "__main__":
    main()

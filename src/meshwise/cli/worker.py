"""A command line of meshwise run in this process, for a sweep: words in, what it printed out."""

from __future__ import annotations

import io
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout

from meshwise.cli import main


def run(words: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `meshwise WORDS`."""
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["meshwise", *words]
    code = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except Exception:
            traceback.print_exc()
            code = 1
    return code, out.getvalue(), err.getvalue()

"""A process that runs command lines of meshwise for a sweep: a JSON list of words in, an answer out.

Answers go out on the stdout that the process was born with; what commands and libraries print themselves
goes to stderr or into the answer, so that it cannot garble the protocol.
"""

from __future__ import annotations

import io
import json
import os
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


def serve() -> None:
    """Answer until stdin closes."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            answers.write(json.dumps(run(json.loads(line))) + "\n")


if __name__ == "__main__":
    serve()

"""Scripts as forks of the server that ranks are forks of: torch is imported once, not by each (two seconds).

What torchrun or srun would set is their environment; each may enter a network namespace, as another host. In
a dry run the hook comes before the script, which finds imported what the hook would import.
"""

import ctypes
import multiprocessing as mp
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from meshwise.runtime.launch import _context
from meshwise.runtime.profile import HOOK

PATIENCE_S = 120.0
"""A loaded machine's."""


def wait_until(is_so: Callable[[], object]) -> None:
    """Wait as long as a loaded machine may need."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@dataclass(frozen=True)
class Script:
    """A script that runs; what it prints lies in two files."""

    process: BaseProcess
    out: Path
    err: Path

    def end(self) -> int | None:
        """Wait until it has ended by itself; its exit code, that of a shell negated for a signal."""
        self.process.join(PATIENCE_S)
        code = self.process.exitcode
        self.process.kill()
        return code


def start_script(folder: Path, words: list[str], environment: Mapping[str, str], host: str = "") -> Script:
    """Start `words`, a script and its arguments, in the network namespace `host` (empty: in this one)."""
    number = len(list(folder.glob("*.err")))
    out, err = folder / f"{number}.out", folder / f"{number}.err"
    out.touch(), err.touch()
    process = _context("cpu").Process(target=_run, args=(words, dict(environment), host, out, err))
    process.daemon = "MESHWISE_SCRIPT" not in environment  # such a script may have children
    process.start()
    return Script(process, out, err)


def _run(words: list[str], environment: dict[str, str], host: str, out: Path, err: Path) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY), number)
    if host:
        with Path("/run/netns", host).open() as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
    sys.argv = words
    if is_dry := "MESHWISE_SCRIPT" in environment:
        os.environ.clear()
    os.environ.update(environment)
    if is_dry:
        mp.set_start_method(None, force=True)
        runpy.run_path(str(HOOK / "sitecustomize.py"))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)

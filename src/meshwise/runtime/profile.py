"""`profile`: the traces of all ranks of a program, its own code untouched.

Around code of one's own, on each rank:

    with capture("profiles", rank, world_size):
        ...

Around a whole program, `profile_command` starts it with a hook on the module path. Every Python process
that it starts, by whatever means (torchrun, mp.spawn, mpirun, subprocess), then captures itself from
`init_process_group` on, or from the first call of a module, and leaves `rank-N.json` in the folder.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwise.core.errors import DataError, MissingExtraError
from meshwise.core.files import make_folder
from meshwise.runtime.capture import FLIGHT_RECORDER_CALLS, Capture, CaptureError

HOOK = Path(__file__).parent / "hook"
CAPTURE = "PYTHON_MESHWISE_CAPTURE"
"""The variable that tells the hook what to capture; DeepSpeed's launcher passes on those that begin so."""
_GRACE_S = 40
"""How long processes that are told to stop may write; torchrun gives its ranks 30 s."""


@contextmanager
def capture(
    directory: str | Path, rank: int | None = None, world_size: int | None = None, **options: bool
) -> Iterator[None]:
    """Record this rank while the block runs and write `directory/rank-N.json`.

    `rank` and `world_size` default to those of the process group, else of torchrun's environment. Options:
    `shapes`, `memory` (on) and `stacks` (off). DataError if the trace cannot be written; nothing is then
    left half-written.
    """
    recorder = Capture(Path(directory), rank, world_size, **options)
    try:
        recorder.start()
        try:
            yield
        finally:
            recorder.stop()
    except CaptureError as error:
        raise DataError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Profiled:
    """What became of a profiled command; `bare_s` is its time without capture, if it was measured."""

    command: tuple[str, ...]
    exit_code: int
    wall_s: float
    bare_s: float | None
    files: tuple[Path, ...]

    @property
    def overhead_frac(self) -> float | None:
        """Time added by the capture, as a share of the bare time."""
        return None if not self.bare_s else self.wall_s / self.bare_s - 1


def profile_command(
    command: Sequence[str], directory: Path, *, compare: bool = False, stdout: Any = None, **options: bool
) -> Profiled:
    """Run `command` with every rank captured into `directory`; `compare` runs it bare first, for comparison.

    Options are `capture`'s. Raises DataError if the folder already holds profiles, MissingExtraError if the
    command does not exist or its torch is too old.
    """
    if directory.is_dir() and any(directory.glob("rank-*.json*")):
        raise DataError(f"{directory} already holds profiles; name another folder or empty it")
    make_folder(directory)
    bare_s = run_command(command, dict(os.environ), stdout)[1] if compare else None
    exit_code, wall_s = run_command(command, capture_environment(directory, **options), stdout)
    refused = directory / "refused"
    if refused.exists():
        reason = refused.read_text()
        refused.unlink()
        raise MissingExtraError(reason)
    return Profiled(tuple(command), exit_code, wall_s, bare_s, tuple(sorted(directory.glob("rank-*.json"))))


def capture_environment(directory: Path, **options: bool) -> dict[str, str]:
    """The environment in which every rank of a program captures itself."""
    asked = json.dumps({"directory": str(directory.resolve()), **options})
    return hooked({"TORCH_FR_BUFFER_SIZE": FLIGHT_RECORDER_CALLS} | os.environ | {CAPTURE: asked})


def hooked(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which every Python process runs the hook, whatever else is on its module path."""
    search = [str(HOOK), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(search)}


def as_started(command: Sequence[str]) -> list[str]:
    """The words that start `command`: `python` is the one that runs us."""
    return [sys.executable if command[0] in ("python", "python3") else command[0], *command[1:]]


def run_command(command: Sequence[str], environment: dict[str, str], stdout: Any) -> tuple[int, float]:
    """Exit code and seconds of a command that ends with us, its ranks included, however we end.

    SIGTERM and SIGINT end the command's processes, which write what they have; then they end us, too.
    """
    pipe, silent = subprocess.PIPE, subprocess.DEVNULL
    begin, received, lines = time.perf_counter(), list[int](), list[Any]()

    def end(number: int, frame: Any) -> None:
        received.append(number)
        for line in lines:
            line.close()

    is_main = threading.current_thread() is threading.main_thread()
    before = {n: signal.signal(n, end) for n in (signal.SIGTERM, signal.SIGINT) if is_main}
    try:
        words = as_started(command)
        process = subprocess.Popen(words, env=environment, stdout=stdout, start_new_session=True)
        guarding = ["sh", "-c", _GUARD, str(process.pid)]
        with subprocess.Popen(guarding, stdin=pipe, stderr=silent, start_new_session=True) as guard:
            lines.append(guard.stdin)
            if received:  # before there was a guard
                lines[0].close()
            exit_code = process.wait()
            if not received:
                guard.kill()
    except FileNotFoundError:
        raise MissingExtraError(f"no such command: {command[0]}; give it as python script.py ...") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[-1])
    return exit_code, time.perf_counter() - begin


_GUARD = f"""
read more || kill -TERM "-$0" || exit
for second in $(seq {_GRACE_S}); do kill -0 "-$0" && sleep 1 || exit; done
kill -KILL "-$0"
"""
"""Ends a group of processes when the pipe to this script closes: we have ended, or are told to."""

"""What tests compute in other processes: functions of one item, which are called by their name."""

import os
import signal
import sys
import time
from pathlib import Path

from meshwise.sweep.sweep import CommandAnswer


def answer_of(words: list[str]) -> CommandAnswer:
    """Stands in for the command line: it squares n, dies of -1, sleeps on -2, refuses -3."""
    n = die_of_minus_one(int(words[2]))
    if n == -2:
        time.sleep(60)
    log(n)
    return CommandAnswer({"n": {"square": [n * n]}}, "n is bad; use another" if n == -3 else None, 0.1)


def slow_answer(words: list[str]) -> CommandAnswer:
    """The same, so slow that a test can look while a sweep runs."""
    time.sleep(0.3)
    return answer_of(words)


def die_of_minus_one(n: int) -> int:
    """The number itself."""
    if n == -1:
        print("about to die", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return n


def log(n: int) -> None:
    """Note that `n` was computed."""
    with Path(os.environ["TASKS_LOG"]).open("a") as file:
        file.write(f"{n}\n")


def slow_square(job: tuple[int, str, float]) -> int:
    """The square of n, noted in a file when it is done."""
    n, file, seconds = job
    time.sleep(seconds)
    with Path(file).open("a") as done:
        done.write(f"{n}\n")
    return n * n

"""Ranks that torchrun or srun started tell each other that they are alive.

Where the network goes down, or a signal stops a rank, TCP and the collectives wait in silence for minutes. So
each rank counts up a number of its own, once a second, in the store where the ranks met. Rank 0 reads
everybody's, the others read rank 0's, and who sees a number stand still says so once. Nothing is ended: a
network comes back, and a stopped rank can be continued.
"""

from __future__ import annotations

import datetime
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

SILENT_S = 8.0
_BEATS = 8  # in that time
_START_S = 60.0  # what a rank may come later than another
_JOIN = datetime.timedelta(seconds=1800)
_DONE = 1 << 40
"""What a rank adds that has no more to say."""


@contextmanager
def heartbeat(rank: int, world_size: int, host: str, port: int) -> Iterator[Callable[[], None]]:
    """While the block runs, name on stderr each rank that is not heard. Call what it yields when all met."""
    others = range(1, world_size) if rank == 0 else (0,)
    heard_s = dict.fromkeys(others, time.monotonic() + _START_S)
    done = threading.Event()
    beats = threading.Thread(target=_beat, args=(rank, host, port, heard_s, done), daemon=True)
    watch = threading.Thread(target=_watch, args=(rank, heard_s, done), daemon=True)
    beats.start()
    watch.start()
    try:
        yield lambda: heard_s.update(dict.fromkeys(others, time.monotonic()))
    finally:
        done.set()
        beats.join(timeout=1.0)


def _beat(rank: int, host: str, port: int, heard_s: dict[int, float], done: threading.Event) -> None:
    """Count up this rank's number, and note when those of others change; ends with the store."""
    counts = dict.fromkeys(heard_s, 0)
    with suppress(RuntimeError, dist.DistError):
        store = dist.PrefixStore("heartbeat", dist.TCPStore(host, port, is_master=False, timeout=_JOIN))
        while not done.wait(SILENT_S / _BEATS):
            store.add(str(rank), 1)
            for other, before in counts.items():
                counts[other] = store.add(str(other), 0)
                if counts[other] != before:
                    heard_s[other] = time.monotonic() if counts[other] < _DONE else float("inf")
        store.add(str(rank), _DONE)


def _watch(rank: int, heard_s: dict[int, float], done: threading.Event) -> None:
    """Say once of each rank that it is silent, and again if it is so after it was heard."""
    named: set[int] = set()
    looked_s = time.monotonic()
    while not done.wait(SILENT_S / _BEATS):
        now_s = time.monotonic()
        if now_s - looked_s > SILENT_S / 2:  # this process itself was stopped
            heard_s.update(dict.fromkeys(heard_s, now_s))
        looked_s = now_s
        silent = {other for other, at_s in heard_s.items() if now_s - at_s > SILENT_S}
        for other in sorted(silent - named):
            why = "is its process stopped, or its host or network down?"
            print(f"meshwise: rank {rank} hears nothing of rank {other}, and waits; {why}", file=sys.stderr)
        named = silent

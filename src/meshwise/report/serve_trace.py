"""A load as a timeline that ui.perfetto.dev opens: a process for each replica, a lane for each request.

A request is three slices: it waits (front end, queue, a cache on its way), its prompt is computed, its
tokens come. Counters say how many requests wait and run on each replica, and how many replicas are paid for.
With separate pools a request is shown on the worker that decodes it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.report.chrome_trace import complete, metadata, write_events
from meshwise.serve.simulate import Served

PHASES = ("wait", "prompt", "tokens")


def write_load_timeline(served: Served, path: str | Path) -> None:
    """Write the timeline of `served` to `path`, whole or not at all."""
    write_events(list(load_events(served)), path)


def load_events(served: Served) -> Iterator[dict[str, Any]]:
    """The events of all replicas in the Trace Event format."""
    times = [served.sent_s, served.start_s, served.first_s, served.last_s]
    start_s = min(float(served.sent_s.min()), *(start for start, _ in served.lives_s))
    ns = np.rint(1e9 * (np.array(times) - start_s)).astype(np.int64)
    for replica in range(int(served.replica.max()) + 1):
        which = np.flatnonzero(served.replica == replica)
        which = which[np.argsort(ns[0, which], kind="stable")]
        yield metadata("process_name", replica, {"name": f"replica {replica}"})
        yield from _slices(served, replica, which, ns)
        yield from _counter("requests waiting", replica, ns[0, which], ns[1, which])
        yield from _counter("requests running", replica, ns[1, which], ns[3, which])
    lives = np.rint(1e9 * (np.array(served.lives_s) - start_s)).astype(np.int64)
    yield metadata("process_name", len(lives), {"name": "fleet"})
    yield from _counter("replicas", len(lives), lives[:, 0], lives[:, 1])


def _slices(served: Served, replica: int, which: Any, ns: Any) -> Iterator[dict[str, Any]]:
    """Each request on the first lane that is free."""
    free, busy = list[int](), list[tuple[int, int]]()
    lanes = 0
    for index in which.tolist():
        times = ns[:, index].tolist()
        while busy and busy[0][0] <= times[0]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, lanes = lanes, lanes + 1
            yield metadata("thread_name", replica, {"name": f"lane {lane}"}) | {"tid": lane}
        heapq.heappush(busy, (times[3], lane))
        args = {"request": index} | {key: int(getattr(served, key)[index]) for key in ("output", "found")}
        for phase, start, end in zip(PHASES, times, times[1:], strict=False):
            if end > start:
                yield complete(f"{phase} {index}", phase, replica, start, end, args) | {"tid": lane}


def _counter(name: str, replica: int, begin: Any, end: Any) -> Iterator[dict[str, Any]]:
    """How many have begun and not ended, at each change."""
    at = np.concatenate([begin, end])
    step = np.concatenate([np.ones(begin.size), -np.ones(end.size)])
    order = np.lexsort((step, at))
    for ns, num in zip(at[order].tolist(), np.cumsum(step[order]).astype(int).tolist(), strict=True):
        yield {"ph": "C", "name": name, "pid": replica, "tid": 0, "ts": ns / 1000, "args": {"num": num}}

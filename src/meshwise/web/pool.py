"""The slow questions of the page: a few are answered at a time, the others wait in a line that has a length.

A client that goes away or asks anew leaves the line, and the search that runs for it ends.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from starlette.requests import ClientDisconnect, Request

from meshwise.core.errors import DataError

SLOTS = min(4, os.cpu_count() or 1)
"""Questions that are answered at a time."""
MOST_WAITING = 32
"""Questions that may wait."""

Hear = Callable[[str], None]
"""Hears now and then how far a search is."""


class _LeftError(Exception):
    """Nobody waits for this answer any more."""


@dataclass(eq=False)
class _Job:
    """A question in the line: whether its turn has come, and how far it is."""

    runs: bool = False
    so_far: str = ""
    left: Event = field(default_factory=Event)

    def run(self, ask: Callable[[Hear], dict[str, Any]]) -> dict[str, Any]:
        self.runs = True
        return ask(self.hear)

    def hear(self, so_far: str) -> None:
        self.so_far = so_far
        if self.left.is_set():
            raise _LeftError


class Pool:
    """The line, and the threads that answer it; a question is known by the name that its asker gave it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(SLOTS)
        self._jobs: dict[str, _Job] = {}

    async def answer(self, request: Request, ask: Callable[[Hear], dict[str, Any]]) -> dict[str, Any]:
        """What `ask` answers when its turn comes. ClientDisconnect if the client goes away before."""
        waiting = sum(not job.runs for job in self._jobs.values())
        if waiting >= MOST_WAITING:
            raise DataError(f"{waiting} questions wait for an answer already; ask again in a minute")
        name = request.headers.get("question", "")[:40] or str(id(request))
        job = self._jobs[name] = _Job()
        found = asyncio.wrap_future(self._threads.submit(job.run, ask))
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((found, gone), return_when=asyncio.FIRST_COMPLETED)
            if not found.done():
                raise ClientDisconnect
            return found.result()
        finally:
            job.left.set()
            found.cancel()
            gone.cancel()
            if self._jobs.get(name) is job:
                del self._jobs[name]

    def progress(self, name: str) -> dict[str, Any]:
        """Of the question `name`: how many wait before it, and how far its search is."""
        job = self._jobs.get(name)
        names = list(self._jobs)
        before = names[: names.index(name)] if job is not None and not job.runs else []
        waiting = sum(not self._jobs[other].runs for other in before)
        return {"before": waiting, "so_far": job.so_far if job is not None else ""}

    def close(self) -> None:
        """Let go of all questions."""
        for job in self._jobs.values():
            job.left.set()
        self._threads.shutdown(wait=False, cancel_futures=True)


async def _gone(request: Request) -> None:
    """Ends when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""One function over many items: in this process, in processes of this machine, or on a Ray cluster.

    for place, answer in each(function, items): ...

gives an answer for every item as it comes. The function is one of a module, takes an item, returns a value
and knows nothing of other items, so the answers are the same wherever they are computed. A process that dies
takes only its item with it (`Lost`); what the function raises is raised here. A node of a cluster that goes
down gives its items back: other nodes compute them, and no answer that has arrived is computed again.

On a cluster (`on_ray`) every node needs meshwise, and files that items name lie where every node sees them.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing.connection import Connection, Pipe
from types import ModuleType
from typing import IO, Any, TypeVar

from meshwise.core.errors import DataError
from meshwise.core.extras import import_extra

Item = TypeVar("Item")
Answer = TypeVar("Answer")
_WORKER = [sys.executable, "-P", "-c", "from meshwise.core.each import answer_calls; answer_calls()"]
_CONNECT_S = 10.0
_NODES_LOST = 8
"""How often an item is given to another node of a cluster before it is lost."""
_cluster: ContextVar[ModuleType | None] = ContextVar("cluster", default=None)
HEARS: ContextVar[Callable[[str], None]] = ContextVar("hears", default=lambda so_far: None)
"""Who hears how far a long answer is, in words (none: it still runs); the answer ends where that raises."""
_tell: ContextVar[Callable[[int, int], None]] = ContextVar("tell", default=lambda done, total: None)


@dataclass(frozen=True, slots=True)
class Lost:
    """The answer of an item whose process gave none: it died, or took too long."""

    reason: str
    seconds: float = 0.0


@contextmanager
def on_ray(address: str | None = "auto") -> Iterator[None]:
    """Compute sweeps, studies, sizings, fits and traces inside this block on a Ray cluster.

    Args:
        address: HOST:PORT of the cluster's head, `auto` for the one that this machine is part of, `local` for
            one started here; None or empty changes nothing.
    """
    if not address:
        yield
        return
    ray = ray_for(address)
    is_ours = not ray.is_initialized()
    try:
        if is_ours:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if port.isdecimal():  # Ray itself tries for minutes
                socket.create_connection((host, int(port)), _CONNECT_S).close()
            ray.init(address, include_dashboard=None, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, OverflowError) as error:
        reason = last_line(str(error))
        raise DataError(f"no Ray cluster at {address} ({reason}); start one, or use local") from None
    token = _cluster.set(ray)
    try:
        yield
    finally:
        _cluster.reset(token)
        if is_ours:
            ray.shutdown()


def ray_for(address: str) -> ModuleType:
    """Ray, for a cluster at `address`; DataError where it is no address, MissingExtraError without Ray."""
    if address not in ("auto", "local") and not re.fullmatch(r"(ray://)?[^/\s]+:\d{1,5}", address):
        raise DataError(f"--ray {address} is no address of a cluster; write HOST:PORT, auto or local")
    ray: ModuleType = import_extra("ray", "ray")
    return ray


@contextmanager
def telling(tell: Callable[[int, int], None], hear: Callable[[str], None] | None = None) -> Iterator[None]:
    """Inside this block `tell(done, total)` hears of every answer that comes, and `hear` is in `HEARS`."""
    told, heard = _tell.set(tell), HEARS.set(hear or HEARS.get())
    try:
        yield
    finally:
        _tell.reset(told)
        HEARS.reset(heard)


def tell(done: int, total: int) -> None:
    """What `telling` hears of work that is not handed out by `each`."""
    _tell.get()(done, total)


def is_on_cluster() -> bool:
    """Whether this is inside of `on_ray`."""
    return _cluster.get() is not None


def each(
    function: Callable[[Item], Answer],
    items: Sequence[Item],
    *,
    jobs: int = 0,
    apart: bool = False,
    fresh: bool = False,
    timeout_s: float | None = None,
) -> Generator[tuple[int, Answer | Lost]]:
    """The place of every item and what `function` makes of it, as answers come.

    Args:
        jobs: Processes of this machine [one a core]; one computes in this process.
        apart: Compute in a process of its own even then, which may die.
        fresh: Start a process for each item.
        timeout_s: How long an item may take; only apart.
    """
    settings = partial(Worker.call, function=function, fresh=fresh, timeout_s=timeout_s)
    jobs = min(jobs or os.cpu_count() or 1, len(items))
    answers: Iterator[tuple[int, Any]] = ((place, function(item)) for place, item in enumerate(items))
    if (ray := _cluster.get()) is not None:
        answers = _through_ray(ray, settings, items)
    elif jobs > 1 or apart:
        answers = _in_processes(settings, items, jobs)
    for done, answer in enumerate(answers, 1):
        _tell.get()(done, len(items))
        yield answer


def all_of(function: Callable[[Item], Answer], items: Sequence[Item], *, jobs: int = 1) -> list[Answer]:
    """What `function` makes of each item, in their order; DataError where a process died."""
    answers = dict(each(function, items, jobs=jobs))
    for answer in answers.values():
        if isinstance(answer, Lost):
            raise DataError(f"{answer.reason}; is there enough memory?")
    return [answers[place] for place in range(len(items))]  # type: ignore[misc]


def _in_processes(ask: Callable[..., Any], items: Sequence[Any], jobs: int) -> Iterator[tuple[int, Any]]:
    """Answers as they come from `jobs` threads, each with a process of its own."""
    workers: list[Worker] = []
    of_thread = threading.local()

    def start() -> None:
        of_thread.worker = Worker()
        workers.append(of_thread.worker)

    def answered(place: int) -> tuple[int, Any]:
        return place, ask(of_thread.worker, item=items[place])

    threads = ThreadPoolExecutor(max(jobs, 1), initializer=start)
    try:
        for done in as_completed([threads.submit(answered, place) for place in range(len(items))]):
            place, (value, error) = done.result()
            if error is not None:
                raise error
            yield place, value
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.close()
        threads.shutdown()


def _through_ray(ray: ModuleType, ask: Callable[..., Any], items: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Answers as they come from the nodes of a cluster, with a few items more than they run at once."""
    task = ray.remote(max_retries=_NODES_LOST)(_ray_task)
    places = iter(range(len(items)))
    pending: dict[Any, int] = {}
    try:
        while True:
            most = 2 * int(ray.cluster_resources().get("CPU", 1)) + 2
            for place in itertools.islice(places, max(most - len(pending), 0)):
                pending[task.remote(ask, items[place])] = place
            if not pending:
                return
            ready, _ = ray.wait(list(pending), num_returns=1)
            for reference in ready:
                place = pending.pop(reference)
                try:
                    value, error = ray.get(reference)
                except ray.exceptions.RayError as lost:
                    value, error = Lost(f"Ray: {last_line(str(lost))}"), None
                if error is not None:
                    raise error
                yield place, value
    finally:
        for reference in pending:
            with suppress(Exception):
                ray.cancel(reference, force=True)


def _ray_task(ask: Callable[..., Any], item: Any) -> tuple[Any, Exception | None]:
    """Of an item on a node. Its own process may die, so if Ray's does, the node was lost."""
    return ask(_ray_worker(), item=item)


@cache
def _ray_worker() -> Worker:
    """The process of this process of Ray, which ends with it."""
    return Worker()


@dataclass(slots=True)
class Worker:
    """A process that calls functions one after the other; started when first needed."""

    _process: subprocess.Popen[bytes] | None = None
    _calls: Connection = field(init=False)
    _errors: IO[str] = field(init=False)
    _is_closed: bool = False
    _starting: threading.Lock = field(default_factory=threading.Lock)

    def call(
        self, function: Callable[..., Any], item: Any, timeout_s: float | None = None, *, fresh: bool = False
    ) -> tuple[Any, Exception | None]:
        """What `function` returns, or raises; `Lost` if the process dies or is too slow.

        `fresh`: the process ends with its answer.
        """
        process, begin = self._started(), time.monotonic()
        try:
            self._calls.send((function, item))
            if self._calls.poll(timeout_s):
                answer: tuple[Any, Exception | None] = self._calls.recv()
                return answer
            reason = f"it took longer than timeout_s = {timeout_s:g} s"
        except (OSError, EOFError):
            reason = self._cause_of_death(process)
        finally:
            if fresh:
                self.end()
        self.end()
        return Lost(reason, time.monotonic() - begin), None

    def _started(self) -> subprocess.Popen[bytes]:
        with self._starting:
            if self._is_closed:
                raise OSError("closed")
            if self._process is not None and self._process.poll() is None:
                return self._process
            self.end()
            self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
            self._calls, theirs = Pipe()
            self._process = subprocess.Popen(
                [*_WORKER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            theirs.close()
            return self._process

    def _cause_of_death(self, process: subprocess.Popen[bytes]) -> str:
        code = process.wait()
        self._errors.seek(0)
        return f"the process {ended_how(code)}: {last_line(self._errors.read())}".removesuffix(": ")

    def close(self) -> None:
        """End the process, from any thread, and start no other."""
        with self._starting:
            self._is_closed = True
            self.end()

    def end(self) -> None:
        """End the process and every one that it started."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._calls.close()
            self._errors.close()


def ended_how(exit_code: int) -> str:
    """How a process ended, as a sentence goes on about it."""
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def last_line(text: str) -> str:
    """The last line of what a command said, without its name."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].removeprefix("meshwise: ").removeprefix("Error: ") if lines else ""


def answer_calls() -> None:
    """Call what comes through the pipe that the command line names, and answer there."""
    calls = Connection(int(sys.argv[1]))
    with suppress(EOFError):
        while True:
            function, item = calls.recv()
            try:
                calls.send((function(item), None))
            except Exception as error:
                calls.send((None, error))

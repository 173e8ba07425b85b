"""Starts the ranks of a program and hears them out.

On one machine the ranks are processes of our own: they meet at a store that the parent holds, talk over
gloo (CPU) or NCCL (GPUs), and answer through a pipe each. The first rank that fails ends the job; its
error is the one reported, the others are stopped. A rank also dies with its parent, so that nothing is
left behind. Where `torchrun` or `srun` has started this process already, it is one rank of the world that
their environment describes, and nothing is started.
"""

import ctypes
import datetime
import multiprocessing as mp
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwise.core.each import ended_how
from meshwise.core.errors import MeshwiseError, MissingExtraError, PlanError
from meshwise.core.refusals import refuse

RANKS_PER_CORE = 16
"""So many CPU ranks a core; beyond that they starve each other, and each holds about 0.3 GB."""

LOOPBACK = "127.0.0.1"
_LAST_PORT = 65535
_LOOK_S = 5.0  # how often to look for ranks that a signal has stopped
_PRELOAD = ["meshwise.runtime.preload"]
_COLLECT_S = 0.5  # after the first failure, wait so long for one that happened before it
_TIMEOUT_S = 1800.0
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo's words


class RankError(MeshwiseError):
    """A rank failed while the program ran; the message begins with that rank's own error."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank of a world: its number, the world's size, its number on its machine, its kind of device."""

    rank: int
    world_size: int
    local_rank: int
    device_type: str = "cpu"

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.device("cuda", self.local_rank)


def launch(
    function: Callable[..., Any], ranks: int, *args: Any, device_type: str = "cpu", port: int = 0
) -> list[Any] | None:
    """Call `function(place, *args)` on every rank; the results by rank.

    `function` and `args` must be picklable. `port` is where the ranks meet (0: a free one). In a world
    that torchrun or srun started, rank 0 gets the results and the others None.
    """
    outside = outside_place(os.environ, device_type)
    if outside is not None:
        refuse("started world", PlanError, ranks=ranks, started=outside.world_size)
        return _call_here(function, outside, *args)
    check_world(ranks, device_type)
    refuse("port", PlanError, port=port, most=_LAST_PORT)
    try:
        store = _meeting_store(port)
    except (RuntimeError, dist.DistError, OSError) as error:
        raise _cannot_meet(error, f"port {port}", "name another with --port, or leave it out") from None
    started: list[StartedRank] = []
    ended = threading.Event()
    threading.Thread(target=_name_stopped, args=(started, ranks, ended), daemon=True).start()
    try:
        for rank in range(ranks):
            started.append(_start(RankPlace(rank, ranks, rank, device_type), store.port, (function, args)))
        answers = _answers(started)
        for process, pipe in started:
            pipe.close()
            process.join(timeout=5)
        return answers
    finally:
        ended.set()
        _kill(started)


class StartedRank(NamedTuple):
    """A rank of this machine: its process, and where it answers (its result, or when it failed and why)."""

    process: BaseProcess
    pipe: Connection


_Failure = tuple[float, MeshwiseError]
"""When a rank failed, and its error."""


def _start(place: RankPlace, port: int, call: tuple[Callable[..., Any], Any]) -> StartedRank:
    """Start a rank, which meets the others at `port` of this machine and makes the `call`."""
    threads = max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // place.world_size))
    context = _context(place.device_type)
    ours, theirs = context.Pipe()
    arguments = (place, port, threads, theirs)
    process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {place.rank}")
    try:
        process.start()
    except (EOFError, OSError):
        ours.close()
        raise RankError(f"rank {place.rank} did not start: its server was ended; run it again") from None
    theirs.close()
    with suppress(OSError):  # one that is gone is noticed where its answer is awaited
        ours.send(call)
    return StartedRank(process, ours)


def _kill(started: Sequence[StartedRank]) -> None:
    """Stop every rank at once."""
    if server := _server_pid():
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGCONT)  # it tells how ranks end
    for rank in started:
        if rank.process.is_alive():
            rank.process.kill()
        rank.process.join()
        rank.pipe.close()


def _answers(started: Sequence[StartedRank]) -> list[Any]:
    """The results by rank; RankError (or the rank's own MeshwiseError) of the first that fails."""
    results: dict[int, Any] = {}
    while len(results) < len(started):
        failures = _listen(started, results, timeout_s=_LOOK_S)
        if failures:
            time.sleep(_COLLECT_S)
            failures = _listen(started, results, timeout_s=0.0) | failures
            raise min(failures.values(), key=lambda failure: failure[0])[1]
    return [results[rank] for rank in sorted(results)]


def _name_stopped(started: Sequence[StartedRank], ranks: int, ended: threading.Event) -> None:
    """Say once of each rank that a signal stopped it: all others wait for it, silently."""
    named: set[int] = set()
    while not ended.wait(_LOOK_S):
        waited = {rank.process.pid or 0: rank.process.name for rank in tuple(started)}
        if len(waited) < ranks:
            waited[_server_pid()] = f"rank {len(waited)} does not start: the process that starts it"
        for pid in filter(_is_stopped, waited.keys() - named):
            named.add(pid)
            how = f"continue it (kill -CONT {pid}) or end it (kill -KILL {pid})"
            text = f"meshwise: {waited[pid]} is stopped by a signal, and all wait for it; {how}"
            print(text, file=sys.stderr)


def _listen(started: Sequence[StartedRank], results: dict[int, Any], timeout_s: float) -> dict[int, _Failure]:
    """Take in what ranks have answered; those that failed or died, by rank."""
    failures: dict[int, _Failure] = {}
    waiting: dict[Any, int] = {rank.pipe: n for n, rank in enumerate(started) if n not in results}
    for number in map(waiting.__getitem__, wait(waiting, timeout_s)):
        process, pipe = started[number]
        try:
            answer = pipe.recv()
        except (EOFError, OSError):  # the rank ended before, or while, it answered
            answer = None
        if answer is None:
            process.join(timeout=5)
            code = process.exitcode or 0
            hint = "; the system may be out of memory" if code == -signal.SIGKILL else ""
            death = f"it {ended_how(code)}{hint if code < 0 else ' before it was done'}"
            failures[number] = 0.0, RankError(f"rank {number} failed: {death}")  # it cannot say when
        elif isinstance(answer[-1], MeshwiseError):
            failures[number] = answer
        else:
            results[number] = answer[0]
    return failures


def _server_pid() -> int:
    """The process that ranks are forks of; 0 where there is none."""
    server: Any = forkserver._forkserver
    return server._forkserver_pid or 0


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP); False where /proc does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _failure(rank: int, error: Exception) -> MeshwiseError:
    """What `rank` says of the error that it is handling: a sentence, or a traceback if none explains it."""
    text = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        error = PlanError("its memory does not hold the tensors; use smaller sizes or more ranks, or dryrun")
    elif any(sign in text for sign in _LOST):
        error = RankError("it lost the connection to another rank, whose error says why")
    if isinstance(error, MeshwiseError):
        return type(error)(f"rank {rank}: {error}")
    trace = traceback.format_exc().strip()
    return RankError(f"rank {rank} failed: {type(error).__name__}: {error}\n{trace}")


def _meeting_store(port: int) -> dist.TCPStore:
    """The store where the ranks of this machine meet; only this machine reaches it."""
    listening = socket.create_server((LOOPBACK, port))  # left to itself, the store listens on all interfaces
    port = listening.getsockname()[1]
    how = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listening.detach()}
    return dist.TCPStore(LOOPBACK, port, **how)


def check_world(ranks: int, device_type: str) -> None:
    """PlanError or MissingExtraError for a world that this machine cannot hold."""
    on_gpus = device_type == "cuda"
    most = torch.cuda.device_count() if on_gpus else RANKS_PER_CORE * (os.cpu_count() or 1)
    if most == 0:
        raise MissingExtraError("this machine has no CUDA device; run with --device cpu, or use dryrun")
    refuse("world", PlanError, ranks=ranks, on_gpus=on_gpus, most=most, a_core=RANKS_PER_CORE)


def _context(device_type: str) -> Any:
    """How ranks start: CPU ranks as forks of a server that has imported torch once (two seconds each);
    on GPUs each anew, because a process that has touched CUDA must not fork."""
    if device_type == "cuda":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


# --- inside a rank -----------------------------------------------------------------------------


def _serve(place: RankPlace, port: int, threads: int, pipe: Connection) -> None:
    """The life of a rank: meet the others, make the call, answer, and wait until all others have."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent handles it
    _die_with_launcher()
    torch.set_num_threads(threads)
    if place.device_type == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        function, args = pipe.recv()
    except EOFError:  # the launcher has given up
        return
    try:
        _join(place, store=dist.TCPStore(LOOPBACK, port, is_master=False))
        pipe.send((function(place, *args),))
        with suppress(EOFError):
            pipe.recv()
        dist.destroy_process_group()
    except Exception as error:
        with suppress(OSError):  # a launcher that is gone
            pipe.send((time.monotonic(), _failure(place.rank, error)))
        sys.stdout.flush()
        os._exit(1)


def _die_with_launcher() -> None:
    """Linux ends this rank when the process that launched it goes, a stopped rank too.

    A forked rank's parent is the server, which ends when no one holds its line to the launcher any more.
    """
    parent = os.getppid()
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    die_with_parent(parent)
    launcher = mp.parent_process()
    if launcher is not None and not launcher.is_alive():
        os._exit(1)


def die_with_parent(parent: int) -> None:
    """Linux ends this process when its parent goes, however it goes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _join(place: RankPlace, **how: Any) -> None:
    backend = "gloo" if place.device_type == "cpu" else "cpu:gloo,cuda:nccl"
    if place.device_type != "cpu":
        torch.cuda.set_device(place.device)
        how["device_id"] = place.device
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, timeout=timeout, **how)


# --- a world that someone else started ---------------------------------------------------------


def outside_place(environ: Mapping[str, str], device_type: str = "cpu") -> RankPlace | None:
    """This process's place in the world of torchrun or srun; None where neither started it."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK"
    elif environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        names = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
    else:
        return None
    rank, world_size, local_rank = (_number(environ, name) for name in names)
    if rank >= world_size:
        raise PlanError(f"{names[0]} is {rank} in a world of {world_size} ({names[1]}); ranks count from 0")
    return RankPlace(rank, world_size, local_rank, device_type)


def meeting_point(environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and port where ranks of an outside world meet: MASTER_ADDR and _PORT, or Slurm's first node."""
    address = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    if environ.get("MASTER_PORT"):
        return address, _number(environ, "MASTER_PORT", most=_LAST_PORT)
    return address, 20000 + _number(environ, "SLURM_JOB_ID") % 10000


def _number(environ: Mapping[str, str], name: str, most: int | None = None) -> int:
    """A count from the environment, 0 where it is not set."""
    text = environ.get(name, "0")
    if not text.isdecimal() or (most is not None and int(text) > most):
        kind = "a count" if most is None else f"a number up to {most}"
        raise PlanError(f"the environment says {name}={text}, which is not {kind}; set or unset it")
    return int(text)


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[003-010,12],cpu1` -> `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    if match is None:
        raise PlanError(f"SLURM_STEP_NODELIST is {nodes!r}; set MASTER_ADDR to the first node")
    return match[1] + (match[2] or "")


def _call_here(function: Callable[..., Any], place: RankPlace, *args: Any) -> list[Any] | None:
    """Be one rank of an outside world; rank 0 returns every rank's result.

    A rank that fails says so before its process, and with that its connections, ends. The others notice,
    and say that they lost it.
    """
    try:
        host, port = meeting_point(os.environ)
        point = f"tcp://{host}:{port}"
        if place.device_type == "cuda":
            check_world(place.local_rank + 1, "cuda")
        try:
            _join(place, init_method=point)
        except (RuntimeError, dist.DistError, OSError) as error:
            raise _cannot_meet(error, point, "set MASTER_ADDR and MASTER_PORT on every rank") from None
        result = function(place, *args)
        results: list[Any] | None = [None] * place.world_size if place.rank == 0 else None
        dist.gather_object(result, results)
    except Exception as error:
        raise _failure(place.rank, error) from None
    dist.destroy_process_group()
    return results


def _cannot_meet(error: Exception, point: str, advice: str) -> Exception:
    """A PlanError for what torch says of a place where ranks should meet, else `error` itself."""
    text = str(error).lower()
    if "eaddrinuse" in text or "address already in use" in text:
        return PlanError(f"{point} is in use; {advice}")
    if isinstance(error, dist.DistNetworkError | OSError):
        return PlanError(f"the ranks cannot meet at {point}; {advice}")
    return error

"""Captures this process's part of a job: one rank, one trace file, whole or not at all.

This file needs only the standard library, torch and `torch_private.py` beside it, for it also runs inside
other people's programs, whose Python may not hold meshwise (see `hook/sitecustomize.py`). The profiler sees
operators, kernels, shapes and allocations of the thread that starts it, of autograd's threads and of gloo's
workers. PyTorch's profiler can watch all other Python threads too, but then it sees no allocations:
`memory=False` chooses that. Into the trace go, besides, PyTorch's flight recorder (group, sequence and sizes
of every collective; gloo's own events lack them) and the ranks of every group.

The trace is written when the capture ends: at the end of the `with` block, at exit (`os._exit` too), or when
the process is told to terminate because another rank failed. Should the main thread then be stuck inside a
collective that will never finish, the group is aborted to free it. A rank killed outright (SIGKILL) leaves
nothing; the others do. Writing takes time, so it waits until the process ends: a program that destroys its
process group and makes another must not find its ranks apart by that.

PyTorch has one profiler. Where the program starts its own, the capture gives way: it writes what it has, and
goes on in a further file (`rank-N-again-1.json`) when that has ended. The program's own trace has the rest.
It gives way, too, where a module swaps its tensors for others, as FSDP2's `to_empty` does: with shapes, the
profiler holds weak references to all inputs of operators, and torch swaps no tensor that has any.

Kineto writes without checking, so the file is written beside its place, its end is looked at, and only a
complete one is moved to `rank-N.json`. A full disk leaves no file and one sentence.
"""

import atexit
import importlib
import json
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

FLIGHT_RECORDER_CALLS = "100000"
"""Calls that the flight recorder keeps; must be in the environment before torch is imported."""
_RECORDED = ["profiling_name", "process_group", "collective_seq_id", "time_created_ns"]
_RECORDED += ["input_sizes", "input_dtypes", "output_sizes", "output_dtypes"]
_QUIET = "99"
_GRACE_S = 5.0


class CaptureError(OSError):
    """A trace could not be written; the message is one sentence."""


@dataclass(eq=False)
class Capture:
    """The profiler of one rank: `start` it and `stop` it."""

    directory: Path
    rank: int | None = None
    world_size: int | None = None
    shapes: bool = True
    memory: bool = True
    stacks: bool = False

    def __post_init__(self) -> None:
        self._groups: dict[str, list[int]] = {}
        self._calls: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._profiler: Any = None
        self._started_ns, self._core_wait_s = 0, _core_wait_s()

    def start(self) -> None:
        """Begin to record; CaptureError if the folder cannot be made."""
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        from torch.profiler import profile

        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CaptureError(_sentence(self.directory, error.strerror)) from None
        config = _torch_private().ProfilerConfig(profile_all_threads=not self.memory)
        self._profiler = profile(
            experimental_config=config,
            record_shapes=self.shapes,
            profile_memory=self.memory,
            with_stack=self.stacks,
        )
        self._started_ns, self._core_wait_s = time.time_ns(), _core_wait_s()
        with _compiler_unloaded():
            self._profiler.start()

    def stop(self) -> Path | None:
        """Stop and write the trace; its path, or None when already stopped. CaptureError if not written."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        rank, world_size = self._place()
        self.remember()
        about = {"rank": rank, "world_size": world_size, "host": socket.gethostname(), "pid": os.getpid()}
        about |= {"core_wait_s": _core_wait_s() - self._core_wait_s, "num_cores": os.cpu_count()}
        profiler.add_metadata_json("meshwise", json.dumps(about | {"groups": self._groups}))
        profiler.add_metadata_json("meshwise_collectives", json.dumps(list(self._calls.values())))
        profiler.stop()
        return _write(profiler, self.directory, rank)

    def remember(self) -> None:
        """Keep what is known of groups and collectives by now; to be called before they are destroyed."""
        self._groups |= _groups()
        for call in _flight_record(self._started_ns):
            self._calls[call["time_created_ns"], call["profiling_name"], call["collective_seq_id"]] = call

    def _place(self) -> tuple[int, int]:
        rank, world_size = self.rank, self.world_size
        distributed = sys.modules.get("torch.distributed")
        if rank is None and distributed is not None and distributed.is_initialized():
            rank, world_size = distributed.get_rank(), distributed.get_world_size()
        told = os.environ.get("RANK", 0), os.environ.get("WORLD_SIZE", 1)
        return int(told[0] if rank is None else rank), int(told[1] if world_size is None else world_size)


def _core_wait_s() -> float:
    """How long this process's threads have been ready to run without a core; 0 where no system tells."""
    total_ns = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # it has ended
            total_ns += int(thread.read_text().split()[1])
    return total_ns / 1e9


@contextmanager
def _compiler_unloaded() -> Iterator[None]:
    """Keep PyTorch's profiler from loading the compiler (over a second) to read one setting of it."""
    name, lazy_modules = "_inductor", _torch_private().lazy_modules
    is_lazy = name in lazy_modules and f"torch.{name}" not in sys.modules
    lazy_modules.difference_update({name} if is_lazy else ())
    try:
        yield
    finally:
        lazy_modules.update({name} if is_lazy else ())


def _torch_private() -> ModuleType:
    """The module of private names of torch; the hook has loaded it from its file."""
    found = sys.modules.get("_meshwise_torch_private")
    return found or importlib.import_module("meshwise.runtime.torch_private")


@contextmanager
def _said() -> Iterator[None]:
    """What goes wrong inside is said; the program goes on."""
    try:
        yield
    except Exception as error:
        print(f"meshwise: {error or type(error).__name__}", file=sys.stderr, flush=True)


def before(owner: Any, name: str, first: Callable[[], None]) -> None:
    """Have `first` called before each call of this function of a module or class."""
    function = getattr(owner, name)

    @wraps(function)
    def call(*args: Any, **how: Any) -> Any:
        first()
        return function(*args, **how)

    setattr(owner, name, call)


def capture_process_group(directory: str, **options: Any) -> None:
    """Capture from `init_process_group` to the end of the process: what the hook installs.

    To be called while `torch.distributed.distributed_c10d` has just been loaded and nobody uses it yet.
    """
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    init = c10d.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = init(*args, **kwargs)
        with _said():
            place = c10d.get_rank(), c10d.get_world_size()
            if _LIFE.capture is not None:
                _LIFE.capture.rank, _LIFE.capture.world_size = place
            if not _LIFE.has_begun:
                _LIFE.begin(lambda: Capture(Path(directory), *place, **options))
        return result

    def remember() -> None:
        with _said():
            if _LIFE.capture is not None:
                _LIFE.capture.remember()

    c10d.init_process_group = init_process_group  # type: ignore[attr-defined]
    before(c10d, "destroy_process_group", remember)


def capture_modules(directory: str, **options: Any) -> None:
    """Capture from the first call of a module on, for a program of one process without a process group.

    To be called when `torch.nn.modules.module` has been loaded. Children of a fork, as the workers of a
    loader are, begin no capture so.
    """
    owner = os.getpid()

    def begin(*_: Any) -> None:
        handle.remove()
        with _said():
            if not _LIFE.has_begun and os.getpid() == owner:
                _LIFE.begin(lambda: Capture(Path(directory), **options))

    handle = sys.modules["torch.nn.modules.module"].register_module_forward_pre_hook(begin)


class _Life:
    """The capture of this process from its start to its one end, whoever brings the end about."""

    def __init__(self) -> None:
        self.capture: Capture | None = None
        self.has_begun = self.is_at_work = self.is_waiting = self.must_die = False
        self.num_inside, self.is_done = 0, threading.Event()

    def begin(self, make: Callable[[], Capture]) -> None:
        """Start the capture that `make` makes, and see to it that it ends before the process does."""
        self.has_begun = True
        self.make = make
        self.is_waiting = _torch_private().profiler_enabled()
        if not self.is_waiting:
            self.resume()
        atexit.register(self.finish)
        multiprocessing.util.Finalize(None, self.finish, exitpriority=100)
        self.leave = os._exit
        before(os, "_exit", self.finish)
        self.heed_sigterm()
        self.give_way()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The profiler is ours inside: what goes wrong is said, the program goes on, and SIGTERM waits."""
        self.is_at_work = True
        with _said():
            yield
        self.is_at_work = False
        if self.must_die:
            self.finish()

    def resume(self) -> None:
        """Start a capture."""
        with self.at_work():
            capture = self.make()
            capture.start()
            self.capture = capture

    def pause(self) -> None:
        """Write the trace so far, if there is one to write."""
        capture, self.capture = self.capture, None
        if capture is not None:
            with self.at_work():
                capture.stop()

    def finish(self) -> None:
        """Write the trace and, if the process was told to terminate, end it."""
        if self.is_at_work:
            return
        self.pause()
        self.is_done.set()
        if self.must_die:
            self.leave(128 + signal.SIGTERM)

    def give_way(self) -> None:
        """Let the program use PyTorch's profiler, of which there is one, and swap tensors, which it holds."""
        import torch.autograd.profiler

        profile, module = torch.autograd.profiler.profile, torch.nn.Module
        before(profile, "_prepare_trace", self.step_aside)
        before(torch.utils, "swap_tensors", lambda: self.step_aside(swaps=True))
        ends = (profile, "__exit__"), (torch.utils, "swap_tensors")
        for owner, name in (*ends, (module, "_apply"), (module, "load_state_dict")):  # which swap many
            setattr(owner, name, self.in_the_way()(getattr(owner, name)))

    def step_aside(self, *, swaps: bool = False) -> None:
        """Stop the capture, for swaps of tensors only one with shapes, until nothing is in its way."""
        if not self.is_at_work and self.capture is not None and (self.capture.shapes or not swaps):
            self.pause()
            self.is_waiting = True

    @contextmanager
    def in_the_way(self) -> Iterator[None]:
        """After the outermost of such calls a capture that stepped aside goes on."""
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1
            is_busy = self.num_inside or self.is_at_work or _torch_private().profiler_enabled()
            if self.is_waiting and not is_busy:
                self.is_waiting = False
                self.resume()

    def heed_sigterm(self) -> None:
        """Finish, then end, when SIGTERM comes; a program with its own handler keeps it."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def handle(number: int, frame: Any) -> None:
            self.must_die = True
            self.finish()

        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.signal(signal.SIGTERM, handle)
        before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        if before != -1:  # someone else waits for signals so: leave it to them
            signal.set_wakeup_fd(before)
            return
        threading.Thread(target=self._free_main_thread, args=(read_end,), daemon=True).start()

    def _free_main_thread(self, read_end: int) -> None:
        """Abort the process group if the main thread does not answer SIGTERM, so that it can."""
        while os.read(read_end, 1)[0] != signal.SIGTERM:
            pass
        if not self.is_done.wait(_GRACE_S):
            abort = getattr(sys.modules["torch.distributed.distributed_c10d"], "_abort_process_group", None)
            if abort is not None:
                abort()


_LIFE = _Life()
"""The capture of this process, which a module or a process group begins, whichever comes first."""


def _groups() -> dict[str, list[int]]:
    """The ranks of every process group, by the name that traces call it."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return {}
    world = c10d._world
    return {name: sorted(world.pg_group_ranks.get(group) or {}) for group, name in world.pg_names.items()}


def _flight_record(since_ns: int) -> list[dict[str, Any]]:
    """The collectives called since then, in order; empty where this torch keeps no record."""
    try:
        entries = json.loads(_torch_private().dump_flight_recorder_json()).get("entries") or []
    except (ImportError, AttributeError, RuntimeError, ValueError):
        return []
    recent = (entry for entry in entries if entry.get("time_created_ns", since_ns) >= since_ns)
    return [{name: entry.get(name) for name in _RECORDED} for entry in recent]


def _write(profiler: Any, directory: Path, rank: int) -> Path:
    """Write the trace beside its place, look at its end, move it there; never onto another one."""
    partial = directory / f".rank-{rank}.{os.getpid()}.json"
    try:
        profiler.export_chrome_trace(str(partial))
        if not _is_complete(partial):
            raise OSError(0, "the disk is full or the file too large")
        path = directory / f"rank-{rank}.json"
        count = 0
        while path.exists():
            count += 1
            path = directory / f"rank-{rank}-again-{count}.json"
        return partial.replace(path)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CaptureError(_sentence(directory, f"{reason}, so rank {rank} leaves no profile")) from None
    finally:
        profiler.profiler = None  # it refers to tensors, which cannot be swapped then
        for left in directory.glob(f"{partial.name}*"):
            left.unlink(missing_ok=True)


def _is_complete(path: Path) -> bool:
    """Whether the file ends as a JSON object does."""
    if not path.exists() or path.stat().st_size < 2:
        return False
    with path.open("rb") as file:
        file.seek(-min(64, path.stat().st_size), os.SEEK_END)
        return file.read().rstrip().endswith(b"}")


def _sentence(directory: Path, reason: str | None) -> str:
    return f"cannot write the profile in {directory}: {reason}; name a writable place with room"

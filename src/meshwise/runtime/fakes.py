"""The mode of fake tensors in which a program runs dry, and kernels and streams of absent devices."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshwise.runtime.torch_private import FakeTensorMode

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_library = torch.library.Library("aten", "IMPL")


def leave_whole(key: str) -> None:
    """Ops that devices have a kernel for stay one op where this machine has none for the dispatch key `key`.

    Torch would put several ops in their place, whose results no device ever holds.
    """
    for name in ("silu_backward", "mish_backward", "native_channel_shuffle"):
        _library.impl(name, _missing, key)


def _missing(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("a kernel of a device was called on a machine without one")


class DeviceFakes(FakeTensorMode):
    """A `FakeTensorMode` that waits for a collective as devices do; torch's would make a second tensor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under a dry run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _WAIT:
            return args[0]
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        return self.dispatch(func, types, args, kwargs or {})


class Stream:
    """A stream of a device, or an event on one, on which everything happens at once.

    Ops that are launched have numbers. What is launched next on a stream starts when those in `after` have
    ended; an event is passed when those have ended that were in `after` of its stream when it was recorded.
    """

    _entered: ClassVar[list[Stream]] = []
    _known: ClassVar[weakref.WeakSet[Stream]] = weakref.WeakSet()
    _host_after: ClassVar[set[int]] = set()
    """What the host has waited for since the last launch."""

    def __init__(self, *_: Any, **how: Any) -> None:
        self.device = how.get("device")
        self.device_index = self.cuda_stream = self.cuda_event = self.stream_id = self.priority = 0
        self.device_type = 1
        self.after: set[int] = set()
        self._known.add(self)

    @classmethod
    def begin(cls) -> None:
        """A program begins: nothing was launched."""
        cls._entered[:] = [Stream()]
        cls._host_after.clear()

    @classmethod
    def default(cls, *_: Any) -> Stream:
        """The stream in which a program works that names none."""
        return cls._entered[0]

    @classmethod
    def current(cls, *_: Any) -> Stream:
        """The stream in which the program works now."""
        return cls._entered[-1]

    @classmethod
    def set_current(cls, stream: Stream) -> None:
        """From now on the program works in `stream`."""
        cls._entered[-1:] = [stream]

    @classmethod
    def synchronize_all(cls, *_: Any) -> None:
        """The host waits for all that was launched."""
        for stream in cls._known:
            stream.synchronize()

    def launched(self, number: int) -> tuple[list[int], list[int]]:
        """Op `number` is launched here: what it starts after, and what the host has waited for before."""
        before, self.after = sorted(self.after), {number}
        waited = sorted(self._host_after)
        self._host_after.clear()
        return before, waited

    def synchronize(self) -> None:
        """The host waits for what was launched here."""
        self._host_after.update(self.after)

    def wait_event(self, other: Stream) -> None:
        """What comes next waits for an event, or for all that was launched on another stream."""
        self.after |= other.after

    wait_stream = wait_event

    def wait(self, stream: Stream | None = None) -> None:
        """Of an event: what comes next on `stream` waits for it."""
        (stream or self.current()).wait_event(self)

    def record(self, stream: Stream | None = None) -> None:
        """Of an event: it stands for what was launched on `stream` so far."""
        self.after = {*(stream or self.current()).after}

    def record_event(self, event: Any = None) -> Any:
        """The event, or a new one, which stands for what was launched so far."""
        event = event or DeviceEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        """All is done."""
        return True

    def is_capturing(self) -> bool:
        """No CUDA graph is."""
        return False

    def elapsed_time(self, end: Any) -> float:
        """A millisecond, since no time passes."""
        return 1.0

    def __enter__(self) -> Stream:
        self._entered.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        self._entered.pop()


class DeviceEvent(Stream):
    """An event that has passed."""


class Silent:
    """Whatever is called of it does nothing and returns 0."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0


class Parts:
    """The parts of `whole` along `dim` as `torch.chunk` cuts them, empty ones behind, each made on demand.

    FSDP2 cuts each weight into one part a rank to take its own; in a dry run of a large world, these views of
    weights take longer than the step itself.
    """

    def __init__(self, whole: Tensor, number: int, dim: int) -> None:
        self._whole, self._number, self._dim = whole, number, dim

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, place: int) -> Tensor:
        rows = self._whole.shape[self._dim]
        size = -(-rows // self._number)
        begin = min(range(self._number)[place] * size, rows)
        part = self._whole.narrow(self._dim, begin, min(size, rows - begin))
        return part if part.shape[self._dim] else torch.empty_like(part).view(-1)

"""The mode of fake tensors in which a program runs dry, and kernels and streams of absent devices."""

from __future__ import annotations

from typing import Any

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
    """A stream or an event: everything happens at once."""

    def __init__(self, *_: Any, **how: Any) -> None:
        self.device = how.get("device")
        self.device_index = self.cuda_stream = self.cuda_event = self.stream_id = self.priority = 0
        self.device_type = 1

    def record_event(self, event: Any = None) -> Any:
        """The event itself, passed."""
        return event or Stream()

    def query(self) -> bool:
        """All is done."""
        return True

    def is_capturing(self) -> bool:
        """No CUDA graph is."""
        return False

    def elapsed_time(self, end: Any) -> float:
        """A millisecond, since no time passes."""
        return 1.0

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    wait = wait_event = wait_stream = record = synchronize = _nothing
    __exit__ = _nothing

    def __enter__(self) -> Stream:
        return self


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

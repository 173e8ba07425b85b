"""Streams and events of devices that are not there: all is done at once."""

from __future__ import annotations

from typing import Any


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

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0

"""What a capture costs the rank that it captures.

A profiler costs time per event: operators stretch, by about 1 µs each; kernels on a device do not. So the
cost is the number of events in the trace times the cost of one, and that is measured in the same process
right after the capture: tiny training steps with and without a profiler of the same options, in CPU time
of the thread, so that other processes do not count. Starting and writing are timed as they happen, but lie
before and after what is captured. The same program run bare and captured differs by the noise of two runs as
well; `python -m benchmarks profiling` holds the two ways against each other.
"""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwise.core.units import duration
from meshwise.runtime.capture import Capture

_EVENT = re.compile(
    rb'"cat":\s*"(?:cpu_op|user_annotation|python_function|cuda_runtime|cuda_driver|cpu_instant_event)"'
)
_LONGEST = 64
_BLOCK_BYTES = 1 << 22
_NUM_CALLS = 40
_NUM_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """Cost of one rank's capture: inside the captured time `run_s` (estimated), and around it (measured)."""

    num_events: int
    event_s: float
    run_s: float
    start_s: float
    stop_s: float

    @property
    def inside_s(self) -> float:
        """Seconds that recording added to `run_s`, at most all of it."""
        return min(self.num_events * self.event_s, self.run_s)

    @property
    def overhead_frac(self) -> float | None:
        """What recording added, as a share of the time without it."""
        bare = self.run_s - self.inside_s
        return self.inside_s / bare if bare > 0 else None

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        names = ("num_events", "event_s", "run_s", "start_s", "stop_s", "inside_s", "overhead_frac")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        share = "" if self.overhead_frac is None else f"{100 * self.overhead_frac:+.1f} %, "
        each = f"{self.num_events} events at {duration(self.event_s)}"
        outside = f"start {duration(self.start_s)} and writing {duration(self.stop_s)} outside it"
        return f"{share}{duration(self.inside_s)} of {duration(self.run_s)} ({each}; {outside})"


def capture_cost(done: Capture) -> CaptureCost | None:
    """The cost of a finished capture; None if it left no file. Takes a few tens of milliseconds."""
    if done.path is None:
        return None
    return CaptureCost(
        num_events=num_host_events(done.path),
        event_s=event_cost_s(done.options),
        run_s=done.run_s,
        start_s=done.start_s,
        stop_s=done.stop_s,
    )


def num_host_events(path: Path) -> int:
    """Events of a trace that the host recorded itself: operators, sections, launches, allocations."""
    count, rest = 0, b""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            buffer = rest + block
            found = list(_EVENT.finditer(buffer))
            count += len(found)
            rest = buffer[max(found[-1].end() if found else 0, len(buffer) - _LONGEST) :]
    return count


def event_cost_s(options: dict[str, bool]) -> float:
    """Seconds that one event costs the thread that records it, measured here and now."""
    weights = [torch.ones(8, 8, requires_grad=True) for _ in range(4)]

    def step() -> None:
        x = torch.ones(8, 8)
        for weight in weights:
            x = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight))
        x.square().mean().backward()
        for weight in weights:
            weight.grad = None

    def seconds() -> float:
        rounds = []
        for _ in range(_NUM_ROUNDS):
            begin = time.thread_time()
            for _ in range(_NUM_CALLS):
                step()
            rounds.append(time.thread_time() - begin)
        return min(rounds)

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    bare_s = seconds()
    with tempfile.TemporaryDirectory() as folder:
        probe = Capture(folder, 0, 1, **options)
        probe.start()
        captured_s = seconds()
        path = probe.stop()
        bare_s = min(bare_s, seconds())
        num_events = num_host_events(path) / _NUM_ROUNDS if path else 1
    torch.set_num_threads(num_threads)
    return max(0.0, captured_s - bare_s) / max(1.0, num_events)

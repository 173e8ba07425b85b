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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from meshwise.core.units import duration
from meshwise.runtime.capture import Capture

_EVENT = re.compile(
    rb'"cat":\s*"(?:cpu_op|user_annotation|python_function|cuda_runtime|cuda_driver|cpu_instant_event)"'
)
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
        return asdict(self) | {"inside_s": self.inside_s, "overhead_frac": self.overhead_frac}

    def __str__(self) -> str:
        share = "" if self.overhead_frac is None else f"{100 * self.overhead_frac:+.1f} %, "
        each = f"{self.num_events} events at {duration(self.event_s)}"
        outside = f"start {duration(self.start_s)} and writing {duration(self.stop_s)} outside it"
        return f"{share}{duration(self.inside_s)} of {duration(self.run_s)} ({each}; {outside})"


def capture_cost(done: Capture) -> CaptureCost | None:
    """The cost of a finished capture; None if it left no file. Takes a few tens of milliseconds."""
    if done.path is None:
        return None
    num_events, event_s = num_host_events(done.path), event_cost_s(done.options)
    return CaptureCost(num_events, event_s, done.run_s, done.start_s, done.stop_s)


def num_host_events(path: Path) -> int:
    """Events of a trace that the host recorded itself: operators, sections, launches, allocations."""
    with path.open("rb") as file:
        return sum(len(_EVENT.findall(line)) for line in file)


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

    def round_s() -> float:
        begin = time.thread_time()
        for _ in range(_NUM_CALLS):
            step()
        return time.thread_time() - begin

    def seconds() -> float:
        return min(round_s() for _ in range(_NUM_ROUNDS))

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

"""Which part of a model launched each kernel, by the modules that were open then.

A profiler that records Python (`with_stack`) has an event for each call of a module, `nn.Module: Qwen2MLP_3`;
programs mark others by `record_function`. The class of a module tells its part in the words of a ledger:
attention, mlp, moe, norm, embedding, head, and layer for what a block does itself (residual sums). A module
whose name says nothing (`Linear`, `SiLU`) belongs to the part around it, and so does a norm of queries and
keys to attention. What autograd runs is of the part `backward`, whatever its module. A kernel whose launch
was not recorded is of the part that most often launches kernels of its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshwise.trace.events import MODULE_PARTS, Ints, Trace
from meshwise.trace.nesting import launchers

_MODULE = "nn.Module: "
_BACKWARD = "autograd::engine::evaluate_function"
_NAMES = {"backward": re.compile(_BACKWARD), **MODULE_PARTS}
PARTS = ("", *_NAMES)
_OF_MODULE = {"shared_expert": "moe"}


def part_of_op(row: Mapping[str, Any]) -> str:
    """The part that a row of a ledger belongs to."""
    if row["phase"] == "backward":
        return "backward"
    if row["op"] in ("norm1", "norm2", "final_norm"):
        return "norm"
    if row["op"].startswith("residual"):
        return "layer"
    last = str(row["module"]).rpartition(".")[2]
    return _OF_MODULE.get(last, last)


def parts_of(trace: Trace, events: Ints) -> Ints:
    """The part that launched each of `events`, its place in `PARTS`; 0 where no module is recorded."""
    found = np.zeros(len(events), dtype=np.int64)
    if not any(name.startswith((_MODULE, _BACKWARD)) for _, name in trace.labels):
        return found
    part = np.array([part_of_label(*label) for label in trace.labels])
    call = launchers(trace)[events] if trace.has_device else events
    marked = np.flatnonzero(part[trace.label] > 0)
    for track in np.unique(trace.track[marked]).tolist():
        times, parts = _changes(trace, marked[trace.track[marked] == track], part)
        mine = np.flatnonzero((call >= 0) & (trace.track[call] == track))
        at = np.searchsorted(times, trace.start_ns[call[mine]], side="right") - 1
        found[mine] = np.where(at >= 0, parts[at], 0)
    alike = np.zeros((len(trace.labels), len(PARTS)))
    np.add.at(alike, (trace.label[events], found), found > 0)
    return np.where(call < 0, alike.argmax(axis=1)[trace.label[events]], found)


def part_of_label(category: str, name: str) -> int:
    """The part that an event of this name begins, if it is that of a module, a section or a backward."""
    if not name.startswith((_MODULE, _BACKWARD)) and category != "user_annotation":
        return 0
    shown = (i for i, part in enumerate(PARTS) if part and _NAMES[part].search(name.removeprefix(_MODULE)))
    return next(shown, 0)


def _changes(trace: Trace, events: Ints, part: Ints) -> tuple[Ints, Ints]:
    """The times at which another part begins on the track of `events`, and which."""
    times, parts = [], []
    open_calls: list[tuple[int, int]] = []  # until when, and which part

    def close(now: float) -> None:
        while open_calls and open_calls[-1][0] <= now:
            times.append(open_calls.pop()[0])
            parts.append(open_calls[-1][1] if open_calls else 0)

    for event in events.tolist():
        close(trace.start_ns[event])
        own, around = int(part[trace.label[event]]), open_calls[-1][1] if open_calls else 0
        own = around if (PARTS[own], PARTS[around]) == ("norm", "attention") else own
        open_calls.append((int(trace.end_ns[event]), own))
        times.append(int(trace.start_ns[event]))
        parts.append(own)
    close(np.inf)
    return np.array(times), np.array(parts)

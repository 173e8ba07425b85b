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
from meshwise.trace.nesting import launchers, nearest, nested_in

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
    if not any(name.startswith((_MODULE, _BACKWARD)) for _, name in trace.labels):
        return np.zeros(len(events), dtype=np.int64)
    part = np.array([part_of_label(*label) for label in trace.labels])[trace.label]
    call = launchers(trace)[events] if trace.has_device else events
    within = nested_in(trace, np.union1d(np.flatnonzero(part), call[call >= 0]))
    is_norm = part == PARTS.index("norm")
    outer = nearest(within, (part > 0) & ~is_norm)
    in_attention = is_norm & (outer >= 0) & (part[outer] == PARTS.index("attention"))
    at = nearest(within, (part > 0) & ~in_attention)[call]
    found = np.where((call >= 0) & (at >= 0), part[at], 0)
    alike = np.zeros((len(trace.labels), len(PARTS)))
    np.add.at(alike, (trace.label[events], found), found > 0)
    return np.where(call < 0, alike.argmax(axis=1)[trace.label[events]], found)


def part_of_label(category: str, name: str) -> int:
    """The part that an event of this name begins, if it is that of a module, a section or a backward."""
    if not name.startswith((_MODULE, _BACKWARD)) and category != "user_annotation":
        return 0
    shown = (i for i, part in enumerate(PARTS) if part and _NAMES[part].search(name.removeprefix(_MODULE)))
    return next(shown, 0)

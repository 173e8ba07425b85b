"""Profiles as a ledger: operators, kernels and collectives of all ranks, in the columns of every instrument.

Rows are groups of equal calls: same rank, section, operator, phase and shape. `time_s` is the mean self
time of one call on the CPU, `compute_s` (or `memory_s`) the kernels it launched; a collective is a row of
its own, with its payload, `comm_s` on the wire and `exposed_s` what waiting adds to that. Only what a
profiler sees is filled in: no FLOP, no bytes read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshwise.core.ledger import COLLECTIVES, Ledger
from meshwise.cost.collective import sent_bytes
from meshwise.trace.events import DEVICE_KINDS, Ints, Kind, Trace
from meshwise.trace.nesting import launchers, parents
from meshwise.trace.operators import self_time
from meshwise.trace.summary import Summary

_BACKWARD = "autograd::engine::"


def profile_ledger(summary: Summary) -> Ledger:
    """The ledger (origin `profile`) of all ranks of a summary."""
    rows: list[Mapping[str, Any]] = []
    for trace in summary.traces:
        rows += _operator_rows(trace)
    for one in summary.collectives:
        name = one.name if one.name in COLLECTIVES else ""
        size = one.group_size or one.num_ranks
        closed = name not in ("", "send", "recv") and one.bytes
        for rank, wait in one.wait_s.items():
            rows.append(
                {
                    "origin": "profile",
                    "rank": rank,
                    "op": one.name,
                    "phase": "step",
                    "dtype": one.dtype,
                    "collective": name,
                    "axis": one.group,
                    "group_size": size,
                    "payload_bytes": one.bytes,
                    "sent_bytes": float(sent_bytes(name, one.bytes, float(size))) if closed else None,  # type: ignore[arg-type]
                    "comm_s": one.wire_s,
                    "exposed_s": wait,
                    "time_s": one.wire_s + wait,
                    "start_s": one.enter_s[rank],
                }
            )
    return Ledger.from_rows(rows)


def _operator_rows(trace: Trace) -> list[dict[str, Any]]:
    """Operators and kernels of one rank, equal calls together."""
    parent = parents(trace)
    section, backward = _context(trace, parent)
    own = self_time(trace, parent)
    operators = trace.where(Kind.CPU_OP)
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i in operators.tolist():
        groups[section[i], int(trace.label[i]), backward[i], int(trace.shape[i])].append(i)
    launcher = launchers(trace)
    for i in trace.where(*DEVICE_KINDS).tolist():
        at = int(launcher[i])
        inside = (section[at], backward[at]) if at >= 0 else ("", False)
        groups[inside[0], int(trace.label[i]), inside[1], -1].append(i)
    origin = int(trace.start_ns[0]) if len(trace) else 0
    rows = []
    for (module, label, is_backward, shape), calls in groups.items():
        kind = Kind(trace.label_kind[label])
        host = kind == Kind.CPU_OP
        seconds = float((own if host else trace.duration_ns)[calls].mean()) / 1e9
        text, dtype = _shape(trace, shape)
        rows.append(
            {
                "origin": "profile",
                "rank": trace.rank,
                "module": module,
                "op": trace.labels[label][1],
                "phase": "backward" if is_backward else "forward",
                "count": len(calls),
                "shape": text,
                "dtype": dtype,
                "compute_s": seconds if kind == Kind.COMPUTE else None,
                "memory_s": seconds if kind == Kind.MEMORY else None,
                "comm_s": seconds if kind == Kind.COMMUNICATION else None,
                "time_s": seconds,
                "start_s": (int(trace.start_ns[calls[0]]) - origin) / 1e9,
            }
        )
    return rows


def _context(trace: Trace, parent: Ints) -> tuple[list[str], list[bool]]:
    """For every event the path of sections it stands in, and whether the backward pass runs it."""
    section = [""] * len(trace)
    backward = [False] * len(trace)
    kind = trace.kind
    for i in np.flatnonzero(parent >= 0).tolist():
        up = int(parent[i])
        inner = trace.name(up) if kind[up] == Kind.ANNOTATION else ""
        section[i] = f"{section[up]}/{inner}".strip("/") if inner else section[up]
        backward[i] = backward[up] or trace.name(up).startswith(_BACKWARD)
    return section, backward


def _shape(trace: Trace, shape: int) -> tuple[str, str]:
    """The first tensor an operator took: its shape and dtype; the rest is in the trace."""
    for dims, dtype in trace.tensors(shape):
        if dims:
            return "x".join(map(str, dims)) if math.prod(dims) else "", dtype
    return "", ""

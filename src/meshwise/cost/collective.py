"""How long ranks take to exchange a tensor over links that come in levels.

A group is `group_ranks` ranks placed `stride` apart. Links are levels, innermost first: level 0 joins
the ranks of a node, level 1 the nodes, and so on; a domain of level i holds `link_ranks[i]` ranks, of
which m_i = `members(...)` belong to the group (m_{-1} = 1; the outermost level holds the whole group).
Bandwidth is per rank and per direction.

A ring visits the ranks domain by domain, so every member can drive its own ring: the m_{i-1} members
that share a domain of the next inner level also share the crossing of level i. For n ranks and a tensor
of V bytes, with c = (n-1)/n,

    all-gather, reduce-scatter      max over used levels i of  c V / (m_{i-1} B_i)  + hops
    all-reduce                      reduce-scatter + all-gather
    broadcast, reduce               the same with c = 1 (pipelined in chunks)
    all-to-all                      max over levels of  V (m_i - m_{i-1}) / (n B_i)  + the largest latency
    p2p                             V / B + latency  on the outermost level the group spans

where hops = sum over levels of latency_i (n/m_{i-1} - n/m_i). Sources: Thakur, Rabenseifner, Gropp,
IJHPCA 2005 (rings); the hierarchical form as in the public transformer-perf-estimates model of NERSC.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from meshwise.units import Num

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "p2p"]


def members(group_ranks: Num, stride: Num, level_ranks: Num) -> Num:
    """How many of `group_ranks` ranks placed `stride` apart sit inside one domain of `level_ranks` ranks."""
    return np.minimum(group_ranks, np.maximum(1.0, np.floor(level_ranks / np.asarray(stride, float))))


def sent_bytes(kind: Kind, payload_bytes: Num, group_ranks: Num) -> Num:
    """Bytes that one rank sends for a collective over `payload_bytes` (the full tensor, see DESIGN).

    Ring algorithms; a broadcast or reduce passes the whole tensor on; a group of one sends nothing.
    """
    peers_frac = (group_ranks - 1.0) / group_ranks
    if kind == "all_reduce":
        return 2.0 * payload_bytes * peers_frac
    if kind in ("broadcast", "reduce", "p2p"):
        return payload_bytes * np.where(np.asarray(group_ranks) > 1, 1.0, 0.0)
    return payload_bytes * peers_frac


def _levels(group_ranks: Num, stride: Num, link_ranks: Sequence[Num]) -> list[tuple[Num, Num]]:
    """Per level, innermost first: members per domain of the level inside it, and per domain of its own."""
    outer = [members(group_ranks, stride, ranks) for ranks in link_ranks[:-1]] + [group_ranks]
    return list(zip([1.0, *outer[:-1]], outer, strict=True))


def collective_s(
    kind: Kind,
    payload_bytes: Num,
    group_ranks: Num,
    *,
    stride: Num = 1.0,
    link_bytes_per_s: Sequence[Num],
    link_latency_s: Sequence[Num],
    link_ranks: Sequence[Num],
) -> Num:
    """Time [s] of one collective over `payload_bytes`, the full tensor.

    That is what an all-gather leaves, what a reduce-scatter or an all-reduce takes, and what an
    all-to-all sends in total from one rank, its own part included. Everything broadcasts; a group of one
    is free. Assumes that nothing else uses the links.
    """
    levels = _levels(group_ranks, stride, link_ranks)
    passes = 2.0 if kind == "all_reduce" else 1.0  # reduce-scatter, then all-gather
    ring_bytes = sent_bytes(kind, payload_bytes, group_ranks)
    wire_s: Num = 0.0
    hops_s: Num = 0.0
    for (inner, outer), bytes_per_s, latency_s in zip(levels, link_bytes_per_s, link_latency_s, strict=True):
        used = np.asarray(outer) > np.asarray(inner)
        if kind == "p2p":  # outer levels overwrite inner ones
            wire_s = np.where(used, payload_bytes / bytes_per_s, wire_s)
            hops_s = np.where(used, latency_s, hops_s)
        elif kind == "all_to_all":
            level_bytes = payload_bytes * (outer - inner) / group_ranks
            wire_s = np.maximum(wire_s, level_bytes / bytes_per_s)
            hops_s = np.maximum(hops_s, np.where(used, latency_s, 0.0))
        else:
            wire_s = np.maximum(wire_s, np.where(used, ring_bytes / (inner * bytes_per_s), 0.0))
            hops_s = hops_s + passes * latency_s * (group_ranks / inner - group_ranks / outer)
    return wire_s + hops_s

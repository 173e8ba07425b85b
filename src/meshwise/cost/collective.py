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

where hops = sum over levels of latency_i (n/m_{i-1} - n/m_i). That is the ideal machine. A real library
(NCCL) pays a launch, has two protocols (quick: low latency, a share of the bandwidth; bulk: the full
bandwidth, slower hops), copies a rank's own part, climbs trees where rings are long (an all-reduce over
d domains: 2 log2 d slow hops instead of 2 (d-1)), and lets the switch add where it can (V (1 + 1/n)
bytes per rank instead of 2 c V). It takes the fastest and so do we. `efficiency.LinkEfficiency` holds
the constants; level 0 uses `inner`, the levels beyond `outer`.

Sources: Thakur, Rabenseifner, Gropp, IJHPCA 2005 (rings); the hierarchical form as in the public
transformer-perf-estimates model of NERSC; NCCL's documentation of NCCL_PROTO and NCCL_ALGO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshwise.efficiency import IDEAL, Efficiency, LinkEfficiency
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
    efficiency: Efficiency = IDEAL,
) -> Num:
    """Time [s] of one collective over `payload_bytes`, the full tensor.

    That is what an all-gather leaves, what a reduce-scatter or an all-reduce takes, and what an
    all-to-all sends in total from one rank, its own part included. Everything broadcasts; a group of one
    is free. Assumes that nothing else uses the links. An all-to-all with uneven splits takes as long as
    its most loaded rank: pass that rank's bytes.
    """
    group = _Group(
        group_ranks,
        _levels(group_ranks, stride, link_ranks),
        tuple(zip(link_bytes_per_s, link_latency_s, strict=True)),
        tuple(efficiency.inner if level == 0 else efficiency.outer for level in range(len(link_ranks))),
    )
    seconds = np.minimum(
        _ring_s(kind, payload_bytes, group, bulk=False), _ring_s(kind, payload_bytes, group, bulk=True)
    )
    if kind == "all_reduce" and efficiency.outer.tree_latency is not None:
        for bulk in (False, True):
            seconds = np.minimum(seconds, _tree_s(payload_bytes, group, bulk=bulk))
    if kind == "all_reduce" and efficiency.inner.switch_frac is not None:
        seconds = np.minimum(seconds, _switch_s(payload_bytes, group, efficiency.inner.switch_frac))
    return np.where(np.asarray(group_ranks) > 1, seconds + group.launch_s(), 0.0)


@dataclass(frozen=True, slots=True)
class _Group:
    """A group on its links: per level the members inside and per domain, (bytes/s, latency), efficiency."""

    ranks: Num
    levels: list[tuple[Num, Num]]
    links: tuple[tuple[Num, Num], ...]
    efficiencies: tuple[LinkEfficiency, ...]

    def launch_s(self) -> Num:
        launch_s: Num = 0.0
        for (inside, members_here), efficiency in zip(self.levels, self.efficiencies, strict=True):
            used = np.asarray(members_here) > np.asarray(inside)
            launch_s = np.where(used, np.maximum(launch_s, efficiency.launch_s), launch_s)
        return launch_s

    def steps(self, bulk: bool) -> list[tuple[Num, Num, Num, Num, LinkEfficiency]]:
        """Per level: members inside, members of a domain, effective bytes/s and latency, its efficiency."""
        rows = []
        for level, link, efficiency in zip(self.levels, self.links, self.efficiencies, strict=True):
            frac = efficiency.bulk_frac if bulk else efficiency.quick_frac
            latency = efficiency.bulk_latency if bulk else efficiency.quick_latency
            rows.append((*level, link[0] * frac, link[1] * latency, efficiency))
        return rows


def _ring_s(kind: Kind, payload_bytes: Num, group: _Group, *, bulk: bool) -> Num:
    """The closed forms of the top of this file, with the bandwidth and latency of one protocol."""
    passes = 2.0 if kind == "all_reduce" else 1.0  # reduce-scatter, then all-gather
    ring_bytes = sent_bytes(kind, payload_bytes, group.ranks)
    own_bytes = payload_bytes / group.ranks
    wire_s: Num = 0.0
    hops_s: Num = 0.0
    for inside, here, bytes_per_s, latency_s, efficiency in group.steps(bulk):
        used = np.asarray(here) > np.asarray(inside)
        if kind == "p2p":  # outer levels overwrite inner ones
            wire_s = np.where(used, payload_bytes / bytes_per_s, wire_s)
            hops_s = np.where(used, latency_s, hops_s)
        elif kind == "all_to_all":
            level_bytes = payload_bytes * (here - inside) / group.ranks
            level_bytes = level_bytes + efficiency.all_to_all_own_part * own_bytes
            wire_s = np.maximum(wire_s, np.where(used, level_bytes / bytes_per_s, 0.0))
            hops_s = np.maximum(hops_s, np.where(used, latency_s, 0.0))
        else:
            level_bytes = ring_bytes / inside + efficiency.own_part * own_bytes
            wire_s = np.maximum(wire_s, np.where(used, level_bytes / bytes_per_s, 0.0))
            hops_s = hops_s + passes * latency_s * (group.ranks / inside - group.ranks / here)
    return wire_s + hops_s


def _tree_s(payload_bytes: Num, group: _Group, *, bulk: bool) -> Num:
    """All-reduce by a double binary tree over the domains of level 0, with a chain inside each."""
    wire_s: Num = 0.0
    hops_s: Num = 0.0
    for level, (inside, here, bytes_per_s, latency_s, efficiency) in enumerate(group.steps(bulk)):
        used = np.asarray(here) > np.asarray(inside)
        wire_s = np.maximum(wire_s, np.where(used, 2.0 * payload_bytes / (inside * bytes_per_s), 0.0))
        height = np.log2(here / inside) * (efficiency.tree_latency or 1.0) if level else here - 1.0
        hops_s = hops_s + 2.0 * latency_s * height
    return wire_s + hops_s


def _switch_s(payload_bytes: Num, group: _Group, switch_frac: float) -> Num:
    """All-reduce inside one domain of level 0 whose switch adds; infinite for larger groups."""
    bytes_per_s, latency_s = group.links[0]
    ring = group.efficiencies[0]
    wire_s = payload_bytes * (1.0 + 1.0 / group.ranks) / (bytes_per_s * switch_frac)
    inside_one = np.asarray(group.levels[0][1]) >= np.asarray(group.ranks)
    return np.where(inside_one, wire_s + 2.0 * latency_s * ring.bulk_latency, np.inf)

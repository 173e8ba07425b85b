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
from numpy.typing import NDArray

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
    quick, bulk = group.steps(bulk=False), group.steps(bulk=True)
    seconds: Num = np.minimum(
        _ring_s(kind, payload_bytes, group_ranks, quick), _ring_s(kind, payload_bytes, group_ranks, bulk)
    )
    if kind == "all_reduce" and efficiency.outer.tree_latency is not None:
        for steps in (quick, bulk):
            seconds = np.minimum(seconds, _tree_s(payload_bytes, steps))
    if kind == "all_reduce" and efficiency.inner.switch_frac is not None:
        seconds = np.minimum(seconds, _switch_s(payload_bytes, group, bulk[0]))
    return np.where(np.asarray(group_ranks) > 1, seconds + _launch_s(quick), 0.0)


@dataclass(frozen=True, slots=True)
class _Step:
    """One level of links as one protocol meets it.

    `inside`, `here`: members in a domain of the level inside it, and of its own. `hop_s`: delay of one hop
    of a lone message; `hops_s`, `syncs_s`: all hops of one pass round the ring, and its synchronisations.
    """

    inside: Num
    here: Num
    used: NDArray[np.bool_]
    bytes_per_s: Num
    hop_s: Num
    hops_s: Num
    syncs_s: Num
    efficiency: LinkEfficiency


@dataclass(frozen=True, slots=True)
class _Group:
    """A group on its links: per level the members inside and per domain, (bytes/s, latency), efficiency."""

    ranks: Num
    levels: list[tuple[Num, Num]]
    links: tuple[tuple[Num, Num], ...]
    efficiencies: tuple[LinkEfficiency, ...]

    def steps(self, bulk: bool) -> list[_Step]:
        """The levels, innermost first."""
        steps = []
        rows = zip(self.levels, self.links, self.efficiencies, strict=True)
        for level, ((inside, here), (bytes_per_s, latency_s), efficiency) in enumerate(rows):
            hops = self.ranks / inside - self.ranks / here
            # Neighbours inside a node synchronise at the same time, those between nodes one by one.
            syncs = hops if level else np.log2(here)
            quick_s = latency_s * efficiency.quick_latency
            sync_s = latency_s * efficiency.bulk_latency if bulk else 0.0
            steps.append(
                _Step(
                    inside=inside,
                    here=here,
                    used=np.asarray(here) > np.asarray(inside),
                    bytes_per_s=bytes_per_s * (efficiency.bulk_frac if bulk else efficiency.quick_frac),
                    hop_s=quick_s + sync_s,
                    hops_s=hops * quick_s,
                    syncs_s=syncs * sync_s,
                    efficiency=efficiency,
                )
            )
        return steps


def _launch_s(steps: Sequence[_Step]) -> Num:
    """The launch of the slowest kind of link that the group uses."""
    launch_s: Num = 0.0
    for step in steps:
        launch_s = np.where(step.used, np.maximum(launch_s, step.efficiency.launch_s), launch_s)
    return launch_s


def _ring_s(kind: Kind, payload_bytes: Num, group_ranks: Num, steps: Sequence[_Step]) -> Num:
    """The closed forms of the top of this file, with the bandwidth and latency of one protocol."""
    passes = 2.0 if kind == "all_reduce" else 1.0  # reduce-scatter, then all-gather
    ring_bytes = sent_bytes(kind, payload_bytes, group_ranks)
    own_bytes = payload_bytes / group_ranks
    wire_s: Num = 0.0
    delay_s: Num = 0.0
    for step in steps:
        if kind == "p2p":  # outer levels overwrite inner ones
            wire_s = np.where(step.used, payload_bytes / step.bytes_per_s, wire_s)
            delay_s = np.where(step.used, step.hop_s, delay_s)
        elif kind == "all_to_all":
            level_bytes = payload_bytes * (step.here - step.inside) / group_ranks
            level_bytes = level_bytes + step.efficiency.all_to_all_own_part * own_bytes
            wire_s = np.maximum(wire_s, np.where(step.used, level_bytes / step.bytes_per_s, 0.0))
            delay_s = np.maximum(delay_s, np.where(step.used, step.hop_s, 0.0))
        else:
            level_bytes = ring_bytes / step.inside + step.efficiency.own_part * own_bytes
            wire_s = np.maximum(wire_s, np.where(step.used, level_bytes / step.bytes_per_s, 0.0))
            delay_s = delay_s + passes * step.hops_s + step.syncs_s  # two passes are one pipeline
    return wire_s + delay_s


def _tree_s(payload_bytes: Num, steps: Sequence[_Step]) -> Num:
    """All-reduce by a double binary tree over the domains of level 0, with a chain inside each."""
    wire_s: Num = 0.0
    delay_s: Num = 0.0
    for level, step in enumerate(steps):
        level_bytes = 2.0 * payload_bytes / step.inside
        wire_s = np.maximum(wire_s, np.where(step.used, level_bytes / step.bytes_per_s, 0.0))
        climb = np.log2(step.here / step.inside) * (step.efficiency.tree_latency or 1.0)
        delay_s = delay_s + 2.0 * (climb * step.hop_s if level else step.hops_s + step.syncs_s)
    return wire_s + delay_s


def _switch_s(payload_bytes: Num, group: _Group, step: _Step) -> Num:
    """All-reduce inside one domain of level 0 whose switch adds; infinite for larger groups."""
    added_bytes_per_s = group.links[0][0] * (step.efficiency.switch_frac or 1.0)
    wire_s = payload_bytes * (1.0 + 1.0 / group.ranks) / added_bytes_per_s
    delay_s = group.links[0][1] * step.efficiency.switch_latency
    inside_one = np.asarray(step.here) >= np.asarray(group.ranks)
    return np.where(inside_one, wire_s + delay_s, np.inf)

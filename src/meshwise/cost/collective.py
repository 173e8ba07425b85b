"""How long ranks take to exchange a tensor over links that come in levels.

A group is `group_ranks` ranks placed `stride` apart, or `Runs` of such ranks where another mesh axis lies
between them. Links are levels, innermost first: level 0 joins the ranks of a node, level 1 the nodes, and so
on. The group lies in p_i domains of level i (p_{-1} = n), of `links[i].ranks` ranks each, and has at least
m_i members in each (`domains`; m_{-1} = 1; the outermost level holds the whole group). Bandwidth is per rank
and per direction.

Groups of 96 in racks of 72 lie 72|24, 48|48 and 24|72. The 24 send most of their data to the other rack over
their own 24 links, and all groups of a job wait for them: m_0 = 24, p_0 = 2, though 72 sit in one rack.

A ring visits the ranks domain by domain, so every member can drive its own ring: the m_{i-1} members
that share a domain of the next inner level also share the crossing of level i. For n ranks and a tensor
of V bytes, with c = (n-1)/n,

    all-gather, reduce-scatter      max over used levels i of  c V / (m_{i-1} B_i)  + hops
    all-reduce                      reduce-scatter + all-gather
    broadcast, reduce               the same with c = 1 (pipelined in chunks)
    all-to-all                      max over levels of  V (m_i - m_{i-1}) / (n B_i)  + the largest latency
    dispatch                        the same with  V (1 - p_i/p_{i-1}) d(p_{i-1}) / (d(n) B_i)
    both, on levels of a network    V (1 - m_{i-1}/n) / B_i: what goes on to outer levels leaves here too; a
                                    dispatch times d(n/m) / d(n) for m members in the node with fewest
    send, recv                      V / B + latency  on the outermost level the group spans

where hops = sum over levels of latency_i (p_{i-1} - p_i); a dispatch sends each token once to each
of the d(places) = places (1 - (1 - 1/places)^k) ranks, and nodes, that its k choices meet (fewer where
routing is limited to groups of experts: `experts.met_places`). Where level s has rails, what an all-to-all
sends to another rail changes to it inside the node, whose links carry m_s in place of m_i members' parts.

The axes of a torus are levels whose ranks are wired to two neighbours, by links of B_i in each direction.
A group has a = m_i/m_{i-1} members along the axis, g = stride/(ranks of the axes before) apart, and shares
the links with the g - 1 groups in between. Members that fill a closed axis go both ways round (w = 2, else
1). Of the group's n members m are in the torus:

    all-gather, reduce-scatter      c V / sum over used axes of (w_i B_i / g_i)   (all axes at once)
    all-to-all                      max over axes of  V (m/n) (floor(a^2/4) / a) / (w_i B_i / g_i)
    send, recv                      V / (B_i / g_i)
    hops                            latency_i g_i times a - 1, or a/2 both ways round

An all-to-all is bound by the bisection: of a^2 pairs along an axis, floor(a^2/4) cross its middle each way.
A torus has neither trees nor adding switches.

That is the ideal machine. A real library (NCCL) pays a launch, has two protocols (quick: low latency, a
share of the bandwidth; bulk: the full bandwidth, slower hops), copies a rank's own part, climbs trees
where rings are long (an all-reduce over d domains: 2 log2 d slow hops instead of 2 (d-1)), and lets the
switch add where it can (V (1 + 1/n) bytes per rank instead of 2 c V). It takes the fastest and so do we.
More than two GPUs on PCIe go through their host, which is slower than a link and shared.
`efficiency.LinkEfficiency` holds the constants; level 0 uses `inner`, the levels beyond `outer`.

Every algorithm above is a straight line in V: a delay, plus V times the seconds per byte of its slowest
level. The lines depend on the group and its links alone (`collective_lines`).

Sources: Thakur, Rabenseifner, Gropp, IJHPCA 2005 (rings); How to Scale Your Model, part 3 (torus); the
hierarchical form as in the public transformer-perf-estimates model of NERSC; NCCL's documentation of
NCCL_PROTO and NCCL_ALGO.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.core.ledger import Collective
from meshwise.core.numbers import anywhere, larger, smaller, where
from meshwise.core.units import Num
from meshwise.cost.experts import met_places
from meshwise.machine.efficiency import IDEAL, Efficiency, LinkEfficiency, PeerEfficiency
from meshwise.machine.hardware import Link


class Runs(NamedTuple):
    """A group in runs of `ranks` ranks, each run `stride` after the last; all are one run by default."""

    ranks: Num = np.inf
    stride: Num = 1.0


class Choices(NamedTuple):
    """What a token of a dispatch chooses: `number` ranks, in some of `groups` (`experts.met_places`)."""

    number: float = 0.0
    groups: tuple[float, float] = (0.0, 0.0)


ONE_RUN, NO_CHOICES = Runs(), Choices()


def members(group_ranks: Num, stride: Num, level_ranks: Num, runs: Runs = ONE_RUN) -> Num:
    """How many of `group_ranks` ranks placed `stride` apart sit inside one domain of `level_ranks` ranks."""

    def inside(ranks: Num, stride: Num) -> Num:
        return smaller(ranks, larger(1.0, np.floor(level_ranks / stride)))

    in_run = smaller(runs.ranks, group_ranks)
    return inside(in_run, stride) * inside(group_ranks / in_run, runs.stride)


def domains(group_ranks: Num, stride: Num, link: Link, runs: Runs = ONE_RUN) -> tuple[Num, Num]:
    """Members of a group in the domain that holds fewest of them, and how many domains hold some.

    The groups of a job fill it one by one. Where neither a group nor a domain holds the other whole, the end
    of some group leaves as few ranks in a domain as both are multiples of, and all wait for these.
    """
    in_run = smaller(runs.ranks, group_ranks)
    span = larger(stride * in_run, runs.stride * group_ranks / in_run)
    most = members(group_ranks, stride, link.job_ranks or link.ranks, runs)
    rest = 0.0 if link.job_ranks else np.mod(span, link.ranks) * (np.asarray(link.ways) == 0)
    alone = where(rest > 0, rest, link.ranks)  # a lone group fills domains, but for the last
    common = np.gcd(np.asarray(span, np.int64), link.job_ranks) if link.job_ranks else alone
    fewest = smaller(most, members(group_ranks, stride, common, runs))
    return fewest, 1.0 + np.ceil((group_ranks - fewest) / most)


def sent_bytes(kind: Collective, payload_bytes: Num, group_ranks: Num) -> Num:
    """Bytes that one rank sends for a collective over `payload_bytes` (the full tensor, see DESIGN).

    Ring algorithms; a broadcast or reduce passes the whole tensor on; a group of one sends nothing, and who
    receives a message does not either.
    """
    peers_frac = (group_ranks - 1.0) / group_ranks
    if kind == "all_reduce":
        return 2.0 * payload_bytes * peers_frac
    if kind == "recv":
        return 0.0 * payload_bytes
    if kind in ("broadcast", "reduce", "send"):
        return payload_bytes * where(np.asarray(group_ranks) > 1, 1.0, 0.0)
    return payload_bytes * peers_frac


@dataclass(frozen=True, slots=True)
class Line:
    """One algorithm and protocol: `delay_s`, however small the tensor, and seconds per byte of it."""

    algorithm: str
    delay_s: Num
    s_per_byte: Num


def collective_s(
    kind: Collective,
    payload_bytes: Num,
    group_ranks: Num,
    *,
    stride: Num = 1.0,
    links: tuple[Link, ...],
    choices: Choices = NO_CHOICES,
    efficiency: Efficiency = IDEAL,
) -> Num:
    """Time [s] of one collective over `payload_bytes`, the full tensor.

    That is what an all-gather leaves, what a reduce-scatter or an all-reduce takes, and what an
    all-to-all sends in total from one rank, its own part included. A `dispatch` is an all-to-all of tokens
    with their `choices`. Everything broadcasts; a group of one is free. Assumes that nothing else uses the
    links. An all-to-all with uneven splits takes as long as its most loaded rank: pass that rank's bytes.
    """
    lines = collective_lines(kind, group_ranks, stride, links, efficiency, choices=choices)
    return fastest_s(lines, payload_bytes)


def carried_out(kind: Collective, group_ranks: Num, *, by_gloo: bool) -> tuple[Collective, Num]:
    """The collective that a library carries out for `kind`, and what share of its bytes counts twice.

    Gloo reduces all to all where it should scatter. In a ring all-gather of two ranks it sends both ways over
    one connection: where one rank is late, its word that it can receive waits behind the first half of what
    it sends, and the other half follows only then.
    """
    if by_gloo and kind == "reduce_scatter":
        return "all_reduce", 0.0
    return kind, 0.5 * (group_ranks == 2.0) if by_gloo and kind == "all_gather" else 0.0


def fastest_s(lines: Sequence[Line], payload_bytes: Num) -> Num:
    """Time [s] of the fastest of `lines` for `payload_bytes`."""
    return reduce(smaller, [line.delay_s + payload_bytes * line.s_per_byte for line in lines])


def collective_lines(
    kind: Collective,
    group_ranks: Num,
    stride: Num,
    links: tuple[Link, ...],
    efficiency: Efficiency,
    *,
    choices: Choices = NO_CHOICES,
    runs: Runs = ONE_RUN,
) -> list[Line]:
    """All that the library can choose from for a group, launch included; a group of one is free.

    `links`: levels, innermost first. A caller that times many
    payloads of one group computes its lines once.
    """
    quick, bulk = _steps(group_ranks, stride, links, efficiency, runs, to_one=kind in ("send", "recv"))
    protocols = {"quick": quick, "bulk": bulk}.items()
    lines = [_ring(kind, group_ranks, name, steps, choices) for name, steps in protocols]
    adds_in_trees = kind == "all_reduce" and not anywhere(links[0].ways)
    if adds_in_trees and efficiency.outer.tree_latency is not None:
        lines += [_tree(group_ranks, name, steps) for name, steps in protocols]
    if adds_in_trees and efficiency.inner.switch_frac is not None:
        lines.append(_switch(group_ranks, links[0], efficiency.inner, bulk[0]))
    # The launch of the slowest kind of link that the group uses.
    launches_s: list[Num] = [step.used * step.efficiency.launch_s for step in quick]
    return [replace(line, delay_s=line.delay_s + reduce(larger, launches_s)) for line in lines]


def peer_all_reduce_s(
    payload_bytes: Num,
    group_ranks: Num,
    *,
    link_bytes_per_s: Num,
    memory_bytes_per_s: Num,
    library_s: Num = np.inf,
    graph: Num = 1.0,
    coded: bool = False,
    efficiency: PeerEfficiency,
) -> Num:
    """Time [s] of an all-reduce whose kernel reads the peers' memory over the links of one node.

    In one shot every rank reads the whole tensor of its n - 1 peers; in two it sums its nth part and then
    reads the sums of the others, and waits twice. `library_s` is the time of the library's own
    all-reduce, which takes over where it is faster. `graph` is 1 where a CUDA graph replays the call; where
    it is 0 the host takes `host_s` to call, and the tensor is copied first. Source: vLLM's custom all-reduce.
    `coded`: the parts may travel in 8 bits, where a library does it (ROCm's quick all-reduce) and is faster.
    """
    rate_bytes_per_s = link_bytes_per_s * efficiency.link_frac
    one_shot_s = efficiency.wait_s + payload_bytes * (group_ranks - 1.0) / rate_bytes_per_s
    sent_s = sent_bytes("all_reduce", payload_bytes, group_ranks) / rate_bytes_per_s
    two_shot_s = 2.0 * efficiency.wait_s + sent_s
    kernel_s = smaller(efficiency.launch_s + smaller(one_shot_s, two_shot_s), library_s)
    if coded and efficiency.coded_bytes_per_s:
        coded_s = efficiency.coded_launch_s + payload_bytes / efficiency.coded_bytes_per_s
        kernel_s = smaller(kernel_s, coded_s)
    copied_s = kernel_s + 2.0 * payload_bytes / memory_bytes_per_s
    return where(np.asarray(graph) > 0, kernel_s, larger(copied_s, efficiency.host_s))


@dataclass(frozen=True, slots=True)
class _Step:
    """One level of links as one protocol meets it.

    `inside`, `here`: members in a domain of the level inside it, and of its own; `places`: domains of both
    that the group lies in. `bytes_per_s`: a member's
    share of the links in one direction; along an axis of a torus it uses them `ways` ways. `hop_s`: delay of
    one hop of a lone message; `hops_s`, `syncs_s`: all hops of one pass round the ring, and its
    synchronisations.
    """

    inside: Num
    here: Num
    places: tuple[Num, Num]
    used: NDArray[np.bool_]
    is_axis: NDArray[np.bool_]
    ways: Num
    rails: Num
    bytes_per_s: Num
    hop_s: Num
    hops_s: Num
    syncs_s: Num
    is_network: bool
    efficiency: LinkEfficiency


def _steps(
    ranks: Num, stride: Num, links: tuple[Link, ...], efficiency: Efficiency, runs: Runs, *, to_one: bool
) -> tuple[list[_Step], list[_Step]]:
    """The levels, innermost first, as the quick protocol meets them and as that for bulk does.

    `to_one`: a rank sends to one other, over the links that join these two.
    """
    protocols: tuple[list[_Step], list[_Step]] = [], []
    inside: Num = 1.0
    places_inside = ranks
    joined: Num = 1.0  # ranks of a domain of the level inside
    for level, link in enumerate(links):
        here, places = (ranks, 1.0) if level == len(links) - 1 else domains(ranks, stride, link, runs)
        is_axis = np.asarray(link.ways) > 0
        is_network = bool(level) and not link.box and not np.all(is_axis)
        in_box = efficiency.pcie if level and link.box == "pcie" else efficiency.inner
        own = efficiency.outer if is_network else in_box
        along = here / inside
        apart = where(is_axis, larger(stride / np.asarray(joined, float), 1.0), 1.0)
        ways = where((link.ways == 2) & (along * apart * joined >= link.ranks), 2.0, 1.0)
        axis_hops = apart * where(ways == 2, np.floor(along / 2.0), along - 1.0)
        hops = where(is_axis, axis_hops, places_inside - places)
        # Neighbours inside a node synchronise at the same time, those between nodes one by one.
        syncs = hops if is_network else np.log2(here)
        used = np.asarray(here) > np.asarray(inside)
        bytes_per_s = _share_bytes_per_s(link, here, own, to_one=to_one) / apart
        quick_s = link.latency_s * own.quick_latency
        for bulk, steps in enumerate(protocols):
            sync_s = link.latency_s * own.bulk_latency if bulk else 0.0
            steps.append(
                _Step(
                    inside=inside,
                    here=here,
                    places=(places_inside, places),
                    used=used,
                    is_axis=is_axis,
                    ways=ways,
                    rails=link.rails,
                    bytes_per_s=bytes_per_s * (own.bulk_frac if bulk else own.quick_frac),
                    hop_s=apart * (quick_s + sync_s),
                    hops_s=hops * quick_s,
                    syncs_s=syncs * sync_s,
                    is_network=is_network,
                    efficiency=own,
                )
            )
        inside, places_inside, joined = here, places, link.ranks
    return protocols


def _share_bytes_per_s(link: Link, ranks: Num, efficiency: LinkEfficiency, *, to_one: bool) -> Num:
    """What is left of a link for one of `ranks` ranks; more than two on PCIe go through their host."""
    if efficiency.host_frac == efficiency.host_shared_frac == 1.0:
        return link.among(2.0 if to_one else ranks)
    through_host = smaller(efficiency.host_frac, efficiency.host_shared_frac * link.ranks / ranks)
    return link.bytes_per_s * where(np.asarray(ranks) > 2, through_host, 1.0)


def _ring(kind: Collective, ranks: Num, protocol: str, steps: Sequence[_Step], choices: Choices) -> Line:
    """The closed forms of the top of this file, with the bandwidth and latency of one protocol."""
    passes = 2.0 if kind == "all_reduce" else 1.0  # reduce-scatter, then all-gather
    ring_part = sent_bytes(kind, 1.0, ranks)
    own_part = 1.0 / ranks
    wire: Num = 0.0
    delay_s: Num = 0.0
    axes_bytes_per_s: Num = 0.0
    nodes = next((ranks / step.inside for step in steps if step.is_network), 1.0)
    for level, step in enumerate(steps):
        if kind in ("send", "recv"):  # outer levels overwrite inner ones
            wire = where(step.used, 1.0 / step.bytes_per_s, wire)
            delay_s = where(step.used, step.hop_s, delay_s)
        elif kind in ("all_to_all", "dispatch"):
            leaving = _leaving(kind, ranks, nodes, steps[level:], choices)
            part = leaving + step.efficiency.all_to_all_own_part * own_part
            wire = larger(wire, where(step.used, part / (step.ways * step.bytes_per_s), 0.0))
            delay_s = larger(delay_s, where(step.used, step.hop_s, 0.0))
        else:
            part = ring_part / step.inside + step.efficiency.own_part * own_part
            axes_bytes_per_s = axes_bytes_per_s + step.ways * step.bytes_per_s * (step.used & step.is_axis)
            wire = larger(wire, where(step.used & ~step.is_axis, part / step.bytes_per_s, 0.0))
            delay_s = delay_s + passes * step.hops_s + step.syncs_s  # two passes are one pipeline
    axes_part = ring_part + steps[0].efficiency.own_part * own_part
    has_axes = np.asarray(axes_bytes_per_s) > 0.0
    wire = larger(wire, where(has_axes, axes_part / where(has_axes, axes_bytes_per_s, 1.0), 0.0))
    rings = kind not in ("send", "recv", "all_to_all", "dispatch")
    return Line(f"{'ring' if rings else 'direct'}, {protocol}", delay_s, wire)


def _leaving(kind: Collective, ranks: Num, nodes: Num, steps: Sequence[_Step], choices: Choices) -> Num:
    """Share of the payload that a rank of the node with fewest takes in over the links of the first level.

    All others send to it: it is one of `nodes` as small.
    """
    step = steps[0]
    if step.is_network:
        met = met_places(nodes, *choices) / met_places(ranks, *choices) if kind == "dispatch" else 1.0
        return met * (1.0 - step.inside / ranks)
    inside, joined = step.places
    along = step.here / step.inside
    crossing = where(step.is_axis, np.floor(along**2 / 4.0) / along, 1.0 - 1.0 / along)
    part = _passing(steps) / ranks * crossing
    if kind == "all_to_all":
        return part
    met, of_all = (met_places(places, *choices) for places in (inside, ranks))
    return where(step.is_axis, part, met / of_all * (1.0 - joined / inside))


def _passing(steps: Sequence[_Step]) -> Num:
    """Members whose data passes a level: those of its domain, and of all that axes or rails lead on to."""
    members_here: Num = steps[0].here
    leads_on: Any = True
    for step in steps[1:]:
        leads_on = leads_on & (step.is_axis | (np.asarray(step.rails) > 0))
        members_here = where(leads_on, step.here, members_here)
    return members_here


def _tree(ranks: Num, protocol: str, steps: Sequence[_Step]) -> Line:
    """All-reduce by a double binary tree over the nodes, with a chain inside each.

    The chains of all nodes run at the same time.
    """
    wire: Num = 0.0
    delay_s: Num = 0.0
    of_node = [step.here for step in steps if not step.is_network][-1]
    for step in steps:
        wire = larger(wire, where(step.used, 2.0 / step.inside / step.bytes_per_s, 0.0))
        climb = np.log2(step.places[0] / step.places[1]) * (step.efficiency.tree_latency or 1.0)
        chain_s = step.hops_s * of_node / ranks + step.syncs_s
        delay_s = delay_s + 2.0 * (climb * step.hop_s if step.is_network else chain_s)
    return Line(f"tree, {protocol}", delay_s, wire)


def _switch(ranks: Num, link: Link, inner: LinkEfficiency, step: _Step) -> Line:
    """All-reduce inside one domain of level 0 whose switch adds; never done for larger groups."""
    added_bytes_per_s = link.bytes_per_s * (inner.switch_frac or 1.0)
    inside_one = np.asarray(step.here) >= np.asarray(ranks)
    delay_s = where(inside_one, link.latency_s * inner.switch_latency, np.inf)
    return Line("switch", delay_s, (1.0 + 1.0 / ranks) / added_bytes_per_s)

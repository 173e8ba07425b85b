"""How long expert parallelism takes to send tokens to their experts (*dispatch*) and back (*combine*).

Each of n ranks, r to a node, holds T tokens of `token_bytes`, and every token chooses k experts spread over
all ranks. What travels depends on the library:

    by rank     a token goes once to each node that it needs, and there once to each rank that needs it
                (DeepEP's normal kernels): d(nodes) copies between nodes, d(ranks) inside, where
                d(places) = places (1 - (1 - 1/places)^k) are the places that k even choices meet
    by expert   a token goes k times, straight to each expert's rank (DeepEP's low-latency kernels)
    spread      choices are dealt out so that a token meets as many ranks as it can: min(k, ranks) copies

less the share that stays on its own node or rank. Routing limited to some nodes per token caps the nodes.
A combine sends the same copies back. Then, with everything overlapped,

    time = launch + max(inner copies T bytes / inner rate, outer copies T bytes / outer rate, T core time)

The kernels run on few cores (`num_cores` of them). Each takes so long for a token and, where tokens come in
from other nodes, forwards so many bytes/s to the ranks of its own. Constants:
`efficiency.DispatchEfficiency`. Sources: DeepEP's README and its test of low latency (copies, and the cores
that it takes); TensorRT-LLM's MoE all-to-all as aiconfigurator's collector counts it.
"""

from dataclasses import dataclass

import numpy as np

from meshwise.core.units import Num
from meshwise.cost.experts import active_experts
from meshwise.machine.efficiency import DispatchEfficiency

CROWD_NODES = 4.0
DEEPEP_NODES = 4.0
"""Nodes that DeepEP routes a token to at most (its own benchmark, and DeepSeek-V3, arXiv 2412.19437)."""


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """How often a token crosses the links inside a node and those between nodes, on average."""

    inner: Num
    outer: Num


def copies_by_rank(topk: Num, ranks: Num, ranks_per_node: Num, *, most_nodes: Num = np.inf) -> Copies:
    """Copies of a token that goes once to each node and each rank it needs, at most to `most_nodes` nodes."""
    nodes = ranks / ranks_per_node
    reachable = np.minimum(nodes, most_nodes)
    elsewhere = 1.0 - 1.0 / ranks_per_node
    inner = active_experts(reachable * ranks_per_node, topk) * elsewhere
    return Copies(inner, active_experts(reachable, topk) * (1.0 - 1.0 / nodes))


def copies_by_expert(topk: Num, ranks: Num, ranks_per_node: Num) -> Copies:
    """Copies of a token that goes to each of its experts by itself."""
    return Copies(topk * (ranks_per_node - 1.0) / ranks, topk * (1.0 - ranks_per_node / ranks))


def copies_spread(topk: Num, ranks: Num) -> Copies:
    """Copies of a token whose experts lie on as many ranks as can be, all inside one domain."""
    return Copies(np.minimum(topk, ranks) * (1.0 - 1.0 / ranks), 0.0)


def deepep_copies(
    library: str, topk: Num, ranks: Num, ranks_per_node: Num, *, experts: Num, num_cores: Num, cores: Num
) -> tuple[Copies, Num]:
    """What DeepEP's kernels send of a token, and on how many of the chip's `num_cores` they run.

    `library` begins with `deepep-ll` (low latency), each of whose cores serves one expert, or as many as the
    others, or with `deepep-normal`, whose kernels run on `cores`.
    """
    if library.startswith("deepep-ll"):
        serving_cores = np.ceil(experts / np.ceil(experts / num_cores))
        return copies_by_expert(topk, ranks, ranks_per_node), serving_cores
    return copies_by_rank(topk, ranks, ranks_per_node, most_nodes=DEEPEP_NODES), cores


def dispatch_s(
    tokens: Num,
    copies: Copies,
    *,
    token_bytes: Num,
    ranks: Num,
    ranks_per_node: Num,
    experts: Num,
    num_cores: Num,
    inner_bytes_per_s: Num,
    outer_bytes_per_s: Num,
    efficiency: DispatchEfficiency,
) -> Num:
    """Time [s] until the `tokens` of each of `ranks` ranks have reached their experts, or have come back.

    Bandwidths are those of one rank's links, per direction; `num_cores` the cores that the kernel runs
    on. Everything broadcasts. Assumes even routing and that nothing else uses the links.
    """
    nodes = ranks / ranks_per_node
    crowded_frac = np.where(nodes > CROWD_NODES, efficiency.crowded_frac, 1.0)
    forward_rate = np.where(nodes > 1.0, num_cores * efficiency.core_bytes_per_s, np.inf)
    inner_rate = np.minimum(inner_bytes_per_s * efficiency.inner_frac, forward_rate)
    inner_s = tokens * copies.inner * token_bytes / inner_rate
    outer_s = tokens * copies.outer * token_bytes / (outer_bytes_per_s * efficiency.outer_frac * crowded_frac)
    cores_s = tokens * efficiency.token_s / num_cores
    begins_s = launch_s(ranks, ranks_per_node, experts=experts, efficiency=efficiency)
    return begins_s + np.maximum(np.maximum(inner_s, outer_s), cores_s)


def launch_s(ranks: Num, ranks_per_node: Num, *, experts: Num = 0.0, efficiency: DispatchEfficiency) -> Num:
    """Time [s] of an exchange of nothing: ranks and nodes tell each other their counts."""
    return (
        efficiency.launch_s
        + efficiency.rank_s * np.log2(ranks_per_node)
        + efficiency.node_s * np.log2(ranks / ranks_per_node)
        + efficiency.expert_s * experts
    )

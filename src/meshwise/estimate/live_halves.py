"""A backward in two halves, as torch.distributed.pipelining takes it: to what entered, and to the weights.

The first half runs the nodes between the result and what entered. Where weights hang on one of these (a
joint), themselves or by nodes that lead to weights alone, the gradient that the node gets is noted. The
second half runs from joints to weights, those of one joint after the other. What nodes have saved stays until
they run in the second half, or, where no weight hangs on them, until this is through. Source:
torch/distributed/pipelining/_backward.py (`stage_backward_input`, `stage_backward_weight`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwise.estimate.live_tensors import Leaf, Memory, Node, Storage

Origins = set[Node | Leaf]


@dataclass(slots=True, eq=False)
class Half:
    """What is left to do for some `weights`: from `joints`, with what was noted there, by way of `aside`."""

    weights: list[Leaf] = field(default_factory=list)
    joints: dict[Node, list[Storage | None]] = field(default_factory=dict)
    aside: list[Node] = field(default_factory=list)

    def run(self, memory: Memory) -> None:
        """From what was noted to the weights."""
        wanted: Origins = {*self.weights, *self.aside}
        for node, grads in self.joints.items():
            node.grads = [*grads]
        for node in [*reversed(self.joints), *reversed(self.aside)]:
            node.run(memory, wanted)


def to_what_entered(nodes: list[Node], entered: Leaf, weights: Iterable[Leaf]) -> list[Half]:
    """Run the first half; what is left for the second, in the order of the weights."""
    way: Origins = {entered}
    for node in nodes:
        if not way.isdisjoint(node.origins()):
            way.add(node)
    halves = _halves(nodes, way, weights)
    joined = {node: half for half in halves for node in half.joints}
    while nodes:
        node = nodes.pop()
        if node in way and any(node.grads):
            if node in joined:
                joined[node].joints[node] = node.grads
            node.run(entered.memory, way, is_kept=True)
    return halves


def to_weights(halves: list[Half], memory: Memory) -> None:
    """Run the second half; what is found for some weights stays until it is for the next."""
    found: list[Storage | None] = []
    noted: list[list[Storage | None]] = []
    for half in halves:
        noted = [*half.joints.values()]
        for weight in half.weights:
            weight.is_held = True
        half.run(memory)
        found = [weight.count() for weight in half.weights]
        half.joints.clear()
    del found, noted


def _halves(nodes: list[Node], way: Origins, weights: Iterable[Leaf]) -> list[Half]:
    """One for all weights that hang on the same joint."""
    listed = [*weights]
    hanging: dict[Node | Leaf, set[Leaf]] = {weight: {weight} for weight in listed}
    joints: dict[Leaf, list[Node]] = {weight: [] for weight in listed}
    for node in nodes:
        found = set().union(*(hanging[origin] for origin in node.origins() if origin in hanging))
        if node not in way:
            hanging[node] = found
            continue
        for weight in found:
            joints[weight].append(node)
    halves: dict[Node, Half] = {}
    for weight, its in joints.items():
        half = next((halves[node] for node in its if node in halves), Half())
        half.weights.append(weight)
        half.joints |= {node: [] for node in its}
        halves |= dict.fromkeys(its, half)
    unique = [*dict.fromkeys(halves.values())]
    for half in unique:
        half.aside = [node for node in nodes if not hanging.get(node, set()).isdisjoint(half.weights)]
    return unique

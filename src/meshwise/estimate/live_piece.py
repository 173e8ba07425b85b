"""A piece of a decoder in a training step, as tensors that are nothing but their bytes.

Some layers of the model with the ends of it that are theirs, spread over the replicas by FSDP2
(`estimate.live_fsdp2`): its forward of a microbatch, and the backward of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from meshwise.estimate.live_decoder import Modules
from meshwise.estimate.live_fsdp2 import Exchange, Group, groups_of
from meshwise.estimate.live_linear import Weights
from meshwise.estimate.live_tensors import Leaf, Node, Storage, Tensor
from meshwise.model.architecture import Model, layer_kind
from meshwise.model.weights import block_weights, embedding_weights, frozen, head_weights
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import Stage
from meshwise.program.cut import Cut


@dataclass(slots=True, eq=False)
class Pass:
    """A microbatch between its forward and its backward: the graph, what it ends in, what it entered as."""

    nodes: list[Node]
    result: Storage
    entered: Leaf | None


class Piece:
    """Some layers of the model, with the ends of it that are theirs; a pipeline rank may have several."""

    def __init__(
        self, model: Model, mesh: Mesh, cut: Cut, modules: Modules, chunk: Stage, layers: range
    ) -> None:
        self.modules, self.graph, self.memory = modules, modules.graph, modules.graph.memory
        self.exchange = Exchange()
        of = partial(groups_of, memory=self.memory, mesh=mesh, cut=cut, exchange=self.exchange)
        is_first, is_last = bool(chunk.embeddings), bool(chunk.heads)
        first, last = embedding_weights(model), head_weights(model)
        if cut.lora_rank:
            first, last = frozen(first), frozen(last)
        self.first = {weight.name for weight in first} if is_first else set()
        self.is_tied = model.tied_embedding and is_first and is_last
        table = first[:1] if model.tied_embedding and not is_first else ()
        self.embedding = of(first + last * self.is_tied, is_tied=self.is_tied)[0] if is_first else None
        self.head = self.embedding if self.is_tied else of(last + table)[0] if is_last else None
        kinds = [block_weights(model, layer_kind(model, layer), cut.lora_rank) for layer in layers]
        groups = [of(block) for block in kinds]
        self.blocks = [dense for dense, *_ in groups]
        self.experts = [experts[0] if experts else None for _, *experts in groups]
        ends = [self.head] if self.head is not None and not self.is_tied else []
        inner = [group for of_block in groups for group in of_block]
        self.groups = [*([self.embedding] if self.embedding else []), *inner, *ends]
        for group in inner:
            group.is_freed = bool(mesh.pp == 1 and mesh.zero >= 3)
        is_redone = mesh.plan.recompute == "full" or "per_op" in mesh.plan.recompute_modules
        self.num_redone = float(mesh.recompute_layers / mesh.vpp) * is_redone
        numbers = range(int(mesh.num_microbatches))
        new, x = self.memory.new, modules.x
        self.received = [new(x) for _ in numbers if not is_first]
        self.returned = [new(x) for _ in numbers if not is_last]

    def forward(self, number: int) -> Pass:
        """From tokens, or what came, to what is handed on, or the loss."""
        modules = self.modules
        if self.embedding is not None:
            entered = None
            self.embedding.before_forward()
            x = modules.embedding(self.embedding.weights)
            if modules.cut.lora_rank:  # what follows has gradients all the same
                self.graph.taken()
                entered = Leaf(self.memory, value=x.storage)
                x = Tensor(x.storage, entered)
            if not self.is_tied:
                self.embedding.after_forward()
        else:
            entered = Leaf(self.memory)
            x = Tensor(self.received[number], entered)
        for place, group in enumerate(self.blocks):
            x = self._within(group, partial(self._block, place), x)
        if self.head is not None:
            self.head.before_forward()
            x = self._loss(x if self.is_tied else self._entering(self.head, x))
        self.exchange.gathered = None
        return Pass(self.graph.taken(), x.storage, entered)

    def _block(self, place: int, weights: Weights, x: Tensor) -> Tensor:
        """Computed again in the backward, or not."""
        group = self.experts[place]
        experts = None if group is None else partial(self._within, group, self.modules.experts)
        run = partial(self.modules.block, weights, experts)
        return self.graph.again(run, x) if place < self.num_redone else run(x)

    def _within(self, group: Group, run: Callable[[Weights, Tensor], Tensor], x: Tensor) -> Tensor:
        """What a group's modules make of x; its weights are there till then."""
        group.before_forward()
        return self._used(group, run(group.weights, self._entering(group, x)))

    def scaled(self, one: Pass) -> Storage:
        """The loss over the number of microbatches."""
        found = self.graph.op(self._number(), lambda _: (self._number(),), Tensor(one.result, one.nodes[-1]))
        one.nodes += self.graph.taken()
        return found.storage

    def _number(self) -> Storage:
        return self.memory.new(self.modules.number)

    def _loss(self, x: Tensor) -> Tensor:
        """Of the last block's output."""
        assert self.head is not None
        weights = self.head.weights
        return self.modules.loss(weights, self._used(self.head, self.modules.head(weights, x)))

    def _used(self, group: Group, x: Tensor) -> Tensor:
        """A group has made `x`; when the gradient of this is there, its weights are needed again."""
        if self.graph.is_again:  # all that was gathered last is this
            self.exchange.gathered = None
            return x
        group.after_forward()
        assert isinstance(x.origin, Node)
        x.origin.before = group.before_backward
        return x

    def _entering(self, group: Group, x: Tensor) -> Tensor:
        """When the gradient of what enters a group is there, those of its weights are complete."""

        def back(grad: Storage) -> tuple[Storage]:
            group.after_backward()
            return (grad,)

        return self.graph.op(x.storage, back, x)

    def backward(self, one: Pass, grad: Storage) -> Storage | None:
        """From the gradient of the result to those of all weights, and of what came."""
        for group in self.groups:
            group.is_done = False
        if not one.nodes and one.entered is not None:  # a stage of no layers
            return self.memory.new(grad.size)
        one.nodes[-1].take(grad, 0)
        self.graph.backward(one.nodes)
        for group in self.groups:
            if not group.is_done:  # no gradient leaves it
                group.after_backward()
        return None if one.entered is None or self.embedding else one.entered.grad

    def local_sizes(self) -> list[float]:
        """Bytes of this rank's part of each weight, in the order in which the optimizer takes them."""
        named = [(name, group, size) for group in self.groups for name, size in group.local.items()]
        return [size for *_, size in sorted(named, key=lambda one: self._turn(one[0], one[1]))]

    def _turn(self, name: str, group: Group) -> int:
        """Positions come before tokens, and what is the head's alone at the end."""
        is_last = group is self.head and name not in self.first
        return 0 if name == "positions" else 1 + is_last

    def finish(self) -> None:
        """The last backward is through."""
        for group in self.groups:
            group.finish()
        self.exchange.order.clear()
        self.exchange.reduced = None

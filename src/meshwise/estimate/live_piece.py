"""A piece of a decoder in a training step, as tensors that are nothing but their bytes.

Some layers of the model with the ends of it that are theirs, spread over the replicas by FSDP2
(`estimate.live_fsdp2`): its forward of a microbatch, and the backward of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from meshwise.estimate.live_decoder import Modules
from meshwise.estimate.live_fsdp2 import Exchange, Trained, entering, groups_of, trained, used, within
from meshwise.estimate.live_further import Further
from meshwise.estimate.live_halves import Half, to_weights, to_what_entered
from meshwise.estimate.live_linear import Weights
from meshwise.estimate.live_optimizer import Shard
from meshwise.estimate.live_tensors import Leaf, Node, OnHost, Storage, Tensor
from meshwise.model.architecture import Model, layer_kind
from meshwise.model.weights import block_weights, embedding_weights, frozen, head_weights
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import Stage, num_on_host
from meshwise.program.cut import Cut


@dataclass(slots=True, eq=False)
class Pass:
    """A microbatch between its forward and its backward: the graph, what it ends in, what it entered as.

    `grad`: the gradient of what it ends in. `halves`: what the first half of a backward leaves.
    """

    nodes: list[Node]
    result: Storage | None
    entered: Leaf | None
    grad: Storage | None = None
    halves: list[Half] = field(default_factory=list)


class Piece:
    """Some layers of the model, with the ends of it that are theirs; a pipeline rank may have several."""

    def __init__(
        self, model: Model, mesh: Mesh, cut: Cut, modules: Modules, plain: Modules, chunk: Stage,
        layers: range,
    ) -> None:  # fmt: skip
        self.modules, self.graph, self.memory = modules, modules.graph, modules.graph.memory
        self.exchange = Exchange()
        of = partial(groups_of, memory=self.memory, mesh=mesh, cut=cut, exchange=self.exchange)
        self.is_first, self.is_last = bool(chunk.embeddings), bool(chunk.heads)
        first, last = embedding_weights(model), head_weights(model)
        if cut.lora_rank:
            first, last = frozen(first), frozen(last)
        self.is_tied = model.tied_embedding and self.is_first and self.is_last
        table = first[:1] if model.tied_embedding and not self.is_first else ()
        ahead = model.mtp_layers * self.is_last
        looks, reads = {"tokens": self.is_first + self.is_tied + ahead}, {"logits": 1 + ahead}
        looked_up = first if self.is_first else first[:1] * (ahead > 0)
        self._looked_up = tuple(sorted(looked_up, key=lambda one: one.name != "positions"))
        self._read = last + table if self.is_last else ()
        held = looked_up + last * self.is_tied
        self.embedding = of(held, is_tied=self.is_tied, uses=looks)[0] if held else None
        self.head = self.embedding if self.is_tied else of(self._read, uses=reads)[0] if self._read else None
        kinds = [block_weights(model, layer_kind(model, layer), cut.lora_rank) for layer in layers]
        groups = [of(block) for block in kinds]
        self._blocks = [*zip(kinds, groups, strict=True)]
        self.blocks = [dense for dense, *_ in groups]
        self.experts = [experts[0] if experts else None for _, *experts in groups]
        self.further = [Further(model, plain, of) for _ in range(ahead)]
        ends = [self.head] if self.head is not None and not self.is_tied else []
        inner = [group for of_block in groups for group in of_block]
        self.groups = [*([self.embedding] if self.embedding else []), *inner, *ends]
        for one in self.further:
            inner += one.in_block
            self.groups += [one.ends, *one.in_block]
        for group in inner:
            group.is_freed = bool(mesh.pp == 1 and mesh.zero >= 3)
        self.every, modules_redone = mesh.plan.recompute_every, mesh.plan.recompute_modules
        is_redone = (mesh.plan.recompute == "full" and self.every == 1) or "per_op" in modules_redone
        self.num_redone = float(mesh.recompute_layers / mesh.vpp) * is_redone
        self.num_on_host = float(num_on_host(mesh.plan.offload_activations, float(len(layers))))

    def forward(self, came: Storage | None) -> Pass:
        """From tokens, or what came, to what is handed on, or the loss."""
        modules = self.modules
        if self.is_first:
            assert self.embedding is not None
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
            assert came is not None
            entered = Leaf(self.memory)
            x = Tensor(came, entered)
        for start in range(0, len(self.blocks), self.every):
            run = partial(self._layers, range(start, min(start + self.every, len(self.blocks))))
            with self.graph.packing(OnHost) if start < self.num_on_host else nullcontext():
                x = modules.checkpoints.again(run, x) if self.every > 1 else run(x)
        if self.head is not None:
            x = self._loss(x)
        self.exchange.gathered = None
        return Pass(self.graph.taken(), x.storage, entered)

    def _layers(self, places: range, x: Tensor) -> Tensor:
        """One layer after the other."""
        for place in places:
            x = within(self.modules.checkpoints, self.blocks[place], partial(self._block, place), x)
        return x

    def _block(self, place: int, weights: Weights, x: Tensor) -> Tensor:
        """Computed again in the backward, or not."""
        group, modules = self.experts[place], self.modules
        experts = None if group is None else partial(within, modules.checkpoints, group, modules.experts)
        run = partial(modules.block, weights, experts)
        return modules.checkpoints.again(run, x) if place < self.num_redone else run(x)

    def scaled(self, one: Pass) -> Storage:
        """The loss over the number of microbatches."""
        assert one.result is not None
        found = self.modules.losses.share(Tensor(one.result, one.nodes[-1]))
        one.nodes += self.graph.taken()
        return found.storage

    def _loss(self, x: Tensor) -> Tensor:
        """Of the last block's output, and of what further modules make of it."""
        head, modules = self.head, self.modules
        assert head is not None
        head.before_forward()
        entered = x if self.is_tied else entering(self.graph, head, x)
        loss = modules.loss(head.weights, used(head, modules.head(head.weights, entered)))
        for further in self.further:
            x = further.forward(x, self._embedded())
            found = modules.loss(head.weights, modules.read(head.weights, further.normed(x)))
            loss = modules.losses.sum(loss, modules.losses.share(found))
        return loss

    def _embedded(self) -> Tensor:
        """The next tokens, by the table as it was gathered where tokens enter."""
        assert self.embedding is not None
        if self.is_first:
            return self.modules.embedding(self.embedding.weights)
        self.embedding.before_forward()
        return used(self.embedding, self.modules.embedding(self.embedding.weights))

    def backward(self, one: Pass) -> Storage | None:
        """From the gradient of the result to those of all weights, and of what came."""
        self._begin(one)
        if not one.nodes and one.entered is not None:  # a stage of no layers
            return one.grad and self.memory.new(one.grad.size)
        self.graph.backward(one.nodes)
        self._end()
        one.grad = None
        return None if one.entered is None or self.is_first else one.entered.grad

    def backward_to_what_entered(self, one: Pass) -> Storage | None:
        """The first half of a backward; where tokens enter there is none."""
        if self.is_first or one.entered is None:
            return None
        self._begin(one)
        one.halves = to_what_entered(one.nodes, one.entered, [weight for weight, _ in self._trained()])
        self._end()
        if self.is_last:
            one.result = one.grad = None
        return one.entered.grad

    def backward_to_weights(self, one: Pass) -> None:
        """The second half."""
        if self.is_first:
            self.backward(one)
        else:
            to_weights(one.halves, self.memory)

    def _trained(self) -> Iterator[Trained]:
        """All weights that have gradients, in the order in which modules list them."""
        if self.embedding is not None:
            yield from trained(self._looked_up, [self.embedding])
        for weights, groups in self._blocks:
            yield from trained(weights, groups)
        if self.head is not None:
            yield from trained(self._read, [self.head])
        for further in self.further:
            yield from further.trained()

    def _begin(self, one: Pass) -> None:
        for group in self.groups:
            group.is_done = False
        if one.nodes:
            assert one.grad is not None
            one.nodes[-1].take(one.grad, 0)

    def _end(self) -> None:
        for group in self.groups:
            if not group.is_done:  # no gradient leaves it
                group.after_backward()

    def shards(self) -> list[Shard]:
        """This rank's part of each weight that trains, in the order in which the optimizer takes them."""
        return [shard for _, shard in self._trained()]

    def gather(self) -> None:
        """Begin to gather all weights."""
        for group in self.groups:
            group.gather()

    def arrive(self) -> None:
        """All weights that have been gathered are there."""
        for group in self.groups:
            group.arrive()

    def let_go(self) -> None:
        """Of all weights."""
        for group in self.groups:
            group.let_go()

    def reduce(self) -> None:
        """The gradients that the backwards of all microbatches have left."""
        for group in self.groups:
            group.is_reduced = group.is_let_go = True
            group.after_backward()
        self.finish()

    def finish(self) -> None:
        """The last backward is through."""
        for group in self.groups:
            group.finish()
        self.exchange.order.clear()
        self.exchange.reduced = None

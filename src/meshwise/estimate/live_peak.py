"""The most bytes that all tensors of a training step on PyTorch's own parts hold at once, by a walk through.

What is kept for the backward is `estimate.fsdp2_memory`'s; this is everything: shards, whole weights, what
FSDP2 moves them through, gradients, temporaries of each op, the optimizer's. The step is walked with tensors
that are nothing but their bytes (`estimate.live_tensors`), op by op (`estimate.live_decoder`).
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from meshwise.estimate.live_decoder import Modules, Weight
from meshwise.estimate.live_tensors import Graph, Memory, Node, Storage, Tensor
from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import CORE_ATTENTION, DEFAULTS
from meshwise.plan.stages import stages_of
from meshwise.program.cut import Cut
from meshwise.program.fsdp2 import Unit, tp_sums, units
from meshwise.program.tensor_1d import shards

OTHERS = (
    *("attention", "lora_rank", "optimizer", "grad_dtype", "offload_optimizer", "offload_activations"),
    "recompute_every",
)
"""Keys of a plan that are walked by their defaults only."""


def is_known(model: Model, mesh: Mesh) -> bool:
    """Whether the walk states this model and plan."""
    is_alone = mesh.pp == mesh.cp == 1
    is_dense = model.moe is None and model.mla is None and mesh.plan.act_input_dtype == "bf16"
    is_plain = mesh.plan.dtype != "fp8" and (mesh.plan.sequence_parallel or mesh.tp == 1)
    is_default = all(getattr(mesh.plan, key) == DEFAULTS[key] for key in OTHERS)
    is_apart = mesh.tp == 1 or mesh.plan.loss_chunks == 1
    is_core = mesh.plan.recompute_modules in ((), CORE_ATTENTION)
    return all(map(bool, (is_alone, is_dense, is_plain, is_default, is_apart, is_core)))


def live_peak_bytes(model: Model, mesh: Mesh, cut: Cut, steps: int) -> float:
    """The peak of `steps` steps on a rank (a third is like the second)."""
    step = _Step(model, mesh, cut)
    for number in range(min(steps, 2)):
        step.run()
        step.optimizer(is_first=number == 0)
    return step.memory.peak


class _Exchange:
    """What FSDP2 holds for all groups of a rank: the order of their forwards, the last buffers."""

    def __init__(self) -> None:
        self.order: list[_Group] = []
        self.gathered: Storage | None = None
        self.reduced: Storage | None = None


class _Group:
    """Weights that FSDP2 gathers together; a rank keeps a part, in the wide type, and its gradient.

    `is_freed`: they go after each forward. `is_reduced`, `is_let_go`: what is to happen in the backward.
    """

    def __init__(
        self, memory: Memory, unit: Unit, mesh: Mesh, cut: Cut, exchange: _Exchange, *, uses: int,
    ) -> None:  # fmt: skip
        self.new, self.exchange = memory.new, exchange
        self.narrow, self.wide = cut.precision.act_bytes, cut.precision.stat_bytes
        self.is_cast = self.narrow != self.wide
        ranks, padded = float(unit.sharing(mesh)), float(unit.padded_size(mesh, cut))
        self.is_shared, self.has_copies = ranks > 1, bool(mesh.replicas > ranks)
        self.num_padded, self.num_local = padded, padded / ranks
        # torch lists the norms of a block before its matrices
        norms_first = sorted(unit.weights, key=lambda weight: not weight.name.startswith("norm"))
        self.weights, self.local = {}, {}
        words = "tokens" if mesh.tp > 1 else ""
        for weight in norms_first:
            size = self.narrow * float(weight.size / shards(weight, cut))
            made = size * float(mesh.tp) if weight.name == words and uses == 1 else size
            is_apart = bool(mesh.tp > 1 and tp_sums(weight, cut)) or made > size
            num_uses = uses if weight.name == "tokens" else 1
            self.weights[weight.name] = Weight(memory, size, made, num_uses, is_apart=is_apart)
            alone = Unit(weights=(weight,), count=1.0, gathers=(0.0, 0.0))
            self.local[weight.name] = self.wide * float(alone.local_size(mesh, cut))
        self.shard = self.new(self.wide * self.num_local)
        self.grad: Storage | None = None
        self.is_freed = False
        self.is_reduced = self.is_let_go = True
        self.is_done = False
        self._whole: list[Storage] = []
        self._coming: Storage | None = None
        self._sums: dict[str, Storage] = {}
        self._all_reduced: Storage | None = None

    # --- weights -------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Gather, and let go of what the group before was gathered into."""
        self.is_done = False
        if self._whole:
            return
        self._gather()
        before = self.exchange.gathered
        coming = self._copy_out()
        self.exchange.gathered = coming
        del before

    def after_forward(self) -> None:
        """Weights go; the group is known to have been used."""
        if self.is_freed:
            self._whole = []
        self.exchange.order.append(self)

    def before_backward(self) -> None:
        """Gather again what went, and begin to gather what was used before this."""
        if not self._whole:
            self._gather()
            self._copy_out()
        order = self.exchange.order
        place = len(order) - 1 - order[::-1].index(self)
        if place > 0:
            order[place - 1]._gather()

    def _gather(self) -> None:
        if self._whole or self._coming or not self.is_shared:
            return
        part = self.new(self.narrow * self.num_local) if self.is_cast else None
        self._coming = self.new(self.narrow * self.num_padded)
        del part

    def _copy_out(self) -> Storage | None:
        """Each weight in a tensor of its own; what they came in. A rank alone casts one after the other."""
        coming, self._coming = self._coming, None
        if self.is_shared:
            self._whole = [self.new(self.narrow * self.num_padded)]
            return coming
        for weight in self.weights.values():
            cast = self.new(weight.size) if self.is_cast else None
            self._whole.append(self.new(weight.size))
        del cast
        return None

    # --- gradients -----------------------------------------------------------------------------

    def after_backward(self) -> None:
        """Add up gradients, or reduce them and keep this rank's part."""
        self.is_done = True
        for name in self._sums:
            self.weights[name].grad = None
        if not self.is_reduced:
            self._let_go()
            self._widen()
            return
        grads = [self._taken(name) for name in self.weights]
        self._let_go()
        self.exchange.reduced = None
        self._all_reduced = None
        taken = self.new(self.wide * self.num_padded)
        last = grads[-1] if self.is_shared else None  # torch's loop still names it
        grads.clear()
        found = self.new(self.wide * self.num_local)
        del last
        self.exchange.reduced = taken
        self._all_reduced = found if self.has_copies else None
        self.grad = self.grad or found

    def _taken(self, name: str) -> Storage:
        weight = self.weights[name]
        grad = self._sums.pop(name, None) or weight.grad
        assert grad is not None
        if weight.is_apart:
            grad = self.new(grad.size * weight.size / weight.made)
        weight.grad = None
        return grad

    def _widen(self) -> None:
        """Gradients that wait for those of other microbatches, in the type of the sums."""
        if not self.is_cast:
            return
        for name, weight in self.weights.items():
            if weight.grad is not None:
                self._sums[name] = self.new(weight.made * self.wide / self.narrow)
                weight.grad = None

    def _let_go(self) -> None:
        if self.is_let_go:
            self._whole = []

    def finish(self) -> None:
        """The backward is through."""
        self._all_reduced = None


class _Step:
    """Forward and backward of all microbatches, and the optimizer."""

    def __init__(self, model: Model, mesh: Mesh, cut: Cut) -> None:
        self.model, self.mesh, self.cut = model, mesh, cut
        self.memory, self.exchange = Memory(), _Exchange()
        self.graph = Graph(self.memory)
        self.modules = Modules(model, mesh, cut, self.graph)
        (stage,) = stages_of(model, mesh)
        self.num_redone = float(mesh.recompute_layers) * (mesh.plan.recompute == "full")
        *ends, block = (unit for unit in units(model, stage, mesh) if unit.count)
        of = partial(_Group, self.memory, mesh=mesh, cut=cut, exchange=self.exchange)
        self.embedding = of(ends[0], uses=len(ends) % 2 + 1)
        self.blocks = [of(block, uses=1) for _ in range(model.num_layers)]
        self.head = of(ends[1], uses=1) if len(ends) == 2 else self.embedding
        self.groups = [self.embedding, *self.blocks, *([self.head] if len(ends) == 2 else [])]
        for group in self.blocks:
            group.is_freed = bool(mesh.zero >= 3)
        tokens, places = float(mesh.microbatch * mesh.seq), float(mesh.seq)
        numbers = 8.0 * (2.0 * float(mesh.num_microbatches) * tokens + places)
        self.fixed = self.memory.new(numbers + 2.0 * self.modules.sine)

    def run(self) -> None:
        """All microbatches, one after the other."""
        new, one = self.memory.new, self.modules.number
        losses = []
        last = int(self.mesh.num_microbatches) - 1
        for number in range(last + 1):
            for group in self.groups:
                group.is_reduced = number == last or bool(self.mesh.zero == 2)
                group.is_let_go = number == last or bool(self.mesh.zero >= 3)
            loss = self.forward()
            root = new(one)
            self.backward(root)
            losses.append(loss)
            del root

    def forward(self) -> Storage:
        """From tokens to the loss; under ZeRO 1 and 2 weights stay gathered."""
        modules, graph = self.modules, self.graph
        is_tied = self.head is self.embedding
        self.embedding.before_forward()
        x = modules.embedding(self.embedding.weights)
        if not is_tied:
            self.embedding.after_forward()
        for number, group in enumerate(self.blocks, 1):
            group.before_forward()
            x = self.entering(group, x)
            run = partial(modules.block, group.weights)
            x = graph.again(run, x) if number <= self.num_redone else run(x)
            x = self.used(group, x)
        self.head.before_forward()
        loss = self.loss(x if is_tied else self.entering(self.head, x))
        self.exchange.gathered = None
        del x
        mean = graph.op(self.memory.new(modules.number), lambda _: (self.memory.new(modules.number),), loss)
        return mean.storage

    def loss(self, x: Tensor) -> Tensor:
        """Of the last block's output."""
        weights = self.head.weights
        return self.modules.loss(weights, self.used(self.head, self.modules.head(weights, x)))

    def used(self, group: _Group, x: Tensor) -> Tensor:
        """A group has made `x`; when the gradient of this is there, its weights are needed again."""
        group.after_forward()
        assert isinstance(x.origin, Node)
        x.origin.before = group.before_backward
        return x

    def entering(self, group: _Group, x: Tensor) -> Tensor:
        """When the gradient of what enters a group is there, those of its weights are complete."""

        def back(grad: Storage) -> tuple[Storage]:
            group.after_backward()
            return (grad,)

        return self.graph.op(x.storage, back, x)

    def backward(self, root: Storage) -> None:
        """From the loss to gradients of all weights; those of groups that no gradient leaves come last."""
        self.graph.nodes[-1].take(root, 0)
        self.graph.backward()
        for group in self.groups:
            if not group.is_done:
                group.after_backward()
            group.finish()
        self.exchange.order.clear()
        self.exchange.reduced = None

    def optimizer(self, *, is_first: bool) -> None:
        """AdamW, weight by weight; the first time it makes its two states; then gradients go."""
        named = [one for group in self.groups for one in group.local.items()]
        local = [size for _, size in sorted(named, key=lambda one: _place(one[0]))]
        if is_first:
            self.states = [self.memory.new(2.0 * size) for size in local]
        for before, size in pairwise([0.0, *local]):
            self.memory.play(size, size, -before, -size)
        self.memory.play(-local[-1])
        for group in self.groups:
            group.grad = None


def _place(name: str) -> int:
    """Of a weight among those that the optimizer takes in turn."""
    return 0 if name == "positions" else 2 if name == "logits" or name.startswith("final_norm") else 1

"""What FSDP2 holds of a group of weights: a part, all of them where they are used, and their gradients.

Groups are gathered into one tensor and copied to one a weight; in a forward the former stays until the next
group is there. What a reduction reads stays until the next one. Source: torch.distributed.fsdp._fully_shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from meshwise.cost.schedule import weight_copies
from meshwise.estimate.live_again import Checkpoints
from meshwise.estimate.live_linear import Weight
from meshwise.estimate.live_optimizer import Shard
from meshwise.estimate.live_tensors import Graph, Memory, Node, Storage, Tensor
from meshwise.model.weights import Weight as WeightOfModel
from meshwise.model.weights import Weights
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import NARROW_DTYPES
from meshwise.program.cut import Cut
from meshwise.program.fsdp2 import Unit, elem_bytes, is_packed, reduced_bytes, shard_bytes, tp_sums
from meshwise.program.tensor_1d import shards


class Exchange:
    """What FSDP2 holds for all groups of a rank: the order of their forwards, the last buffers."""

    def __init__(self) -> None:
        self.order: list[Group] = []
        self.gathered: Storage | None = None
        self.reduced: Storage | None = None
        self._root: Group | None = None

    @contextmanager
    def again(self, group: Group) -> Iterator[None]:
        """A group's modules are computed again; the outermost that is not in its backward ends a forward."""
        is_root = self._root is None and not group.is_in_backward
        if is_root:
            self._root = group
        yield
        if is_root:
            self._root = self.gathered = None


class Group:
    """Weights that FSDP2 gathers together; a rank keeps a part, and its gradient.

    `uses`: how often a weight is used, if not once. `is_freed`: they go after each forward. `is_reduced`,
    `is_let_go`: what is to happen in the backward.
    """

    def __init__(
        self, memory: Memory, weights: Weights, mesh: Mesh, cut: Cut, exchange: Exchange, *,
        is_tied: bool = False, uses: Mapping[str, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        unit = Unit(weights=weights, count=1.0, gathers=(0.0, 0.0))
        self.new, self.exchange = memory.new, exchange
        self.narrow, self.kept = cut.precision.act_bytes, shard_bytes(mesh, cut)
        self.summed = reduced_bytes(mesh, cut)
        found_as = "bf16" if mesh.plan.dtype in NARROW_DTYPES else mesh.plan.dtype
        self.is_other_half = self.summed == self.narrow and mesh.plan.grad_dtype not in (found_as, "fp32")
        self.ranks, self.num_reduced = float(unit.sharing(mesh)), float(unit.trained.padded_size(mesh, cut))
        copies = float(unit.replicas(mesh)[0] * weight_copies(mesh.schedule)) / self.ranks
        self.is_shared, self.has_copies = self.ranks > 1, copies > 1
        self.is_by_width = unit.is_experts and self.is_shared
        self.cut, self.gathered = cut, float(unit.gathered_bytes(mesh, cut))
        wide = replace(unit, weights=tuple(weight for weight in weights if not is_packed(weight, cut)))
        self.num_cast = float(wide.padded_size(mesh, cut)) / self.ranks
        self.part = float(unit.padded_bytes(mesh, cut, self.kept)) / self.ranks
        self.weights: dict[str, Weight] = {}
        self.shards: dict[str, Shard] = {}
        holds_words = mesh.tp > 1 and weights[0].name == "tokens"
        for weight in weights:
            size = self.narrow * float(weight.size / shards(weight, cut))
            is_words = weight.name == "tokens" and holds_words and not is_tied
            made = size * float(mesh.tp) if is_words else size
            is_apart = is_words or bool(mesh.tp > 1 and tp_sums(weight, cut))
            num_uses = uses.get(weight.name, 1)
            self.weights[weight.name] = Weight(memory, weight, size, made, num_uses, is_apart=is_apart)
            if weight.trains:
                self.shards[weight.name] = self._shard_of(weight, mesh)
        self.grad: Storage | None = None
        self.is_freed = False
        self.is_reduced = self.is_let_go = True
        self.is_done = self.is_in_backward = False
        self._whole: list[Storage] = []
        self._shard: Storage | None = None
        self._coming: Storage | None = None
        self._sums: dict[str, Storage] = {}
        self._all_reduced: Storage | None = None

    def _shard_of(self, weight: WeightOfModel, mesh: Mesh) -> Shard:
        alone = Unit(weights=(weight,), count=1.0, gathers=(0.0, 0.0))
        rows, width = map(float, next(alone.stored(self.cut)))
        matrices = weight.shape[0] / float(self.cut.ep) if weight.is_expert else 1.0
        number = float(alone.local_size(mesh, self.cut))
        return Shard(weight, number, self.kept, rows, width, self.ranks, matrices)

    # --- weights -------------------------------------------------------------------------------

    def make(self, name: str) -> None:
        """A weight whole; one in few bits is wide first."""
        weight = self.weights[name]
        wide = self.new(weight.size / self.narrow * self.kept)
        self._whole.append(self.new(self._bytes(weight, self.kept)) if self._is_packed(weight) else wide)

    def _is_packed(self, weight: Weight) -> bool:
        return is_packed(weight.of, self.cut)

    def _bytes(self, weight: Weight, wide: float) -> float:
        """Of a whole one, of `wide` an element where it is not kept in few bits."""
        return weight.size / self.narrow * elem_bytes(weight.of, self.cut, wide)

    def share(self) -> None:
        """This rank's part is all that stays."""
        self._shard = self.new(self.part)
        self._whole = []

    def before_forward(self) -> None:
        """Gather, and let go of what the group before was gathered into."""
        self.is_done = False
        if self._whole:
            return
        self.gather()
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
        self.is_in_backward = True
        self.gather()
        self.arrive()
        order = self.exchange.order
        place = len(order) - 1 - order[::-1].index(self)
        if place > 0:
            order[place - 1].gather()

    def gather(self) -> None:
        """Begin to, where weights are not there."""
        if self._whole or self._coming or not self.is_shared:
            return
        part = self.new(self.narrow * self.num_cast) if self.narrow != self.kept and self.num_cast else None
        self._coming = self.new(self.gathered)
        del part

    def arrive(self) -> None:
        """What is gathered is waited for, and is in its place."""
        if not self._whole:
            self._copy_out()

    def let_go(self) -> None:
        """Of whole weights."""
        self._whole = []

    def _copy_out(self) -> Storage | None:
        """Each weight in a tensor of its own; what they came in. A rank alone casts one after the other."""
        coming, self._coming = self._coming, None
        if self.is_shared:
            self._whole = [self.new(self.gathered)]
            in_parts = self.new(self.gathered) if self.is_by_width else None
            del in_parts
            return coming
        cast = None
        for weight in self.weights.values():
            if self.narrow != self.kept and not is_packed(weight.of, self.cut):
                cast = self.new(weight.size)
            self._whole.append(
                self.new(weight.size / self.narrow * elem_bytes(weight.of, self.cut, self.narrow))
            )
        del cast
        return None

    # --- gradients -----------------------------------------------------------------------------

    def after_backward(self) -> None:
        """Add up gradients, or reduce them and keep this rank's part."""
        self.is_done, self.is_in_backward = True, False
        for name in self._sums:
            self.weights[name].grad = None
        if not self.is_reduced:
            self._let_go()
            self._widen()
            return
        grads = [self._taken(name) for name in self.weights if self._has_gradient(name)]
        self._let_go()
        self.exchange.reduced = None
        if not grads:
            return
        self._all_reduced = None
        last = grads[-1] if self.is_shared else None  # torch's loop still names it
        if self.is_by_width:
            grads = self._in_parts(grads)
        taken = self.new(self.summed * self.num_reduced)
        grads.clear()
        found = reduced = self.new(self.summed * self.num_reduced / self.ranks)
        if self.summed != self.kept or self.is_other_half:
            found = self.new(self.kept * self.num_reduced / self.ranks)
        del last
        self.exchange.reduced = taken
        self._all_reduced = reduced if self.has_copies else None
        self.grad = self.grad or found

    def _in_parts(self, grads: list[Storage]) -> list[Storage]:
        """Copies in which parts of each rank lie together, by torch's own loop: its iterators hold some."""
        for place, (_, before) in enumerate(zip(self.weights, grads, strict=False)):
            grads[place] = self.new(before.size)
        return grads

    def _has_gradient(self, name: str) -> bool:
        return name in self._sums or self.weights[name].grad is not None

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
        if self.summed == self.narrow and not self.is_other_half:
            return
        for name, weight in self.weights.items():
            if weight.grad is not None:
                self._sums[name] = self.new(weight.made * self.summed / self.narrow)
                weight.grad = None

    def _let_go(self) -> None:
        if self.is_let_go:
            self.let_go()

    def finish(self) -> None:
        """The backward is through."""
        self._all_reduced = None


def within(
    checkpoints: Checkpoints, group: Group, run: Callable[[Mapping[str, Weight], Tensor], Tensor], x: Tensor
) -> Tensor:
    """What a group's modules make of x; its weights are there till then."""
    group.before_forward()
    if not checkpoints.is_again:
        return used(group, run(group.weights, entering(checkpoints.graph, group, x)))
    with group.exchange.again(group):
        return run(group.weights, entering(checkpoints.graph, group, x))


def used(group: Group, x: Tensor) -> Tensor:
    """A group has made `x`; when the gradient of this is there, its weights are needed again."""
    group.after_forward()
    assert isinstance(x.origin, Node)
    x.origin.before = group.before_backward
    return x


def entering(graph: Graph, group: Group, x: Tensor) -> Tensor:
    """When the gradient of what enters a group is there, those of its weights are complete."""

    def back(grad: Storage) -> tuple[Storage]:
        group.after_backward()
        return (grad,)

    return graph.op(x.storage, back, x)


def groups_of(weights: Weights, memory: Memory, **of: Any) -> list[Group]:
    """A group of a module's weights, and one of its experts'; all are made before a part is taken of any."""
    listed = as_listed(weights)
    by_kind = [tuple(one for one in listed if one.is_expert == is_expert) for is_expert in (False, True)]
    dense, *experts = groups = [Group(memory, part, **of) for part in by_kind if part]
    for weight in listed:
        (experts[0] if weight.is_expert else dense).make(weight.name)
    for group in reversed(groups):
        group.share()
    return groups


Trained = tuple["Weight", Shard]
"""A weight that has a gradient, and what the rank has of it."""


def trained(weights: Weights, groups: Iterable[Group]) -> Iterator[Trained]:
    """Those of a module's weights, as it lists them; its groups hold them."""
    held = {name: (group.weights[name], shard) for group in groups for name, shard in group.shards.items()}
    return (held[weight.name] for weight in as_listed(weights) if weight.trains)


def as_listed(weights: Weights) -> Weights:
    """As modules have them: norms first, and each layer's matrix, bias and adapters together."""
    names = [weight.name for weight in weights]

    def place(weight: Any) -> tuple[bool, int]:
        layer = weight.name.split("_lora_")[0].removesuffix("_bias")
        return not layer.startswith("norm"), names.index(layer if layer in names else weight.name)

    return tuple(sorted(weights, key=place))

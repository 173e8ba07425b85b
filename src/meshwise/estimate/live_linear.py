"""Linear layers and the adapters beside them, as tensors that are nothing but their bytes.

A product is torch's, or one of our own where it is in fp8 or its matrix in few bits (`live_formats`). A
frozen matrix has no gradient, so nothing keeps the input for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from meshwise.estimate.live_formats import Products
from meshwise.estimate.live_tensors import Graph, Leaf, Memory, Storage, Tensor
from meshwise.model.architecture import Model
from meshwise.model.weights import Weight as WeightOfModel
from meshwise.model.weights import has_adapters
from meshwise.program.cut import Cut
from meshwise.program.fsdp2 import is_packed
from meshwise.program.held import ENDS

Weights = Mapping[str, "Weight"]


class Weight(Leaf):
    """The weight `of` a model as a tensor-parallel rank has it.

    `size`: bytes of its gradient; `made`: of what an op finds, which for an embedding cut by tp is of all
    words; `is_apart`: tp sums or cuts it before the replicas do. `itself`: what keeps it, of no bytes (its
    group has them).
    """

    def __init__(
        self, memory: Memory, of: WeightOfModel, size: float, made: float, num_uses: int, *, is_apart: bool
    ) -> None:
        super().__init__(memory, num_uses)
        self.of, self.size, self.made, self.is_apart = of, size, made, is_apart
        self.itself = memory.new(0.0)

    def alone(self) -> Weight:
        """The same as one that nothing else uses."""
        return Weight(self.memory, self.of, self.size, self.size, 1, is_apart=False)

    def take(self, grad: Storage, place: int) -> None:
        """A frozen one has no use for it."""
        if self.of.trains:
            super().take(grad, place)

    def summed(self, grads: list[Storage]) -> Storage:
        """Of a table's two uses, each cut as the table is; of uses that are alike, as they are."""
        if len({grad.size for grad in grads}) == 1:
            return super().summed(grads)
        cut = [grad if grad.size == self.size else self.memory.new(self.size) for grad in grads]
        return self.memory.new(cut[0].size)


class Linears:
    """The linear layers of a rank. `keep` makes results that torchtitan's selective checkpointing keeps.

    That is those of the first product of a block, the third, and so on: `num_products` counts them.
    """

    def __init__(self, model: Model, cut: Cut, graph: Graph, keep: Callable[[float], Storage] | None) -> None:
        self.model, self.cut, self.graph, self.keep = model, cut, graph, keep
        self.new, self.narrow = graph.memory.new, cut.precision.act_bytes
        self.num_products = 0

    def layer(self, weights: Weights, name: str, x: Tensor, size: float, *, adds_up: bool = False) -> Tensor:
        """A layer with its adapters; where tp `adds_up` what it gives, each rank has a part of the bias."""
        rank, a = self.cut.lora_rank, weights.get(f"{name}_lora_a")
        y = self._product(weights, name, x, size, adds_up=adds_up)
        if a is None:
            return y
        inner = x.size / a.size * rank**2 * self.narrow
        thin = self._product(
            weights, f"{name}_lora_b", self._product(weights, f"{name}_lora_a", x, inner), size
        )
        return self.graph.op(self.new(size), lambda grad: (grad, grad), y, thin)

    def _product(
        self, weights: Weights, name: str, x: Tensor, size: float, *, adds_up: bool = False
    ) -> Tensor:
        weight, bias = weights[name], weights.get(f"{name}_bias")
        keep = self.keep if self._is_kept(weight) else None
        part = partial(self.new, bias.size) if adds_up and bias is not None else lambda: None
        products = self._products(weight.of)
        if products is None:
            _part = part()
            return self._by_torch(weight, bias, x, size, keep)
        y = self._by(products, weight, x, size, partial(keep or self.new, size))
        if bias is None:
            return y
        _part = part()
        biases, sums = ((bias,), (bias.made,)) if bias.of.trains else ((), ())
        return self.graph.op(self.new(size), lambda grad: (grad,), y, *biases, sums=sums)

    def _is_kept(self, weight: Weight) -> bool:
        """Whether it is one of those, but for experts' and routers' matrices."""
        is_counted = self.keep is not None and not (weight.of.is_expert or weight.of.name == "router")
        self.num_products += is_counted
        return is_counted and self.num_products % 2 == 1

    def _by_torch(
        self, weight: Weight, bias: Weight | None, x: Tensor, size: float,
        keep: Callable[[float], Storage] | None,
    ) -> Tensor:  # fmt: skip
        """Gradients of input and matrix are made one by one, as they are wanted; a bias's behind them."""
        result, before = (keep or self.new)(size), x.size
        if not weight.of.trains:
            return self.graph.op(result, lambda *_: (self.new(before),), x, saved=(weight.itself,))
        biases, sums = ((), ()) if bias is None else ((bias,), (bias.made,))
        alone = partial(self.new, before), partial(self.new, weight.made)
        return self.graph.op(result, None, x, weight, *biases, saved=(x.storage,), sums=sums, alone=alone)

    def _products(self, of: WeightOfModel) -> Products | None:
        """How a matrix is multiplied that torch does not."""
        form = self.cut.narrow_matmuls if has_adapters(of) and not of.is_adapter else ""
        if of.module in ENDS:
            form = "fp8" if self.cut.head_dtype == "fp8" else ""
        is_few = is_packed(of, self.cut)
        return Products(self.graph.memory, form, is_few) if form or is_few else None

    def _by(
        self, products: Products, weight: Weight, x: Tensor, size: float, result: Callable[[], Storage]
    ) -> Tensor:
        """One of our own, whose result takes so many bytes."""
        sizes = x.size, weight.size, size
        alone = partial(products.gradient_of_input, *sizes), partial(products.gradient_of_matrix, *sizes)
        inputs, saved = (
            ((x, weight), (weight.itself, x.storage)) if weight.of.trains else ((x,), (weight.itself,))
        )
        return self.graph.op(products.multiplied(*sizes, result), None, *inputs, saved=saved, alone=alone)

"""The transformer block that all tensor layouts run, and a policy of the program `rl` on whole weights.

    x = x + out_proj(attention(qkv(norm1(x))))
    x = x + fc2(activation(fc1(norm2(x))))

What differs is which tokens and columns of x and which piece of each weight a rank holds (`layouts`), and so
over which axes the products, the norms and the attention work (`BlockParts`). A product says what a layout
makes of C = A B and its gradients; it keeps the rank's own blocks. `Gathered` serves one and three
dimensions, `Summa` two: a grid of columns x rows, in one or several depths (`program.grid`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import meshwise.runtime.programs.tensor_parallel.exchange as exchange
from meshwise.model.architecture import Layer, Model
from meshwise.model.weights import block_weights
from meshwise.runtime.programs.functions import Norm, SwiGLU
from meshwise.runtime.programs.tensor_parallel.exchange import ALONE, MeshAxis, start_gather, start_scatter
from meshwise.runtime.recorder import OpRecorder


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A is gathered over one axis, B over another, C scattered over the third, all by rows.

    The forward gives the rank's block of C + bias, the backward its blocks of dA and dB, and the dC whose
    rows sum to the bias's gradient.
    """

    a: MeshAxis
    b: MeshAxis
    c: MeshAxis

    def forward(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """The first rank of `c` adds the bias to its part of the sum."""
        left, right = start_gather(a, self.a)(), start_gather(b, self.b)()
        has_bias = bias is not None and self.c.index == 0
        product = torch.addmm(bias, left, right) if has_bias else torch.mm(left, right)
        return start_scatter(product, self.c)()

    def backward(self, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A comes beside dA's product, dA leaves beside dB's."""
        grad, right = start_gather(grad, self.c)(), start_gather(b, self.b)()
        gathering = start_gather(a, self.a)
        scattering = start_scatter(torch.mm(grad, right.t()), self.a)
        db = start_scatter(torch.mm(gathering().t(), grad), self.b)()
        return scattering(), db, grad


@dataclass(frozen=True, slots=True, eq=False)
class Summa:
    """SUMMA on a grid: `in_row` are the ranks of a rank's row, one per column; `in_column` those of its
    column.

    Each panel is on its way while the one before is multiplied. Each of several `depths` has the rows of its
    tokens, and they add up dB.
    """

    in_row: MeshAxis
    in_column: MeshAxis
    panels: int
    depths: MeshAxis

    def forward(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        """C = A B + bias: a [m, k / columns], b [k / rows, n] -> [m, n]; both operands travel."""
        c: Tensor | None = None
        panels = self._fetched(a, 1, self.in_row), self._fetched(b, 0, self.in_column)
        for left, right in zip(*panels, strict=True):
            if c is not None:
                c.addmm_(left, right)
            else:
                c = torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
        assert c is not None
        return c

    def backward(self, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dA = dC B', dB = A' dC: one operand travels, and the result."""
        panels = (torch.mm(grad, right.t()) for right in self._fetched(b, 0, self.in_column))
        da = self._delivered(panels, torch.empty_like(a), 1, self.in_row)
        panels = (torch.mm(left.t(), grad) for left in self._fetched(a, 1, self.in_row))
        db = self._delivered(panels, torch.empty_like(b), 0, self.in_column)
        return da, exchange.all_sum(db, self.depths), grad

    def _panel(self, x: Tensor, number: int, dim: int, along: MeshAxis) -> tuple[Tensor, int]:
        """Where panel `number` lies in the block x, cut in `dim` over `along`, and which rank owns it."""
        per_rank = self.panels // along.size
        return x.chunk(per_rank, dim)[number % per_rank], number // per_rank

    def _fetched(self, x: Tensor, dim: int, along: MeshAxis) -> Iterator[Tensor]:
        """All panels of the blocks x, one after the other, the next on its way while one is used."""
        coming = exchange.start_broadcast(*self._panel(x, 0, dim, along), along)
        for number in range(1, self.panels + 1):
            panel = coming()
            if number < self.panels:
                coming = exchange.start_broadcast(*self._panel(x, number, dim, along), along)
            yield panel

    def _delivered(self, panels: Iterator[Tensor], block: Tensor, dim: int, along: MeshAxis) -> Tensor:
        """`block`, filled with the sums of its panels, one on its way while the next is made."""
        going: list[tuple[int, exchange.Finish]] = []

        def put(number: int, finish: exchange.Finish) -> None:
            place, owner = self._panel(block, number, dim, along)
            panel = finish()
            if owner == along.index:
                place.copy_(panel)

        for number, panel in enumerate(panels):
            owner = self._panel(block, number, dim, along)[1]
            going.append((number, exchange.start_reduce(panel, owner, along)))
            if len(going) > 1:
                put(*going.pop(0))
        put(*going.pop())
        return block


DistributedProduct = Gathered | Summa
"""C = A B, each operand in blocks over the ranks."""


class DistributedLinear(torch.autograd.Function):
    """Y = X W + b of rows X; the sum for the bias's gradient is a row of its own in the ledger."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: DistributedProduct,
        recorder: OpRecorder, name: str,
    ) -> Tensor:  # fmt: skip
        """[rows, K] x [K, N] -> [rows, N], the rank's blocks of them."""
        ctx.product, ctx.recorder, ctx.name, ctx.has_bias = product, recorder, name, bias is not None
        ctx.save_for_backward(x, weight)
        return product.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        """dX = dY W', dW = X' dY."""
        x, weight = ctx.saved_tensors
        with ctx.recorder.op(ctx.name):
            dx, d_weight, whole = ctx.product.backward(grad, x, weight)
        d_bias = None
        if ctx.has_bias:
            with ctx.recorder.op(f"{ctx.name}_bias"):
                d_bias = whole.sum(0)
        return dx, d_weight, d_bias, None, None, None


Weights = Mapping[str, Tensor]
WHOLE = Gathered(ALONE, ALONE, ALONE)
"""A product of one rank."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BlockParts:
    """What a block of `model` is made of on one rank.

    `attend`: core attention of what the first matmul made of qkv. `into_pair` and `out_of_pair` are the
    products of the first matmul of a pair (qkv, fc1) and of the second. The rows of a norm are spread over
    `row_axis`.
    """

    model: Model
    recorder: OpRecorder
    attend: Callable[[Tensor], Tensor]
    into_pair: DistributedProduct = WHOLE
    out_of_pair: DistributedProduct = WHOLE
    row_axis: MeshAxis = ALONE

    def linear(self, x: Tensor, weights: Weights, name: str, product: DistributedProduct) -> Tensor:
        """The linear layer `name` of x [rows, K]."""
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        with self.recorder.op(name):
            return DistributedLinear.apply(x, weight, bias, product, self.recorder, name)

    def norm(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """The norm `name` of rows x."""
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        with self.recorder.op(name):
            is_centered = self.model.norm == "layernorm"
            return Norm.apply(x, weight, bias, is_centered, self.model.hidden, self.row_axis)


def block(on: BlockParts, x: Tensor, weights: Weights) -> Tensor:
    """One block; x is what the rank holds of it, [rows, columns]."""
    with on.recorder.section("attention"):
        y = on.norm(x, weights, "norm1")
        y = on.linear(y, weights, "qkv", on.into_pair)
        y = on.attend(y)
        y = on.linear(y, weights, "out_proj", on.out_of_pair)
        with on.recorder.op("residual1"):
            x = x + y
    with on.recorder.section("mlp"):
        y = on.norm(x, weights, "norm2")
        y = on.linear(y, weights, "fc1", on.into_pair)
        with on.recorder.op(on.model.activation):
            y = SwiGLU.apply(*y.chunk(2, -1)) if on.model.gated else F.gelu(y)
        y = on.linear(y, weights, "fc2", on.out_of_pair)
        with on.recorder.op("residual2"):
            return x + y


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The whole weights of a block, the layers that one matmul does side by side."""
    found: dict[str, tuple[int, ...]] = {}
    for weight in block_weights(model, Layer()):
        name = f"{weight.op}.{'bias' if weight.name.endswith('_bias') else 'weight'}"
        *rows, columns = weight.shape
        found[name] = (*rows, columns + found.get(name, (0,))[-1])
    return found

"""The transformer block that all tensor layouts run, and a policy of the program `rl` on whole weights.

    x = x + out_proj(attention(qkv(norm1(x))))
    x = x + fc2(activation(fc1(norm2(x))))

What differs is which tokens and columns of x and which piece of each weight a rank holds (`layouts`), and so
over which axes the products, the norms and the attention work (`BlockParts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from meshwise.model.architecture import Layer, Model
from meshwise.model.weights import block_weights
from meshwise.runtime.programs.functions import SwiGLU
from meshwise.runtime.programs.norm import Norm
from meshwise.runtime.programs.tensor_parallel.exchange import ALONE, MeshAxis
from meshwise.runtime.programs.tensor_parallel.product import DistributedProduct, Gathered, linear
from meshwise.runtime.recorder import OpRecorder

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
        y = linear(y, weights, "qkv", on.into_pair, on.recorder)
        y = on.attend(y)
        y = linear(y, weights, "out_proj", on.out_of_pair, on.recorder)
        with on.recorder.op("residual1"):
            x = x + y
    with on.recorder.section("mlp"):
        y = on.norm(x, weights, "norm2")
        y = linear(y, weights, "fc1", on.into_pair, on.recorder)
        with on.recorder.op(on.model.activation):
            y = SwiGLU.apply(*y.chunk(2, -1)) if on.model.gated else F.gelu(y)
        y = linear(y, weights, "fc2", on.out_of_pair, on.recorder)
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

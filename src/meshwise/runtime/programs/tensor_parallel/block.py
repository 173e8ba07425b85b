"""The transformer block that all tensor layouts run, and what a layout must say about itself.

    x = x + out_proj(attention(qkv(norm1(x))))
    x = x + fc2(activation(fc1(norm2(x))))

A `TensorLayout` decides which tokens and which columns of x a rank holds, which piece of each weight, and
over which axes the products, the norms and the attention work. The rest is the same in all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwise.model.architecture import Layer, Model
from meshwise.model.weights import block_weights
from meshwise.program.cut import Cut
from meshwise.runtime.programs.functions import SwiGLU
from meshwise.runtime.programs.norm import Norm
from meshwise.runtime.programs.tensor_parallel.attention import CutSequence, FusedAttention, LocalHeads
from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis, all_sum
from meshwise.runtime.programs.tensor_parallel.product import DistributedProduct, linear
from meshwise.runtime.programs.tensor_parallel.spans import Index, Spans, split

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context

Weights = Mapping[str, Tensor]
Pieces = dict[str, tuple[Index, ...]]
PAIRS = (("norm1", "qkv", "out_proj"), ("norm2", "fc1", "fc2"))
"""Norm, first and second matmul of attention and of the MLP."""


class TensorLayout(ABC):
    """One rank's part of a block of `model` under `cut`, on groups of `context`.

    `into_pair` and `out_of_pair` are the products of the first matmul of a pair (qkv, fc1) and of the
    second. The rows of a norm are spread over `row_axis`. `tokens` (of each sequence) and `columns` are those
    of x that the rank holds between the matmuls; `sequence` is that of its attention, `heads` what it has of
    the heads.
    """

    into_pair: DistributedProduct
    out_of_pair: DistributedProduct
    row_axis: MeshAxis | None = None
    tokens: Spans
    columns: Index
    sequence: CutSequence
    heads: LocalHeads

    def __init__(self, context: Context, model: Model, cut: Cut) -> None:
        self.context, self.model, self.cut = context, model, cut
        self.recorder = context.recorder
        self.batch, self.seq = int(cut.microbatch), int(cut.seq)

    def take_heads(self, sequence: CutSequence, *, parts: int) -> None:
        """1/`parts` of the heads over `sequence`."""
        self.sequence = sequence
        self.heads = LocalHeads(
            heads=self.model.num_heads // parts,
            kv_heads=self.model.num_kv_heads // parts,
            head_dim=self.model.head_dim,
            batch=self.batch,
            sequence=sequence,
            recorder=self.recorder,
        )

    def inner_columns(self, name: str, along: MeshAxis) -> list[Index]:
        """The columns of a first matrix (rows of a second) that each rank of `along` holds."""
        return split(sections(self.model)[name], along.size)

    @abstractmethod
    def pieces(self) -> Pieces:
        """The rank's piece of each weight: one index array per dim."""

    @abstractmethod
    def shared(self) -> list[tuple[list[str], MeshAxis]]:
        """Weights whose gradients are summed once a step, and the axis to sum them over, in this order."""

    def attend(self, qkv: Tensor) -> Tensor:
        """Core attention of what the first matmul made of qkv."""
        mixed: Tensor = FusedAttention.apply(qkv, self.heads)
        return mixed


def block(on: TensorLayout, x: Tensor, weights: Weights) -> Tensor:
    """One block; x is what the rank holds of it, [tokens x batch, columns], tokens outermost."""
    with on.recorder.section("attention"):
        y = _norm(on, x, weights, "norm1")
        y = linear(y, weights, "qkv", on.into_pair, on.recorder)
        y = on.attend(y)
        y = linear(y, weights, "out_proj", on.out_of_pair, on.recorder)
        x = _added(on, x, y, "residual1")
    with on.recorder.section("mlp"):
        y = _norm(on, x, weights, "norm2")
        y = linear(y, weights, "fc1", on.into_pair, on.recorder)
        y = _activated(on, y)
        y = linear(y, weights, "fc2", on.out_of_pair, on.recorder)
        return _added(on, x, y, "residual2")


def sum_shared_gradients(on: TensorLayout, weights: Weights) -> None:
    """Once a step: add up the gradients of weights that several ranks hold, one exchange per axis."""
    with on.recorder.section("block"), on.recorder.op("shared_gradients"), on.recorder.phase("step"):
        for names, along in on.shared():
            grads = [grad for name in names if (grad := weights[name].grad) is not None]
            if along.size == 1 or not grads:
                continue
            total = all_sum(torch.cat([grad.flatten() for grad in grads]), along)
            for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))


def _added(on: TensorLayout, x: Tensor, y: Tensor, name: str) -> Tensor:
    with on.recorder.op(name):
        return x + y


def _activated(on: TensorLayout, x: Tensor) -> Tensor:
    with on.recorder.op(on.model.activation):
        return SwiGLU.apply(*x.chunk(2, -1)) if on.model.gated else F.gelu(x)


def _norm(on: TensorLayout, x: Tensor, weights: Weights, name: str) -> Tensor:
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    with on.recorder.op(name):
        return Norm.apply(x, weight, bias, on.model.norm == "layernorm", on.model.hidden, on.row_axis)


# --- weights -----------------------------------------------------------------------------------


def sections(model: Model) -> dict[str, list[tuple[int, int]]]:
    """Columns of the first matrix of a pair, and rows of the second, as (units, width)."""
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    return {
        "qkv": [(heads, dim), (kv_heads, dim), (kv_heads, dim)],
        "out_proj": [(heads, dim)],
        "fc1": [(model.ffn_hidden, 1)] * (2 if model.gated else 1),
        "fc2": [(model.ffn_hidden, 1)],
    }


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The whole weights of a block, the layers that one matmul does side by side."""
    found: dict[str, tuple[int, ...]] = {}
    for weight in block_weights(model, Layer()):
        name = f"{weight.op}.{'bias' if weight.name.endswith('_bias') else 'weight'}"
        *rows, columns = weight.shape
        found[name] = (*rows, columns + found.get(name, (0,))[-1])
    return found


def with_vectors(model: Model, matrices: Pieces, norm_columns: Index) -> Pieces:
    """The pieces of `matrices`, of their biases, and of the norms."""
    pieces: Pieces = {}
    for name in shapes(model):
        owner, kind = name.split(".")
        if owner.startswith("norm"):
            pieces[name] = (norm_columns,)
        else:
            pieces[name] = matrices[owner] if kind == "weight" else matrices[owner][1:]
    return pieces


def everything(size: int) -> Index:
    """All of a dim."""
    return np.arange(size)

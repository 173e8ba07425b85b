"""The transformer block that all tensor layouts run, and what a layout must say about itself.

    x = x + dropout(out_proj(attention(qkv(norm1(x)))))
    x = x + dropout(fc2(activation(fc1(norm2(x)))))

A `Layout` decides which tokens and which columns of x a rank holds, which piece of each weight, and over
which axes the products, the norms and the attention work. The rest is the same in all of them.
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
from meshwise.runtime.programs.tensor_parallel.attention import (
    Heads,
    Sequence,
    Softmax,
    SplitHeads,
    core_attention,
    drop,
)
from meshwise.runtime.programs.tensor_parallel.exchange import Axis, all_sum
from meshwise.runtime.programs.tensor_parallel.product import OfActivations, Product, linear
from meshwise.runtime.programs.tensor_parallel.spans import Index, Spans, flat, split

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context

Weights = Mapping[str, Tensor]
Pieces = dict[str, tuple[Index, ...]]
PAIRS = (("norm1", "qkv", "out_proj"), ("norm2", "fc1", "fc2"))
"""Norm, first and second matmul of attention and of the MLP."""


class Layout(ABC):
    """One rank's part of a block of `model` under `cut`, on groups of `context`.

    `into_pair` and `out_of_pair` are the products of the first matmul of a pair (qkv, fc1) and of the
    second, `scores` and `mix` those of attention whose scores are split. The rows of a norm are spread over
    `row_axis`, those of the scores too. `tokens` (of each sequence) and `columns` are those of x that the
    rank holds between the matmuls; `sequence` is that of its attention, `heads` what it has of the heads.
    """

    into_pair: Product
    out_of_pair: Product
    scores: Product
    mix: Product
    row_axis: Axis | None = None
    tokens: Spans
    columns: Index
    sequence: Sequence
    heads: Heads

    def __init__(self, context: Context, model: Model, cut: Cut) -> None:
        self.context, self.model, self.cut = context, model, cut
        self.recorder = context.recorder
        self.batch, self.seq = int(cut.microbatch), int(cut.seq)

    def take_heads(self, sequence: Sequence, *, parts: int, width_parts: int) -> None:
        """1/`parts` of the heads over `sequence`, or 1/`width_parts` of each where scores are split."""
        model, splits_scores = self.model, self.cut.grid_scores
        self.sequence = sequence
        self.heads = Heads(
            heads=model.num_heads // (1 if splits_scores else parts),
            kv_heads=model.num_kv_heads // (1 if splits_scores else parts),
            head_dim=model.head_dim // (width_parts if splits_scores else 1),
            batch=self.batch,
            sequence=sequence,
            recorder=self.recorder,
            dropout_frac=model.dropout_frac,
        )

    def inner_columns(self, name: str, along: Axis) -> list[Index]:
        """The columns of a first matrix (rows of a second) that each rank of `along` holds."""
        within = self.cut.grid_scores and name in PAIRS[0]
        return split(sections(self.model)[name], along.size, within=within)

    @abstractmethod
    def pieces(self) -> Pieces:
        """The rank's piece of each weight: one index array per dim."""

    @abstractmethod
    def shared(self) -> list[tuple[list[str], Axis]]:
        """Weights whose gradients are summed once a step, and the axis to sum them over, in this order."""

    def score_tokens(self) -> tuple[Spans, Spans]:
        """Queries, of each head of a group in turn, and keys of the rank's scores, where those are split."""
        raise NotImplementedError

    def attend(self, qkv: Tensor) -> Tensor:
        """Core attention of what the first matmul made of qkv: with heads split, or with scores split."""
        if not self.cut.grid_scores:
            return core_attention(qkv, self.heads, is_fused=self.cut.flash)
        on, model, op = self.heads, self.model, self.recorder.op
        q, k, v = SplitHeads.apply(qkv, on)
        with op("logits"):  # the query heads that share a key head stand in one row of matrices
            scores = OfActivations.apply(q.view(k.shape[0], -1, on.head_dim), k, self.scores)
        rows, columns = self.score_tokens()
        with op("softmax"):
            spans, scale = (flat(rows), flat(columns)), model.head_dim**-0.5
            p = Softmax.apply(scores, scale, *spans, model.causal, self.row_axis)
        p = drop(p, "dropout_softmax", model.dropout_frac, self.recorder)
        with op("attend"):
            mixed = OfActivations.apply(p, v, self.mix).reshape(on.batch, on.heads, -1, on.head_dim)
            return mixed.permute(2, 0, 1, 3).reshape(-1, on.heads * on.head_dim)


def block(on: Layout, x: Tensor, weights: Weights) -> Tensor:
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


def sum_shared_gradients(on: Layout, weights: Weights) -> None:
    """Once a step: add up the gradients of weights that several ranks hold, one exchange per axis."""
    with on.recorder.section("block"), on.recorder.op("shared_gradients"), on.recorder.phase("step"):
        for names, along in on.shared():
            grads = [grad for name in names if (grad := weights[name].grad) is not None]
            if along.size == 1 or not grads:
                continue
            total = all_sum(torch.cat([grad.flatten() for grad in grads]), along)
            for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))


def _added(on: Layout, x: Tensor, y: Tensor, name: str) -> Tensor:
    y = drop(y, "dropout", on.model.dropout_frac, on.recorder)
    with on.recorder.op(name):
        return x + y


def _activated(on: Layout, x: Tensor) -> Tensor:
    with on.recorder.op(on.model.activation):
        return SwiGLU.apply(*x.chunk(2, -1)) if on.model.gated else F.gelu(x)


def _norm(on: Layout, x: Tensor, weights: Weights, name: str) -> Tensor:
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

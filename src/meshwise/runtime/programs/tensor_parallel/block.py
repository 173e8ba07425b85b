"""The transformer block that all tensor layouts run, and what a layout must say about itself.

    x = x + dropout(out_proj(attention(qkv(norm1(x)))))
    x = x + dropout(fc2(activation(fc1(norm2(x)))))

A `Layout` decides which tokens and which columns of x a rank holds, which piece of each weight, and how a
norm, the first and second matmul of a pair, and the attention work on them. The rest is local.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwise.model.architecture import Model
from meshwise.program.cut import Cut
from meshwise.runtime.programs.tensor_parallel.attention import drop
from meshwise.runtime.programs.tensor_parallel.exchange import Axis, all_sum
from meshwise.runtime.programs.tensor_parallel.kernels import (
    norm_apply,
    norm_backward,
    norm_gradient_sums,
    norm_scales_,
    norm_sums,
)
from meshwise.runtime.programs.tensor_parallel.spans import Index, Spans

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context

Weights = Mapping[str, Tensor]
Pieces = dict[str, tuple[Index, ...]]


class Layout(ABC):
    """One rank's part of a block of `model` under `cut`, on the groups of `context` (its `axes`)."""

    axes: list[Axis]

    def __init__(self, context: Context, model: Model, cut: Cut) -> None:
        self.context, self.model, self.cut = context, model, cut
        self.recorder = context.recorder
        self.batch, self.seq = int(cut.microbatch), int(cut.seq)

    @property
    @abstractmethod
    def tokens(self) -> Spans:
        """Tokens of each sequence that the rank holds between the matmuls."""

    @property
    @abstractmethod
    def columns(self) -> Index:
        """Columns of x that the rank holds between the matmuls."""

    @abstractmethod
    def pieces(self) -> Pieces:
        """The rank's piece of each weight: one index array per dim."""

    @abstractmethod
    def norm(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """The norm `name` of x."""

    @abstractmethod
    def first(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """The first matmul of a pair: qkv or fc1."""

    @abstractmethod
    def attend(self, qkv: Tensor) -> Tensor:
        """Core attention of what `first` made of qkv."""

    @abstractmethod
    def second(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """The second matmul of a pair: out_proj or fc2."""

    @abstractmethod
    def shared(self) -> list[tuple[list[str], Axis]]:
        """Weights whose gradients are summed once a step, and the axis to sum them over, in this order."""


def block(on: Layout, x: Tensor, weights: Weights) -> Tensor:
    """One block; x is what the rank holds of it, [tokens x batch, columns], tokens outermost."""
    with on.recorder.section("attention"):
        y = on.norm(x, weights, "norm1")
        y = on.first(y, weights, "qkv")
        y = on.attend(y)
        y = on.second(y, weights, "out_proj")
        x = _added(on, x, y, "residual1")
    with on.recorder.section("mlp"):
        y = on.norm(x, weights, "norm2")
        y = on.first(y, weights, "fc1")
        y = _activated(on, y)
        y = on.second(y, weights, "fc2")
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
        return SwiGLU.apply(x, on) if on.model.gated else F.gelu(x)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up of x = [gate, up]; keeps x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on: Layout) -> Tensor:
        """[rows, 2 f] -> [rows, f]."""
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Computes silu(gate) again."""
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        d_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return torch.cat([d_gate, grad * F.silu(gate)], dim=-1), None


class Norm(torch.autograd.Function):
    """LayerNorm (with a bias) or RMSNorm (without) of rows that may be spread over the ranks of an axis."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, on: Layout, name: str, along: Axis | None
    ) -> Tensor:
        """Keeps x, and 1 / deviation (and mean) of each row."""
        with on.recorder.op(name):
            scales = norm_sums(x, on.model.norm == "layernorm")
            if along is not None:
                all_sum(scales, along)
            norm_scales_(scales, on.model.hidden)
            y = norm_apply(x, scales, weight, bias)
        ctx.on, ctx.name, ctx.along, ctx.has_bias = on, name, along, bias is not None
        ctx.save_for_backward(x, scales, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        """One exchange of the sums that the gradient of x needs; the weights' are of the rank's tokens."""
        x, scales, weight = ctx.saved_tensors
        with ctx.on.recorder.op(ctx.name):
            sums = norm_gradient_sums(grad, x, scales, weight)
            if ctx.along is not None:
                all_sum(sums, ctx.along)
            dx, d_weight, d_bias = norm_backward(grad, x, scales, weight, sums, ctx.on.model.hidden)
        return dx, d_weight, d_bias if ctx.has_bias else None, None, None, None


def norm(on: Layout, x: Tensor, weights: Weights, name: str, along: Axis | None = None) -> Tensor:
    """The norm `name`, its rows spread over the axis `along`, if any."""
    return Norm.apply(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), on, name, along)


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
    """The whole weights of a block."""
    inner = {name: sum(units * width for units, width in parts) for name, parts in sections(model).items()}
    found: dict[str, tuple[int, ...]] = {}
    biases = {
        "qkv": model.qkv_bias,
        "out_proj": model.out_bias,
        "fc1": model.linear_bias,
        "fc2": model.linear_bias,
    }
    for norm_name, first, second in (("norm1", "qkv", "out_proj"), ("norm2", "fc1", "fc2")):
        found[f"{norm_name}.weight"] = (model.hidden,)
        if model.norm == "layernorm":
            found[f"{norm_name}.bias"] = (model.hidden,)
        for name, shape in ((first, (model.hidden, inner[first])), (second, (inner[second], model.hidden))):
            found[f"{name}.weight"] = shape
            if biases[name]:
                found[f"{name}.bias"] = shape[1:]
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

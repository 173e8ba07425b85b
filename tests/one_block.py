"""What every layout must equal: the block in one process, in the plainest form, in float64."""

from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

import meshwise.runtime.programs.tensor_parallel.block as tensor_parallel_block
from meshwise.model.architecture import Model
from meshwise.runtime.launch import RankPlace
from meshwise.runtime.programs import tensor_parallel
from meshwise.runtime.programs.context import Context
from meshwise.runtime.programs.functions import EPSILON
from meshwise.runtime.programs.tensor_parallel.block import Gathered, Weights, shapes
from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis
from meshwise.runtime.programs.tensor_parallel.layouts import TensorLayout
from meshwise.runtime.start import run_rank


def whole_weights(model: Model, context: Context, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """The block's weights, all of them random, the same on every rank."""
    found = {}
    for place, (name, shape) in enumerate(shapes(model).items()):
        std = shape[0] ** -0.5 if len(shape) == 2 else 0.1
        weight = context.normal(*shape, dtype=dtype, key=(seed, 1, place), std=std)
        found[name] = weight + 1 if name.startswith("norm") and name.endswith("weight") else weight
    return found


def whole_activations(on: TensorLayout, context: Context, dtype: torch.dtype, seed: int, nth: int) -> Tensor:
    """[seq, batch, hidden] random numbers, the same on every rank."""
    shape = on.heads.seq, on.heads.batch, on.parts.model.hidden
    return context.normal(*shape, dtype=dtype, key=(seed, 2, nth))


Index = NDArray[np.int64]
"""Columns of a matrix, since a rank's part of a fused projection lies scattered in the whole."""


def part(whole: Index, along: MeshAxis) -> Index:
    """This rank's equal part of `whole`, cut over the ranks of an axis."""
    return np.split(whole, along.size)[along.index]


def my_part(on: TensorLayout, whole: Tensor) -> Tensor:
    """What the rank holds of [seq, batch, hidden] between the matmuls: [tokens x batch, columns]."""
    tokens = np.concatenate([np.arange(begin, end) for begin, end in on.heads.spans])
    if isinstance(on.parts.into_pair, Gathered):
        tokens = part(tokens, on.parts.into_pair.a)
    columns = part(np.arange(whole.shape[2]), on.parts.row_axis)
    return whole[tokens][:, :, columns].flatten(0, 1)


def my_pieces(on: TensorLayout, whole: Weights) -> dict[str, Tensor]:
    """What the rank holds of each weight."""
    product, pieces = on.parts.into_pair, {}
    own = part(np.arange(on.parts.model.hidden), on.parts.row_axis)
    for name, weight in whole.items():
        owner, _, kind = name.partition(".")
        index: tuple[Index, ...] = (own,)
        if not owner.startswith("norm"):
            is_first, is_cube = owner in ("qkv", "fc1"), isinstance(product, Gathered)
            row, over = (product.a, product.b) if is_cube else (product.in_row, product.in_column)
            inner = inner_columns(on.parts.model, owner, row)
            mine = inner[row.index]
            # on a grid the rows of a matrix are in the order in which a row of ranks holds them
            wide = own if is_cube else np.arange(on.parts.model.hidden)
            rows = wide if is_first else mine if is_cube else np.concatenate(inner)
            index = part(rows, over), mine if is_first else own
        for dim, place in enumerate(index if kind == "weight" else index[-1:]):
            weight = weight.index_select(dim, torch.from_numpy(place))
        assert weight.shape == on.shapes[name]
        pieces[name] = weight
    return pieces


def inner_columns(model: Model, name: str, along: MeshAxis) -> list[Index]:
    """The columns of a first matrix (rows of a second) that each rank of `along` holds.

    A matrix is fused of sections of (units, width), heads and their size; a rank has its share of the units
    of every section.
    """
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    sections = {
        "qkv": [(heads, dim), (kv_heads, dim), (kv_heads, dim)],
        "out_proj": [(heads, dim)],
        "fc1": [(model.ffn_hidden, 1)] * (1 + model.gated),
        "fc2": [(model.ffn_hidden, 1)],
    }
    parts: list[list[Index]] = [[] for _ in range(along.size)]
    start = 0
    for units, width in sections[name]:
        pieces = np.split(np.arange(start, start + units * width), along.size)
        for own, piece in zip(parts, pieces, strict=True):
            own.append(piece)
        start += units * width
    return [np.concatenate(own) for own in parts]


def plain_block(model: Model, x: Tensor, w: Weights) -> Tensor:
    """The block on [seq, batch, hidden]."""
    seq, batch, _ = x.shape
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    qkv = _linear(_norm(x, w, "norm1"), w, "qkv").view(seq, batch, -1, dim).permute(1, 2, 0, 3)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=model.causal, enable_gqa=True)
    mixed = mixed.permute(2, 0, 1, 3).flatten(2)
    x = x + _linear(mixed, w, "out_proj")
    y = _linear(_norm(x, w, "norm2"), w, "fc1")
    if model.gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    else:
        y = F.gelu(y)
    return x + _linear(y, w, "fc2")


def _norm(x: Tensor, w: Weights, name: str) -> Tensor:
    if f"{name}.bias" in w:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], EPSILON)
    return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], EPSILON)


def _linear(x: Tensor, w: Weights, name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"].t(), w.get(f"{name}.bias"))


def differences(place: RankPlace, options: Any) -> dict[str, float]:
    """How far, on this rank, output and gradients of tensor-parallel are from one process in float64."""
    seen: dict[str, Any] = {}

    def inputs(options: Any, on: TensorLayout, context: Context) -> Any:
        dtype, seed = context.dtype(options.dtype), options.seed
        whole = whole_weights(on.parts.model, context, dtype, seed)
        x, grad = (whole_activations(on, context, dtype, seed, nth) for nth in (0, 1))
        seen.update(on=on, whole=whole, whole_x=x, whole_dy=grad)
        weights = {name: weight.requires_grad_() for name, weight in my_pieces(on, whole).items()}
        return my_part(on, x).requires_grad_(), my_part(on, grad), weights

    def watched(on: Any, x: Tensor, weights: Weights) -> Tensor:
        seen.update(x=x, weights=weights, y=block(on, x, weights))
        return seen["y"]

    block = tensor_parallel_block.block
    with (
        mock.patch.object(tensor_parallel, "make_inputs", inputs),
        mock.patch.object(tensor_parallel_block, "block", watched),
    ):
        run_rank(place, "tensor-parallel", options, quiet=True, recorded=False)
    on, leaves = seen["on"], {name: w.double().requires_grad_() for name, w in seen["whole"].items()}
    whole_x = seen["whole_x"].double().requires_grad_()
    expected = plain_block(on.parts.model, whole_x, leaves)
    expected.backward(seen["whole_dy"].double())
    grads = my_pieces(on, {name: _grad(leaf) for name, leaf in leaves.items()})
    pairs = {"output": (seen["y"], my_part(on, expected))}
    pairs |= {"d input": (_grad(seen["x"]), my_part(on, _grad(whole_x)))}
    pairs |= {f"d {name}": (_grad(weight), grads[name]) for name, weight in seen["weights"].items()}
    return {
        name: float((one.detach().double() - other.detach()).abs().max())
        for name, (one, other) in pairs.items()
    }


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad

"""What every layout must equal: the block in one process, in the plainest form, in float64."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwise.model.architecture import Model
from meshwise.runtime.programs.context import Context
from meshwise.runtime.programs.functions import EPSILON
from meshwise.runtime.programs.tensor_parallel.block import Weights, shapes
from meshwise.runtime.programs.tensor_parallel.layouts import TensorLayout


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


def my_part(on: TensorLayout, whole: Tensor) -> Tensor:
    """What the rank holds of [seq, batch, hidden] between the matmuls: [tokens x batch, columns]."""
    return whole[on.tokens][:, :, on.columns].flatten(0, 1)


def my_pieces(on: TensorLayout, whole: Weights) -> dict[str, Tensor]:
    """What the rank holds of each weight."""
    pieces = {}
    for name, indices in on.pieces.items():
        piece = whole[name]
        for dim, index in enumerate(indices):
            piece = piece.index_select(dim, torch.from_numpy(index).to(piece.device))
        pieces[name] = piece
    return pieces


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


def differences(
    on: TensorLayout, context: Context, x: Tensor, y: Tensor, weights: Weights, seed: int
) -> dict[str, float]:
    """Largest difference, on any rank, of the output and of every gradient to those of one process."""
    whole = whole_weights(on.parts.model, context, y.dtype, seed)
    whole_x, whole_dy = (whole_activations(on, context, y.dtype, seed, place).double() for place in (0, 1))
    with torch.enable_grad():
        whole_x.requires_grad_()
        leaves = {name: weight.double().requires_grad_() for name, weight in whole.items()}
        expected = plain_block(on.parts.model, whole_x, leaves)
        expected.backward(whole_dy)
    grads = my_pieces(on, {name: _grad(leaf) for name, leaf in leaves.items()})
    pairs = {"output": (y, my_part(on, expected)), "d input": (_grad(x), my_part(on, _grad(whole_x)))}
    pairs |= {f"d {name}": (_grad(weight), grads[name]) for name, weight in weights.items()}
    found = {}
    for name, (one, other) in pairs.items():
        difference = (one.detach().double() - other.detach()).abs().max()
        for group in context.groups:
            dist.all_reduce(difference, op=dist.ReduceOp.MAX, group=group)
        found[name] = float(difference)
    return found


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad

"""A Llama-shaped decoder, plain; how it is cut over ranks is applied from outside.

Tensor parallelism (DTensor): q, k, v, gate and up are cut by columns, out and down by rows, the embedding
and the head by vocabulary; norms and residuals run on a part of the sequence each. Data parallelism: FSDP2
per block and for the rest, or replicas whose gradients are all-reduced.

Source: the tensor-parallel tutorial and `fully_shard` of PyTorch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from meshwise.model import Model
from meshwise.programs.functions import FlashAttention

if TYPE_CHECKING:
    from meshwise.programs.context import Recorder


class Attention(nn.Module):
    """Grouped-query causal attention; local heads are what the projections leave."""

    def __init__(self, model: Model, angles: Tensor) -> None:
        super().__init__()
        self.head_dim, self.angles = model.head_dim, angles
        wide, narrow = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self.q = nn.Linear(model.hidden, wide, bias=False)
        self.k = nn.Linear(model.hidden, narrow, bias=False)
        self.v = nn.Linear(model.hidden, narrow, bias=False)
        self.out = nn.Linear(wide, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same."""
        batch, seq, _ = x.shape
        q, k, v = (
            proj(x).view(batch, seq, -1, self.head_dim).transpose(1, 2) for proj in (self.q, self.k, self.v)
        )
        q, k = rotate(q, self.angles), rotate(k, self.angles)
        groups = q.shape[1] // k.shape[1]
        k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
        out = FlashAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), True)
        return self.out(out.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn_hidden, bias=False)
        self.up = nn.Linear(model.hidden, model.ffn_hidden, bias=False)
        self.down = nn.Linear(model.ffn_hidden, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, model: Model, angles: Tensor, recorder: Recorder) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(model.hidden), Norm(model.hidden)
        self.attention, self.mlp = Attention(model, angles), FeedForward(model)
        self._recorder = recorder

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> the same."""
        with self._recorder.section("attention"):
            x = x + self.attention(self.norm1(x))
        with self._recorder.section("mlp"):
            return x + self.mlp(self.norm2(x))


class Norm(nn.Module):
    """Root-mean-square norm, in elementary ops: the same on every device."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * self.weight


class Decoder(nn.Module):
    """Embedding, blocks, norm, head: token numbers to logits."""

    def __init__(self, model: Model, seq: int, recorder: Recorder) -> None:
        super().__init__()
        angles = rotary_angles(model.head_dim, seq)
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        self.layers = nn.ModuleList(Block(model, angles, recorder) for _ in range(model.num_layers))
        self.norm = Norm(model.hidden)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        self._recorder = recorder

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, seq] -> [batch, seq, vocab]."""
        with self._recorder.section("embedding"):
            x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        with self._recorder.section("head"):
            return self.head(self.norm(x))


def rotary_angles(head_dim: int, seq: int) -> Tensor:
    """[seq, head_dim / 2] angles of the rotary embedding, base 10,000."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return torch.outer(torch.arange(seq), frequencies)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of [batch, heads, seq, head_dim], halves paired."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def cut_tensors(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism over `mesh`, in place."""
    rows = Shard(1)
    parallelize_module(
        decoder,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=rows, use_local_output=False),
        },
    )
    gather: dict[str, Any] = {
        "input_layouts": (rows,),
        "desired_input_layouts": (Replicate(),),
    }
    for layer in decoder.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "norm1": SequenceParallel(),
                "attention": PrepareModuleInput(**gather),
                **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
                "attention.out": RowwiseParallel(output_layouts=rows),
                "norm2": SequenceParallel(),
                "mlp": PrepareModuleInput(**gather),
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(output_layouts=rows),
            },
        )


def shard_states(decoder: Decoder, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """FSDP2 over `mesh`: each block, then the rest; computes in `dtype`, keeps and reduces in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(decoder, mesh=mesh, mp_policy=policy)


def local_bytes(tensors: list[Tensor]) -> int:
    """Bytes that this rank holds of `tensors`."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)

"""Attention over a sequence that is spread over the ranks of a ring: torch's context parallelism.

`torch.distributed.tensor.experimental` passes keys and values round the ring and merges the blocks'
outputs. It knows torch's own attention kernels on GPUs; here the same templates call
`meshwise::attention`, which runs everywhere and keeps what it says it keeps.

Under a causal mask each rank holds an early and a late part of the sequence (torch's head-tail balance), so
that all work alike. Source: arXiv 2310.01889; torch/distributed/tensor/experimental/_context_parallel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.runtime.programs.attention_kernels import attention, attention_backward
from meshwise.runtime.torch_private import ring_attention

ALL_AT_ONCE = "all_gather"
"""The `cp_kind` of a `Plan` in which keys and values come all at once, else a hop at a time."""


def own_places(seq: int, ranks: int, rank: int, device: torch.device) -> Tensor:
    """The tokens of a sequence that `rank` of a ring holds: one part from its front, one from its back."""
    if ranks == 1:
        return torch.arange(seq, device=device)
    parts = torch.arange(seq, device=device).chunk(2 * ranks)
    return torch.cat([parts[rank], parts[2 * ranks - 1 - rank]])


class RingAttend(torch.autograd.Function):
    """Causal attention of a rank's queries to the keys of all ranks; keeps what `Attend` keeps."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, kind: str) -> Tensor:
        """[batch, heads, own tokens, width] -> [batch, own tokens, heads, width]."""
        with _options(q, kind):
            out, lse = ring_attention._templated_ring_attention(
                group, 2, attention, q, k, v, query_spans=[], is_causal=True
            )
        out = out.transpose(1, 2).contiguous()
        ctx.group, ctx.kind = group, kind
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Keys and values come round again, and their gradients after them."""
        q, k, v, out, lse = ctx.saved_tensors

        def op(*, logsumexp: Tensor, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
            return attention_backward(lse=logsumexp, query_spans=[], **named)

        with _options(q, ctx.kind):
            dq, dk, dv = ring_attention._templated_ring_attention_backward(
                ctx.group, 2, op, grad.transpose(1, 2), "grad", q, k, v, out.transpose(1, 2), lse, True
            )
        return dq, dk, dv, None, None


def _options(q: Tensor, kind: str) -> AbstractContextManager[Any]:
    """torch's options of context parallelism, for this call."""
    method = ring_attention._RotateMethod
    return mock.patch.multiple(
        ring_attention._cp_options,
        convert_to_f32=q.dtype != torch.float64,
        enable_load_balance=True,
        rotate_method=method.ALL_GATHER if kind == ALL_AT_ONCE else method.ALL_TO_ALL,
    )

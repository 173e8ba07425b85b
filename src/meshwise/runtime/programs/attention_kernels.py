"""Attention and its backward, each an op of its own in a ledger: fused, and the softmax of scores in memory.

Tensors are [batch, heads, tokens, head size]. Row statistics are fp32 (fp64 for fp64 inputs).

Over a sequence that is spread over the ranks of a ring, torch's context parallelism
(`torch.distributed.tensor.experimental`) passes keys and values round and merges the blocks' outputs. It
knows torch's own attention kernels on GPUs; here the same templates call `meshwise::attention`, which runs
everywhere and keeps what it says it keeps. Under a causal mask each rank holds an early and a late part of
the sequence (torch's head-tail balance), so that all work alike. Source: arXiv 2310.01889;
torch/distributed/tensor/experimental/_context_parallel.
"""

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import pad

from meshwise.core.errors import MissingExtraError
from meshwise.runtime import torch_private as private

aten = torch.ops.aten


def flash_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Fused attention: output, and log-sum-exp per query in fp32 (fp64 inputs: fp64).

    Kernels want values as wide as keys: narrower ones are padded with zeros inside.
    """
    width = value.shape[3]
    value = pad(value, (0, key.shape[3] - width))
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)
    else:
        if query.dtype not in (torch.bfloat16, torch.float16):
            raise MissingExtraError("flash attention on a GPU takes bf16 or fp16; choose --dtype bf16")
        out, lse = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[:2]
    return out[..., :width].contiguous(), lse.contiguous()


def flash_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; `out` and `lse` may be those of a longer attention that this block is part of."""
    width = value.shape[3]
    value, out, grad = (pad(x, (0, key.shape[3] - width)) for x in (value, out, grad))
    if query.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, is_causal
        )
    else:
        sizes = query.shape[2], key.shape[2]
        none = torch.empty(0, dtype=torch.uint64, device=query.device)
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse, None, None, *sizes, 0.0, is_causal, none, none
        )
    return grads[0].contiguous(), grads[1].contiguous(), grads[2][..., :width].contiguous()


def empty_lse(query: Tensor) -> Tensor:
    """Memory of one log-sum-exp for each row of `query` [batch, heads, tokens, head size]."""
    return query.new_empty(query.shape[:3], dtype=wide_dtype(query.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are computed in where operands are `dtype`: fp32, or fp64 of fp64."""
    return torch.promote_types(dtype, torch.float32)


def merge_attention_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Take one more block of keys into `out` and `lse`: each output weighs as much as its softmax sum."""
    both = torch.logaddexp(lse, block_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1))
    out.addcmul_(block_out.to(out.dtype), (block_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


@custom_op("meshwise::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, query_spans: list[int], is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Fused attention of the tokens in `query_spans` (empty: all) to the whole sequence: output, log-sum-exp.

    Fewer key than query heads are shared by as many query heads each. A causal span sees all keys before
    it and, itself, those up to its diagonal: two calls of the kernel, merged by their log-sum-exp. The
    output lies in memory as the queries do, as the projection after it reads it.
    """
    out, lse = _empty_output(query, value), empty_lse(query)
    key, value = (_repeated(x, query.shape[1]) for x in (key, value))
    for rows, blocks in _blocks(query_spans, query, key, is_causal):
        parts = [
            flash_attention(query[:, :, rows], key[:, :, keys], value[:, :, keys], diagonal)
            for keys, diagonal in blocks
        ]
        total, total_lse = parts[0]
        for part in parts[1:]:
            total = total.to(lse.dtype)
            merge_attention_(total, total_lse, *part)
        out[:, :, rows], lse[:, :, rows] = total, total_lse
    return out, lse


attention.register_fake(lambda query, key, value, *_: (_empty_output(query, value), empty_lse(query)))


@custom_op("meshwise::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, query_spans: list[int],
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value; a key head's is the sum over the query heads that share it."""
    kv_heads = key.shape[1]
    key, value = (_repeated(x, query.shape[1]) for x in (key, value))
    if len(query_spans) <= 2 and key.shape[2] == query.shape[2]:  # one block
        saved = out.contiguous(), lse.contiguous()
        dq, dk, dv = flash_attention_backward(grad.contiguous(), query, key, value, *saved, is_causal)
    else:
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value))
        for rows, blocks in _blocks(query_spans, query, key, is_causal):
            known = (out[:, :, rows].contiguous(), lse[:, :, rows].contiguous())
            for keys, diagonal in blocks:
                seen = query[:, :, rows], key[:, :, keys], value[:, :, keys]
                grads = flash_attention_backward(grad[:, :, rows].contiguous(), *seen, *known, diagonal)
                dq[:, :, rows] += grads[0]
                dk[:, :, keys] += grads[1]
                dv[:, :, keys] += grads[2]
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


attention_backward.register_fake(
    lambda _, query, key, value, *rest: tuple(of.new_empty(of.shape) for of in (query, key, value))
)


def _empty_output(query: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(query[..., : value.shape[3]])


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _blocks(
    spans: list[int], query: Tensor, key: Tensor, is_causal: bool
) -> list[tuple[slice, list[tuple[slice, bool]]]]:
    """Per span, its rows among the queries and the blocks of keys it sees (True: only below the diagonal)."""
    rows, done = [], 0
    spans = spans or [0, query.shape[2]]
    for begin, end in zip(spans[::2], spans[1::2], strict=True):
        blocks = [(slice(begin, end), True)] if is_causal else [(slice(0, key.shape[2]), False)]
        if is_causal and begin:
            blocks.append((slice(0, begin), False))
        rows.append((slice(done, done + end - begin), blocks))
        done += end - begin
    return rows


class Attend(torch.autograd.Function):
    """Fused attention with its backward; keeps q, k, v, the output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        """[batch, heads, tokens, width] -> [batch, tokens, heads, width]."""
        out, lse = attention(q, k, v, [], is_causal)
        ctx.is_causal = is_causal
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Recomputes the scores from log-sum-exp."""
        return *attention_backward(grad.transpose(1, 2), *ctx.saved_tensors, [], ctx.is_causal), None


_MASK_BLOCK = 1024


@custom_op("meshwise::softmax_", mutates_args={"scores"})
def softmax_(scores: Tensor, scale: float, is_causal: bool) -> None:
    """Softmax of `scale * scores` over the last dim, in place; `is_causal` masks above the diagonal."""
    scores.mul_(scale)
    if is_causal:
        places = torch.arange(scores.shape[-1], device=scores.device)
        for own, rows in zip(places.split(_MASK_BLOCK), scores.split(_MASK_BLOCK, dim=-2), strict=True):
            rows.masked_fill_(places > own.unsqueeze(1), float("-inf"))
    aten._softmax.out(scores, -1, False, out=scores)


@custom_op("meshwise::softmax_backward_", mutates_args={"grad"})
def softmax_backward_(grad: Tensor, probabilities: Tensor, scale: float) -> None:
    """Gradient of `softmax_`, in place of the gradient of its result."""
    aten._softmax_backward_data.out(grad, probabilities, -1, grad.dtype, grad_input=grad)
    grad.mul_(scale)


class SoftmaxInPlace(torch.autograd.Function):
    """Softmax of scaled scores, under a causal mask perhaps, in their place; keeps its result."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float, is_causal: bool) -> Tensor:
        """[heads, tokens, tokens] -> the same."""
        softmax_(scores, scale, is_causal)
        ctx.scale = scale
        ctx.mark_dirty(scores)
        ctx.save_for_backward(scores)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """In place of the gradient, which nobody else reads."""
        softmax_backward_(grad, ctx.saved_tensors[0], ctx.scale)
        return grad, None, None


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
            out, lse = private.ring_attention._templated_ring_attention(
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
            dq, dk, dv = private.ring_attention._templated_ring_attention_backward(
                ctx.group, 2, op, grad.transpose(1, 2), "grad", q, k, v, out.transpose(1, 2), lse, True
            )
        return dq, dk, dv, None, None


def _options(q: Tensor, kind: str) -> AbstractContextManager[Any]:
    """torch's options of context parallelism, for this call."""
    method = private.ring_attention._RotateMethod
    return mock.patch.multiple(
        private.ring_attention._cp_options,
        convert_to_f32=q.dtype != torch.float64,
        enable_load_balance=True,
        rotate_method=method.ALL_GATHER if kind == ALL_AT_ONCE else method.ALL_TO_ALL,
    )

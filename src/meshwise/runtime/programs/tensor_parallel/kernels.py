"""The local kernels of attention, each an op of its own in a ledger: softmax in steps, fused attention.

Where rows are spread over ranks, sums are exchanged between the steps of softmax. Row statistics are fp32
(fp64 for fp64 inputs). Attention tensors are [batch, heads, tokens, head size].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from meshwise.runtime.programs.functions import (
    empty_gradients,
    empty_lse,
    flash_attention,
    flash_attention_backward,
    lse_dtype,
    merge_attention_,
)

# --- softmax -----------------------------------------------------------------------------------


@custom_op("meshwise::scale_and_mask_", mutates_args={"scores"})
def scale_and_mask_(
    scores: Tensor, scale: float, row_spans: list[int], column_spans: list[int], is_causal: bool
) -> Tensor:
    """Scores [batch, rows, columns] times `scale`, masked in place; returns each row's maximum.

    The spans say which tokens the rows and columns are: begin, end, begin, end, ...
    """
    scores.mul_(scale)
    if is_causal:
        rows, columns = (_positions(spans, scores.device) for spans in (row_spans, column_spans))
        scores.masked_fill_(columns[None, :] > rows[:, None], float("-inf"))
    return scores.amax(-1).to(lse_dtype(scores))


scale_and_mask_.register_fake(lambda scores, *_: scores.new_empty(scores.shape[:-1], dtype=lse_dtype(scores)))


@custom_op("meshwise::exponentials_", mutates_args={"scores"})
def exponentials_(scores: Tensor, maxima: Tensor) -> Tensor:
    """exp(score - maximum) in place; returns each row's sum."""
    wide = (scores.to(maxima.dtype) - maxima[..., None]).exp_()
    scores.copy_(wide)
    return wide.sum(-1)


exponentials_.register_fake(lambda scores, maxima: torch.empty_like(maxima))


@custom_op("meshwise::divide_rows_", mutates_args={"scores"})
def divide_rows_(scores: Tensor, sums: Tensor) -> None:
    """Each row over its sum, in place."""
    scores.div_(sums[..., None])


@custom_op("meshwise::row_products", mutates_args=())
def row_products(grad: Tensor, probabilities: Tensor) -> Tensor:
    """Each row's sum of gradient times probability."""
    return (grad.to(lse_dtype(grad)) * probabilities).sum(-1)


row_products.register_fake(lambda grad, *_: grad.new_empty(grad.shape[:-1], dtype=lse_dtype(grad)))


@custom_op("meshwise::scores_backward_", mutates_args={"grad"})
def scores_backward_(grad: Tensor, probabilities: Tensor, products: Tensor, scale: float) -> None:
    """Gradient of the scores, in place of that of the probabilities."""
    grad.copy_((grad.to(products.dtype) - products[..., None]) * probabilities * scale)


def _positions(spans: list[int], device: torch.device) -> Tensor:
    pairs = zip(spans[::2], spans[1::2], strict=True)
    return torch.cat([torch.arange(begin, end, device=device) for begin, end in pairs])


# --- fused attention ---------------------------------------------------------------------------


@custom_op("meshwise::span_attention", mutates_args=())
def span_attention(
    query: Tensor, key: Tensor, value: Tensor, query_spans: list[int], is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Fused attention of the tokens in `query_spans` to the whole sequence: output and log-sum-exp.

    Fewer key than query heads are shared by as many query heads each. A causal span sees all keys before
    it and, itself, those up to its diagonal: two calls of the kernel, merged by their log-sum-exp. The
    output lies in memory as [tokens, batch, heads, head size], as the projection after it reads it.
    """
    out, lse = _empty_output(query, value), empty_lse(query)
    key, value = (_repeated(x, query.shape[1]) for x in (key, value))
    for rows, blocks in _blocks(query_spans, key.shape[2], is_causal):
        parts = [
            flash_attention(query[:, :, rows], key[:, :, keys], value[:, :, keys], diagonal)
            for keys, diagonal in blocks
        ]
        total, total_lse = parts[0][0].to(lse.dtype), parts[0][1]
        for part in parts[1:]:
            merge_attention_(total, total_lse, *part)
        out[:, :, rows], lse[:, :, rows] = total, total_lse
    return out, lse


span_attention.register_fake(lambda query, key, value, *_: (_empty_output(query, value), empty_lse(query)))


@custom_op("meshwise::span_attention_backward", mutates_args=())
def span_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, query_spans: list[int],
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    kv_heads = key.shape[1]
    key, value = (_repeated(x, query.shape[1]) for x in (key, value))
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value))
    for rows, blocks in _blocks(query_spans, key.shape[2], is_causal):
        known = (out[:, :, rows].contiguous(), lse[:, :, rows].contiguous())
        for keys, diagonal in blocks:
            grads = flash_attention_backward(
                grad[:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys], *known, diagonal
            )
            dq[:, :, rows] += grads[0]
            dk[:, :, keys] += grads[1]
            dv[:, :, keys] += grads[2]
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


span_attention_backward.register_fake(empty_gradients)


def _empty_output(query: Tensor, value: Tensor) -> Tensor:
    batch, heads, tokens = query.shape[:3]
    return query.new_empty(tokens, batch, heads, value.shape[3]).permute(1, 2, 0, 3)


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _blocks(spans: list[int], num_keys: int, is_causal: bool) -> list[tuple[slice, list[tuple[slice, bool]]]]:
    """Per span, its rows among the queries and the blocks of keys it sees (True: only below the diagonal)."""
    rows, done = [], 0
    for begin, end in zip(spans[::2], spans[1::2], strict=True):
        blocks = [(slice(begin, end), True)] if is_causal else [(slice(0, num_keys), False)]
        if is_causal and begin:
            blocks.append((slice(0, begin), False))
        rows.append((slice(done, done + end - begin), blocks))
        done += end - begin
    return rows

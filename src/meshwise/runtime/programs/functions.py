"""The differentiable pieces that the sequence-parallel programs share.

Where torch's own ops would hide memory or pick a kernel by device, the piece is an op of its own
(`meshwise::...`), one row in a ledger: the same on a CPU, a GPU, and a fake device. The kernels inside are
torch's. Attention tensors are [batch, heads, tokens, head size].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import gelu, silu

from meshwise.runtime.programs.attention_kernels import (
    flash_attention,
    flash_attention_backward,
    merge_attention_,
)

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]
aten = torch.ops.aten
_MASK_BLOCK = 1024


# --- attention with the score matrix in memory -------------------------------------------------


@custom_op("meshwise::softmax_", mutates_args={"scores"})
def softmax_(scores: Tensor, scale: float, is_causal: bool) -> None:
    """Softmax of `scale * scores` over the last dim, in place; `is_causal` masks above the diagonal."""
    scores.mul_(scale)
    if is_causal:
        rows, columns = scores.shape[-2:]
        for begin in range(0, rows, _MASK_BLOCK):
            end = min(begin + _MASK_BLOCK, rows)
            scores[..., begin:end, end:columns].fill_(float("-inf"))
            size = end - begin
            above = torch.ones(size, size, dtype=torch.bool, device=scores.device).triu(1)
            scores[..., begin:end, begin:end].masked_fill_(above, float("-inf"))
    aten._softmax.out(scores, -1, False, out=scores)


@custom_op("meshwise::softmax_backward_", mutates_args={"grad"})
def softmax_backward_(grad: Tensor, probabilities: Tensor, scale: float) -> None:
    """Gradient of `softmax_`, in place of the gradient of its result."""
    aten._softmax_backward_data.out(grad, probabilities, -1, grad.dtype, grad_input=grad)
    grad.mul_(scale)


class Scores(torch.autograd.Function):
    """A = softmax(q k^T / sqrt(d)) of [heads, tokens, d] tensors: one matrix, kept for the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
        """[heads, N, d] x 2 -> [heads, N, N]."""
        ctx.scale = q.shape[-1] ** -0.5
        scores = torch.bmm(q, k.transpose(1, 2))
        softmax_(scores, ctx.scale, is_causal)
        ctx.save_for_backward(q, k, scores)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Works inside `grad`: the product with v is the only one to read A, so nobody else holds it."""
        q, k, probabilities = ctx.saved_tensors
        softmax_backward_(grad, probabilities, ctx.scale)
        return torch.bmm(grad, k), torch.bmm(grad.transpose(1, 2), q), None


# --- attention over a ring of ranks ------------------------------------------------------------


class RingAttention(torch.autograd.Function):
    """Fused attention whose keys and values are spread over `group`: each rank's travel once around the ring.

    Rank r holds the r-th part of the sequence. Under a causal mask a rank skips the parts behind its own,
    so later ranks work longer. The backward sends keys and values around again, their gradients with them.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, group: dist.ProcessGroup
    ) -> Tensor:
        """[batch, heads, local tokens, d] x 3 -> the same."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        result, lse = flash_attention(q, k, v, is_causal)
        if size > 1:
            result, block_k, block_v = result.to(lse.dtype), k, v
            for hop in range(1, size):
                block_k, block_v = pass_on([block_k, block_v], group)
                if is_causal and hop > rank:
                    continue
                block_out, block_lse = flash_attention(q, block_k, block_v, False)
                merge_attention_(result, lse, block_out, block_lse)
                del block_out, block_lse
            del block_k, block_v
            result = result.to(q.dtype)
        ctx.is_causal, ctx.group = is_causal, group
        ctx.save_for_backward(q, k, v, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Gradients of a block of keys gather what each rank adds, and end where the block began."""
        q, k, v, out, lse = ctx.saved_tensors
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        dq, dk, dv = flash_attention_backward(grad, q, k, v, out, lse, ctx.is_causal)
        for hop in range(1, size):
            k, v, dk, dv = pass_on([k, v, dk, dv], ctx.group)
            if ctx.is_causal and hop > rank:
                continue
            block = flash_attention_backward(grad, q, k, v, out, lse, False)
            for total, part in zip((dq, dk, dv), block, strict=True):
                total.add_(part)
            del block, total, part
        if size > 1:
            dk, dv = pass_on([dk, dv], ctx.group)
        return dq, dk, dv, None, None


def pass_on(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Send `tensors` to the next rank of the ring and return those of the one before."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    received = [torch.empty_like(tensor) for tensor in tensors]
    sends = [dist.P2POp(dist.isend, tensor, after, group) for tensor in tensors]
    receives = [dist.P2POp(dist.irecv, tensor, before, group) for tensor in received]
    for work in dist.batch_isend_irecv(sends + receives):
        work.wait()
    return received


# --- matmuls and collectives -------------------------------------------------------------------


def kept_as(x: Tensor, narrow: bool) -> Tensor:
    """x as an activation function keeps it: in one byte an element where `narrow`, cut off at +-448."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn) if narrow else x


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up; keeps both, in fp8 where `narrow`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, narrow: bool = False) -> Tensor:
        """[..., f] x 2 -> [..., f]."""
        ctx.save_for_backward(kept_as(gate, narrow), kept_as(up, narrow))
        return silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Computes silu(gate) again."""
        gate, up = (kept.to(grad.dtype) for kept in ctx.saved_tensors)
        return aten.silu_backward(grad * up, gate), grad * silu(gate), None


class Gelu(torch.autograd.Function):
    """gelu(x); keeps x, in fp8 where `narrow`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, narrow: bool) -> Tensor:
        """[..., f] -> the same."""
        ctx.save_for_backward(kept_as(x, narrow))
        return gelu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """[..., f] -> the same."""
        return aten.gelu_backward(grad, ctx.saved_tensors[0].to(grad.dtype)), None


class Project(torch.autograd.Function):
    """x [N, d] times one matrix per head, W [h, d, e] -> [h, N, e]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x is read by every head, not copied."""
        ctx.save_for_backward(x, weight)
        return torch.bmm(x.expand(weight.shape[0], *x.shape), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """dx sums over heads inside one matmul, [N, h e] x [h e, d]."""
        x, weight = ctx.saved_tensors
        heads, tokens, width = grad.shape
        dweight = torch.bmm(x.t().expand(heads, x.shape[1], tokens), grad)
        rows = grad.transpose(0, 1).contiguous().view(tokens, heads * width)
        columns = weight.transpose(1, 2).contiguous().view(heads * width, x.shape[1])
        return torch.mm(rows, columns), dweight


class MatMul(torch.autograd.Function):
    """x [n, k] times W [k, m], whose gradients are two matmuls of one form.

    torch's own take another where a matrix is its own transpose, as one of a single element is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """[n, k] x [k, m] -> [n, m]."""
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """dW = x^T dy, then dx = dy W^T."""
        x, weight = ctx.saved_tensors
        dweight = torch.mm(x.t(), grad)
        return torch.mm(grad, weight.t()), dweight


class Exchange(torch.autograd.Function):
    """The collective `there`, whose gradient is the collective `back`: a gather and a scatter, say."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Collective, back: Collective, group: dist.ProcessGroup) -> Tensor:
        """`there` of x, which is contiguous."""
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """`back` of the gradient."""
        return ctx.back(grad.contiguous(), ctx.group), None, None, None


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part i of dim 0 goes to rank i of `group`; the part from rank i comes to place i. Its own inverse."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts of dim 0 from all ranks, in their order: [n, ...] -> [n x ranks, ...]."""
    out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    dist.all_gather_single(out, x, group=group)
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of dim 0 of the sum over all ranks: [n x ranks, ...] -> [n, ...]."""
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_single(out, x, group=group)
    return out

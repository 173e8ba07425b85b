"""The block of the transformer-estimates notebook (convention `nersc-2024-02`), op for op as printed.

A GPT block under 1D tensor parallelism with sequence parallelism, in two tables: `mlp` and `sa` (self
attention, with both layer norms). Its rules, kept as they are, right or wrong:

- A dot product of length k is 2k - 1 FLOP, a bias one more per output. Additions of a reduction are free.
- Forward traffic: inputs, weights and outputs once. Backward traffic: gradients of the inputs' and
  outputs' that `grad` says, weight gradients, weights (matmuls), and what was kept.
- A communication moves the whole tensor once (no ring factor) at one flat bandwidth, and serves one op.
- No bias on qkv, no residual adds, no embedding, no head; backward all-gathers of the inputs are missing.

Bytes and FLOP here; the table of the notebook (GB, TFLOP, ms) is made by `estimate.nersc_2024_02`.
Source: the notebook's printed tables; ShashankSubramanian/transformer-perf-estimates at cf96a49.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwise.core.units import Num
from meshwise.cost.op import matmul_flop

ELEM_BYTES = 2.0
MASK_BYTES = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NotebookOp:
    """A row of the notebook: bytes by role, FLOP, and the communication it waits for.

    `other_bytes` is the second input (keys, values, a dropout mask). `grad_bytes`: gradients of
    activations that the backward moves. `comm_size` 0: the row names no group.
    """

    layer: str
    flop: Num
    backward_flop: Num
    in_bytes: Num
    other_bytes: Num = 0.0
    out_bytes: Num
    saved_bytes: Num
    weight_bytes: Num = 0.0
    grad_bytes: Num
    matmul: bool = False
    forward_comm: str = ""
    backward_comm: str = ""
    comm_bytes: Num = 0.0
    comm_size: Num = 0.0

    @property
    def forward_bytes(self) -> Num:
        """Traffic of the forward."""
        return self.in_bytes + self.other_bytes + self.out_bytes + self.weight_bytes

    @property
    def backward_bytes(self) -> Num:
        """Traffic of the backward."""
        weights = self.weight_bytes if self.matmul else 0.0
        return self.grad_bytes + self.weight_bytes + weights + self.saved_bytes


def product_flop(m: Num, n: Num, k: Num, *, batch: Num = 1.0) -> Num:
    """FLOP of a product whose dots of length k take k multiplications and k - 1 additions."""
    return matmul_flop(m, n, k, batch=batch) - batch * m * n


def _linear(layer: str, rows: Num, d_in: Num, d_out: Num, *, bias: bool, **comm: Any) -> NotebookOp:
    x, y = ELEM_BYTES * rows * d_in, ELEM_BYTES * rows * d_out
    bias_flop = rows * d_out if bias else 0.0
    return NotebookOp(
        layer=layer,
        flop=product_flop(rows, d_out, d_in) + bias_flop,
        backward_flop=product_flop(rows, d_in, d_out) + product_flop(d_in, d_out, rows) + bias_flop,
        in_bytes=x,
        out_bytes=y,
        saved_bytes=x,
        weight_bytes=ELEM_BYTES * (d_in * d_out + (d_out if bias else 0.0)),
        grad_bytes=x + y,
        matmul=True,
        **comm,
    )


def _pointwise(layer: str, size: Num, flop: Num, backward_flop: Num, grads: float, **comm: Any) -> NotebookOp:
    tensor = ELEM_BYTES * size
    return NotebookOp(
        layer=layer,
        flop=flop,
        backward_flop=backward_flop,
        in_bytes=tensor,
        out_bytes=tensor,
        saved_bytes=tensor,
        grad_bytes=grads * tensor,
        **comm,
    )


def _dropout(layer: str, size: Num, **comm: Any) -> NotebookOp:
    tensor, mask = ELEM_BYTES * size, MASK_BYTES * size
    return NotebookOp(
        layer=layer,
        flop=size,
        backward_flop=size,
        in_bytes=tensor,
        other_bytes=mask,
        out_bytes=tensor,
        saved_bytes=mask,
        grad_bytes=tensor,
        **comm,
    )


def _layer_norm(layer: str, rows: Num, width: Num, **comm: Any) -> NotebookOp:
    tensor = ELEM_BYTES * rows * width
    return NotebookOp(
        layer=layer,
        flop=9.0 * rows * width,
        backward_flop=13.0 * rows * width - 4.0 * rows,
        in_bytes=tensor,
        out_bytes=tensor,
        saved_bytes=tensor,
        weight_bytes=2.0 * ELEM_BYTES * width,
        grad_bytes=2.0 * tensor,
        **comm,
    )


def mlp(batch: Num, seq: Num, hidden: Num, ffn: Num, tp: Num, *, sequence_parallel: bool) -> list[NotebookOp]:
    """Table `mlp`: fc1, act, dpr1, fc2, dpr2 of one layer on one rank."""
    rows, width = batch * seq, ffn / tp
    shard = tp if sequence_parallel else 1.0
    on_tp: dict[str, Any] = {"comm_bytes": ELEM_BYTES * rows * hidden, "comm_size": tp}
    gather = {"backward_comm": "allgather", **on_tp} if sequence_parallel else {}
    return [
        _linear("fc1", rows, hidden, width, bias=True, backward_comm="reducescatter", **on_tp),
        _pointwise("act", rows * width, rows * width, rows * width, 1.0),
        _dropout("dpr1", rows * width),
        _linear("fc2", rows, width, hidden, bias=True, forward_comm="reducescatter", **on_tp),
        _dropout("dpr2", rows / shard * hidden, **gather),
    ]


def self_attention(
    batch: Num, seq: Num, hidden: Num, heads: Num, tp: Num, *, sequence_parallel: bool
) -> list[NotebookOp]:
    """Table `sa`: both norms, qkv, the four ops of the scores, the output projection, its dropout."""
    rows, dim = batch * seq, hidden / heads
    shard = tp if sequence_parallel else 1.0
    local_heads, scores = batch * heads / tp, batch * heads / tp * seq * seq
    on_tp: dict[str, Any] = {"comm_bytes": ELEM_BYTES * rows * hidden, "comm_size": tp}
    enter = {"forward_comm": "allgather", **on_tp} if sequence_parallel else {}
    gather = {"backward_comm": "allgather", **on_tp} if sequence_parallel else {}
    leave = {"backward_comm": "reducescatter", **on_tp}
    head_bytes = ELEM_BYTES * local_heads * seq * dim
    score_bytes = ELEM_BYTES * scores
    qk = product_flop(seq, seq, dim, batch=local_heads)
    mix = product_flop(seq, dim, seq, batch=local_heads)
    return [
        _layer_norm("layer_norm_1", rows / shard, hidden, **enter),
        _linear("qkv_proj", rows, hidden, 3.0 * hidden / tp, bias=False, **leave),
        NotebookOp(
            layer="logits", flop=qk, backward_flop=2.0 * mix, in_bytes=head_bytes, other_bytes=head_bytes,
            out_bytes=score_bytes, saved_bytes=2.0 * head_bytes, grad_bytes=score_bytes + 2.0 * head_bytes,
            matmul=True,
        ),
        _pointwise(
            "softmax", scores, 3.0 * scores - local_heads * seq, 4.0 * scores - local_heads * seq, 2.0
        ),
        _dropout("dropout_softmax", scores),
        NotebookOp(
            layer="attend", flop=mix, backward_flop=qk + mix, in_bytes=score_bytes, other_bytes=head_bytes,
            out_bytes=head_bytes, saved_bytes=score_bytes + head_bytes, grad_bytes=score_bytes + head_bytes,
            matmul=True,
        ),
        _linear("v_proj", rows, hidden / tp, hidden, bias=True, forward_comm="reducescatter", **on_tp),
        _dropout("dropout", rows / shard * hidden, **gather),
        _layer_norm("layer_norm_2", rows / shard, hidden, **enter),
    ]  # fmt: skip

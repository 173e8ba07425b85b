"""The block of the transformer-estimates notebook (convention `nersc-2024-02`), op for op as printed.

A GPT block under 1D tensor parallelism with sequence parallelism, in two tables: `mlp` and `sa` (self
attention, with both layer norms). Its rules, reproduced with their errors:

- A dot product of length k is 2k - 1 FLOP, a bias one more per output. Additions of a reduction are free.
- Forward traffic: inputs, weights and outputs once. Backward traffic: `grad_bytes`, weight gradients,
  weights (matmuls only), and what the forward saved.
- A communication moves the whole tensor once (no ring factor) at one flat bandwidth, and serves one op.
- No bias on qkv, no residual adds, no embedding, no head; backward all-gathers of the inputs are missing.

Bytes and FLOP here; the table of the notebook (GB, TFLOP, ms) is made by `notebook`.
Source: the notebook's printed tables; ShashankSubramanian/transformer-perf-estimates at cf96a49.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwise.core.units import Num
from meshwise.cost.op import matmul_flop
from meshwise.published.nersc.tables import NERSC_TABLES

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
        """Bytes that the forward reads and writes."""
        return self.in_bytes + self.other_bytes + self.out_bytes + self.weight_bytes

    @property
    def backward_bytes(self) -> Num:
        """Bytes that the backward reads and writes."""
        weights = 2.0 * self.weight_bytes if self.matmul else self.weight_bytes
        return self.grad_bytes + weights + self.saved_bytes


def product_flop(m: Num, n: Num, k: Num, *, batch: Num = 1.0) -> Num:
    """FLOP of a product whose dots of length k take k multiplications and k - 1 additions."""
    return matmul_flop(m, n, k, batch=batch) - batch * m * n


def _linear(layer: str, rows: Num, d_in: Num, d_out: Num, *, bias: bool = True, **comm: Any) -> NotebookOp:
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


def _kernel(layer: str, kind: str, rows: Num, width: Num, **comm: Any) -> NotebookOp:
    """An element-wise op; all keep their input, but dropout keeps the mask that it reads."""
    of = NERSC_TABLES["notebook"]["kernels"][kind]
    size, mask = rows * width, kind == "dropout"
    return NotebookOp(
        layer=layer,
        flop=of["flop"][0] * size + of["flop"][1] * rows,
        backward_flop=of["backward_flop"][0] * size + of["backward_flop"][1] * rows,
        in_bytes=ELEM_BYTES * size,
        other_bytes=MASK_BYTES * size * mask,
        out_bytes=ELEM_BYTES * size,
        saved_bytes=(MASK_BYTES if mask else ELEM_BYTES) * size,
        weight_bytes=of["weights"] * ELEM_BYTES * width,
        grad_bytes=of["grads"] * ELEM_BYTES * size,
        **comm,
    )


def block(
    batch: Num, seq: Num, hidden: Num, ffn: Num, heads: Num, tp: Num, *, sequence_parallel: bool
) -> dict[str, list[NotebookOp]]:
    """The tables of one layer on one rank: `mlp`, and `sa` (both norms, qkv, scores, projection, dropout)."""
    rows, dim, local_heads, width = batch * seq, hidden / heads, batch * heads / tp, ffn / tp
    shard_rows = rows / tp if sequence_parallel else rows
    group: dict[str, Any] = {"comm_bytes": ELEM_BYTES * rows * hidden, "comm_size": tp}
    enter = {"forward_comm": "allgather", **group} if sequence_parallel else {}
    gather = {"backward_comm": "allgather", **group} if sequence_parallel else {}
    leave = {"backward_comm": "reducescatter", **group}
    mlp = [
        _linear("fc1", rows, hidden, width, **leave),
        _kernel("act", "activation", rows, width),
        _kernel("dpr1", "dropout", rows, width),
        _linear("fc2", rows, width, hidden, forward_comm="reducescatter", **group),
        _kernel("dpr2", "dropout", shard_rows, hidden, **gather),
    ]
    head = ELEM_BYTES * local_heads * seq * dim
    score = ELEM_BYTES * local_heads * seq * seq
    qk = product_flop(seq, seq, dim, batch=local_heads)
    mix = product_flop(seq, dim, seq, batch=local_heads)
    attention = [
        _kernel("layer_norm_1", "layer_norm", shard_rows, hidden, **enter),
        _linear("qkv_proj", rows, hidden, 3.0 * hidden / tp, bias=False, **leave),
        NotebookOp(
            layer="logits", flop=qk, backward_flop=2.0 * mix, in_bytes=head, other_bytes=head,
            out_bytes=score, saved_bytes=2.0 * head, grad_bytes=score + 2.0 * head, matmul=True,
        ),
        _kernel("softmax", "softmax", local_heads * seq, seq),
        _kernel("dropout_softmax", "dropout", local_heads * seq, seq),
        NotebookOp(
            layer="attend", flop=mix, backward_flop=qk + mix, in_bytes=score, other_bytes=head,
            out_bytes=head, saved_bytes=score + head, grad_bytes=score + head, matmul=True,
        ),
        _linear("v_proj", rows, hidden / tp, hidden, forward_comm="reducescatter", **group),
        _kernel("dropout", "dropout", shard_rows, hidden, **gather),
        _kernel("layer_norm_2", "layer_norm", shard_rows, hidden, **enter),
    ]  # fmt: skip
    return {"mlp": mlp, "sa": attention}

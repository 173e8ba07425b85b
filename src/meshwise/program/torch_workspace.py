"""What PyTorch's formulas make on the way, beside what an op reads, makes and keeps: `Op.workspace_bytes`.

    SwiGLU            silu(gate)
    loss in chunks    the backward of a chunk runs in its forward, beside the gradient of the matrix so far
    ring attention    gradients of queries, keys and values in fp32, and keys and values on their way
    fp8 matmuls       the largest operand in fp32, and scaled

Source: dry runs of `meshwise train` on torch 2.13.
"""

from __future__ import annotations

from math import prod

import numpy as np

from meshwise.core.units import Num
from meshwise.model.architecture import Model
from meshwise.program.cut import Cut
from meshwise.program.op import Op


def kernel_workspace(model: Model, cut: Cut, op: Op) -> Num:
    """Of an element-wise kernel, in the phase of `op` [bytes]."""
    act = cut.precision.act_bytes
    if op.kind != "kernel":
        return 0.0
    if op.kernel in ("swiglu", "geglu", "reglu"):
        return prod(op.shape) * act
    if cut.loss_chunks > 1 and op.phase == "forward" and op.name.endswith("_gradients"):
        logits = cut.tokens / cut.loss_chunks * model.vocab / cut.tp
        return act * (logits + model.vocab / cut.tp * model.hidden * (not cut.lora_rank))
    return 0.0


def ring_workspace(cut: Cut, queries: Num, keys_and_values: Num) -> Num:
    """Of the backward of ring attention whose tensors have so many elements [bytes]."""
    act, stat = cut.precision.act_bytes, cut.precision.stat_bytes
    return (cut.ring > 1) * (stat * (queries + 3.0 * keys_and_values) + 3.0 * act * keys_and_values)


def narrow_workspace(m: Num, n: Num, k: Num, *, is_backward: bool) -> Num:
    """Of a matmul [m, k] x [k, n] in fp8 [bytes]; its backward has the gradient [m, n] to cast too."""
    return 8.0 * np.maximum(np.maximum(m * k, n * k), m * n * is_backward)

"""Whose software does the ops of a layout: what that changes is said here, and nowhere else.

A layout states its ops as Megatron-LM does them: element-wise kernels are fused. `huggingface` does the
modules of the library `transformers` op by op, which moves and keeps more (`cost.op.EAGER_KERNELS`): to the
byte what Llama, Mistral, Qwen2 and Qwen3 keep there. Not expressed are `gelu_new` (GPT-2, GPT-J, Phi), which
keeps three tensors more than GELU, and the norms of Gemma and OLMo, which keep more in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from meshwise.core.errors import PlanError
from meshwise.cost.op import EAGER_KERNELS, KERNELS
from meshwise.program.context import MODULE as ATTENTION
from meshwise.program.op import Op, precision


def as_done_by(implementation: str, ops: list[Op]) -> list[Op]:
    """The ops of one part as `implementation` does them; PlanError where that is not stated."""
    if implementation not in IMPLEMENTATIONS:
        stated = ", ".join(IMPLEMENTATIONS)
        raise PlanError(f"implementation={implementation} is not priced yet; use one of {stated}")
    change = IMPLEMENTATIONS[implementation]
    return ops if change is None else list(change(ops))


def _eager(ops: Iterable[Op]) -> Iterable[Op]:
    """Element-wise kernels are not fused; nor does attention repeat keys for query heads on the fly."""
    for op in ops:
        if op.kernel in EAGER_KERNELS:
            yield _eager_kernel(op)
        elif op.saved_bytes and op.module == ATTENTION and op.name in ("logits", "attend"):
            yield _with_repeated_keys(op)
        else:
            yield op


def _with_repeated_keys(op: Op) -> Op:
    """A product of scores, or of their mix, that keeps as many keys (values) as queries."""
    batch, m, n, k = op.shape
    elem_bytes = precision(op.dtype).act_bytes
    queries, keys = (batch * m * k, batch * n * k) if op.name == "logits" else (0.0, batch * k * n)
    return replace(op, saved_bytes=elem_bytes * (queries + keys) + op.recomputed_bytes)


def _eager_kernel(op: Op) -> Op:
    rows, width = op.shape
    size = {"elem_bytes": precision(op.dtype).act_bytes}
    fused, eager = KERNELS[op.kernel], EAGER_KERNELS[op.kernel]
    if op.phase == "backward":
        return replace(op, cost=eager.backward(rows, width, **size))
    more = eager.saved_bytes(rows, width, **size) - fused.saved_bytes(rows, width, **size)
    return replace(
        op,
        cost=eager.forward(rows, width, **size),
        saved_bytes=op.saved_bytes + more,
        recomputed_bytes=op.recomputed_bytes + (more if op.name == "softmax" else 0.0),
    )


IMPLEMENTATIONS: dict[str, Callable[[list[Op]], Iterable[Op]] | None] = {
    "megatron": None,
    "huggingface": _eager,
}
"""What each implementation changes in the ops of a part."""

"""How torch's parts do the ops of a layout: matmuls, attention and collectives as the dispatcher sees them.

The differences to what the layout states:

- q, k and v are three matmuls, gate and up two; the gradient of a weight is the transpose of the layout's,
  but for stacks of experts;
- DTensor keeps the gathered input of a pair of matmuls (`GATHERED`), so the backward gathers nothing again;
- `attention` under context parallelism is `layout.train_ring`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwise.cost.op import matmul_flop
from meshwise.program.context import CORE
from meshwise.program.op import Op
from meshwise.program.tape import Tape
from meshwise.program.train_collective import collective_row
from meshwise.program.train_ring import ring_rows
from meshwise.program.training import Training

GATHERED = ("qkv", "fc1", "logits")
"""Layers whose input the layout gathers again in the backward, and DTensor keeps."""

Row = dict[str, Any]


def write_ops(t: Training, ops: list[Op], tape: Tape, *, count: int) -> None:
    """Matmuls, attention and collectives of `ops`, each `count` times; recomputed ones once more."""
    for op in ops:
        for row in rows_of(t, op):
            tape.op(**row, count=count)
            if op.phase == "forward" and _is_redone(t, op):
                tape.op(**row | {"phase": "recompute"}, count=count)


def _is_redone(t: Training, op: Op) -> bool:
    in_block = op.module in ("attention", "mlp", "moe")
    return in_block and (t.recompute == "full" or (t.recompute == "selective" and op.name in CORE))


def rows_of(t: Training, op: Op) -> Iterator[Row]:
    """`op` as torch does it."""
    if op.kind == "matmul":
        yield from _matmul_rows(t, op)
    elif op.kind == "attention":
        yield from _attention_rows(t, op)
    elif op.kind == "collective" and op.axis == "ep" and op.group_size > 1:
        rows = int(op.payload_bytes) // (t.model.hidden * t.elem_bytes)
        shape = (rows, t.model.hidden)
        yield collective_row(op.collective, op.phase, shape, "ep", t.ep, t.elem_bytes, t.dtype)
    elif op.kind == "collective" and op.axis == "tp" and op.group_size > 1 and not _is_kept(op):
        yield from _exchange_rows(t, op)


def _is_kept(op: Op) -> bool:
    """Whether a collective of the backward gathers what DTensor has kept."""
    return op.phase == "backward" and op.collective == "all_gather" and op.name in GATHERED


def widths(t: Training, name: str, width: int) -> list[int]:
    """Local output widths of the matmuls that make up the layer `name` of the layout."""
    m = t.model
    if name == "qkv":
        narrow = m.num_kv_heads * m.head_dim // t.tp
        return [width - 2 * narrow, narrow, narrow]
    return [width // 2] * 2 if name in ("fc1", "expert_fc1") and m.gated else [width]


def _matmul_rows(t: Training, op: Op) -> Iterator[Row]:
    batch, rows, columns, depth = (int(size) for size in op.shape)
    is_stack = op.name.startswith("expert_")  # of experts: stored d_in x d_out, as the layout has it
    if op.phase == "forward" or (op.is_weight_grad and is_stack):
        shapes = [(batch, rows, part, depth) for part in widths(t, op.name, columns)]
    elif op.is_weight_grad:  # the layout's is d_in x d_out, torch's d_out x d_in
        shapes = [(batch, part, rows, depth) for part in widths(t, op.name, columns)]
    else:
        shapes = [(batch, rows, columns, part) for part in widths(t, op.name, depth)]
    for shape in shapes:
        _, m, n, k = shape
        flop = float(matmul_flop(m, n, k, batch=batch))
        yield {"op": "matmul", "phase": op.phase, "shape": shape, "dtype": t.dtype, "flop": flop}


def _attention_rows(t: Training, op: Op) -> Iterator[Row]:
    if t.cp > 1:
        yield from ring_rows(t, op.phase)
        return
    shape = tuple(int(size) for size in op.shape)
    flop = float(op.cost.flop)
    yield {"op": "attention", "phase": op.phase, "shape": shape, "dtype": t.dtype, "flop": flop}


def _exchange_rows(t: Training, op: Op) -> Iterator[Row]:
    """Activations gathered or scattered along the sequence, or three numbers a token of the loss."""
    shape: tuple[int, ...] = (t.tp * t.batch, t.seq // t.tp, t.model.hidden)
    dtype, elem_bytes = t.dtype, t.elem_bytes
    if op.name == "cross_entropy":
        shape, dtype, elem_bytes = (t.batch * t.seq, 1), t.state_dtype, t.state_bytes
    for _ in range(int(op.count)):
        yield collective_row(op.collective, op.phase, shape, "tp", t.tp, elem_bytes, dtype)


def write_handovers(t: Training, stage: int, tape: Tape) -> None:
    """What a stage hands on to the next one and back to the one before, unless they are of the same rank."""
    if t.pp == 1:
        return
    shape = (t.batch, t.seq // t.tp, t.model.hidden)
    count = t.steps * t.microbatches
    neighbours = [near for near in (stage - 1, stage + 1) if 0 <= near < t.num_stages]
    for _ in (near for near in neighbours if near not in t.pieces):
        for kind in ("send", "recv"):
            row = collective_row(kind, "forward", shape, "pp", t.pp, t.elem_bytes, t.dtype)
            tape.op(**row, count=count)

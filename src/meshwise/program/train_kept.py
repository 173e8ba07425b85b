"""Activations that a training step keeps for its backward: the most bytes at once, and what they are.

What each op keeps is what the layout says (`Op.saved_bytes`), which `estimate` adds up too. Torch's parts
keep more, and each difference is a row of its own (module `activations`):

- `gathered`: DTensor keeps the gathered input of a pair of matmuls, where the layout keeps the rank's part;
- `inputs`: the numbers of the tokens are inputs, alive from the beginning: not counted, as the layout does;
- `loss weight`: the loss keeps what its tokens weigh together, one number;
- `fp64 logits`: it computes in the type of the states, where the layout's is always fp32;
- `router type`, `router fp64`: a router computes in the type of the rest, the layout's in bf16, and its
  probabilities are of the type of the states;
- `gates`: the weights of the experts' answers, one number a copy.
"""

from __future__ import annotations

from typing import Any

from meshwise.program.op import Op
from meshwise.program.tape import Tape
from meshwise.program.tensor_1d import ATTENTION
from meshwise.program.train_rows import GATHERED
from meshwise.program.training import Piece, Training, piece_ops


def write_kept(t: Training, tape: Tape) -> None:
    """The peak of what is kept; and what one microbatch keeps, op by op, and of which difference."""
    tape.op("activations", module="states", phase="step", saved_bytes=kept_peak_bytes(t))
    place: dict[str, Any] = {"module": "activations", "phase": "forward", "dtype": t.dtype}
    for piece in t.pieces.values():
        for count, ops in piece_ops(t, piece):
            for op in (op for op in ops if op.phase == "forward"):
                name = f"{op.module}/{op.name}"
                if op.saved_bytes:
                    tape.op(name, **place, saved_bytes=float(op.saved_bytes), count=count)
                for why, size_bytes in beyond_bytes(t, op).items():
                    if size_bytes:
                        tape.op(f"{name}: {why}", **place, saved_bytes=size_bytes, count=count)


def kept_peak_bytes(t: Training) -> float:
    """The most bytes that are kept at once, over the rank's order of forwards and backwards."""
    pieces = list(t.pieces.values())
    alive, peak = 0.0, 0.0
    for kind, place in t.order:
        size = kept_bytes(t, pieces[place])
        alive += size if kind == "F" else 0.0
        peak = max(peak, alive + (redone_bytes(t, pieces[place]) if kind in ("B", "I") else 0.0))
        if kind in ("B", "W"):
            alive -= size - (left_bytes(t, pieces[place]) if kind == "W" else 0.0)
    return peak


def left_bytes(t: Training, piece: Piece) -> float:
    """What stays kept of a microbatch to the end of the step, on the last stage, if its backward is split.

    The half that makes gradients of weights lets go of what their ops kept; what the others kept goes with
    the graph, which torch's schedules hold by its loss.
    """
    if not piece.has_head:
        return 0.0
    total = 0.0
    for count, ops in piece_ops(t, piece):
        free = [op for op in ops if op.phase == "forward" and op.kind != "matmul" and not op.num_params]
        total += count * sum(op_kept_bytes(t, op) for op in free)
    return total - t.state_bytes  # the loss lets go of its weight


def kept_bytes(t: Training, piece: Piece) -> float:
    """What one microbatch keeps of `piece` between its forward and its backward."""
    return sum(count * _part_bytes(t, ops) for count, ops in piece_ops(t, piece))


def _part_bytes(t: Training, ops: list[Op]) -> float:
    """What one microbatch keeps of one part: a block, or an end of the model."""
    forward = [op for op in ops if op.phase == "forward"]
    if t.recompute == "full" and is_block(ops):
        return block_input_bytes(t)
    dropped = sum(float(op.recomputed_bytes) for op in forward) if t.recompute == "selective" else 0.0
    return sum(op_kept_bytes(t, op) for op in forward) - dropped


def is_block(ops: list[Op]) -> bool:
    """Whether `ops` are those of a block."""
    return ops[0].module == ATTENTION


def block_input_bytes(t: Training) -> float:
    """What a block begins with: the rank's part of the tokens."""
    return t.batch * t.seq / t.tp * t.model.hidden * float(t.elem_bytes)


def op_kept_bytes(t: Training, op: Op) -> float:
    """What one op keeps: as the layout says, and what torch's parts add."""
    return float(op.saved_bytes) + sum(beyond_bytes(t, op).values())


def beyond_bytes(t: Training, op: Op) -> dict[str, float]:
    """What torch's parts keep beyond what the layout says, by name."""
    tokens = t.batch * t.seq
    if op.kind == "matmul" and op.name in GATHERED and t.tp > 1:
        return {"gathered": (t.tp - 1) / t.tp * tokens * t.model.hidden * t.elem_bytes}
    if op.kind == "kernel" and op.name == "cross_entropy":
        wide = (t.state_bytes - 4.0) * tokens * t.model.vocab / t.tp
        return {"loss weight": float(t.state_bytes), "fp64 logits": wide}
    routed = tokens / t.tp
    if op.name == "router" and op.kind == "matmul":
        return {"router type": (t.elem_bytes - 2.0) * routed * t.model.hidden}
    if op.name == "router_softmax" and t.model.moe is not None:
        return {"router fp64": (t.state_bytes - 4.0) * routed * t.model.moe.num_experts}
    if op.name == "combine" and op.kind == "kernel" and t.model.moe is not None:
        return {"gates": routed * t.model.moe.top_k * float(t.elem_bytes)}
    if op.module == "embedding" and op.name == "tokens" and op.kind == "kernel":
        return {"inputs": -float(op.saved_bytes)}
    return {}


def redone_bytes(t: Training, piece: Piece) -> float:
    """How much more than after its forward is kept at most while a block of `piece` is done again.

    The head, and the blocks behind, have let go by then. (What selective recomputation brings back is less
    than the block's MLP, which has let go too.)
    """
    if t.recompute != "full":
        return 0.0
    head_bytes, of_block = 0.0, {}
    for _, ops in piece_ops(t, piece):
        whole = sum(op_kept_bytes(t, op) for op in ops if op.phase == "forward")
        if is_block(ops):
            of_block[any(op.module == "moe" for op in ops)] = whole
        elif ops[0].module == "head":
            head_bytes = whole
    gone = head_bytes
    extra = 0.0
    for has_experts in reversed(piece.has_experts):
        gone += block_input_bytes(t)  # it is part of what comes back
        extra = max(extra, of_block[has_experts] - gone)
    return extra

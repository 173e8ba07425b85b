"""A training step with DTensor and FSDP2 in closed form: matmuls, attention, collectives, states.

Per microbatch of T = B S tokens on a rank, with t = tp: every linear layer is one matmul forward and two
backward. Under tensor parallelism a block gathers its T h activations before attention and before the MLP
and reduce-scatters them after; the backward mirrors that (the gathered input is kept, not gathered again);
the embedding and the head do it once each; the loss sums three numbers a token. FSDP2 gathers each block's
weights forward and again backward, and the rest once; it reduce-scatters gradients in fp32 with the last
microbatch. Gradients of the norms' weights are summed over tp once a step.

FSDP2 cuts each weight along its first dim into equal parts, the last ones short or empty, and moves full
parts. Element-wise kernels and what is alive are not stated here; a dry run counts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwise.cost.op import attended_pairs, flash_attention, flash_attention_backward
from meshwise.layout.tape import Tape
from meshwise.layout.writer import Writer
from meshwise.model import Model

STATE_BYTES = 4  # parameters, gradients and both moments are fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model, its degrees, and one rank's share of a step; `elem_bytes` is what it computes in."""

    model: Model
    tp: int
    dp: int
    batch: int
    seq: int
    microbatches: int
    steps: int
    dtype: str
    elem_bytes: int

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Local widths: of the query heads, of the key heads, of the MLP, of the vocabulary."""
        m = self.model
        wide, narrow = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        return wide // self.tp, narrow // self.tp, m.ffn_hidden // self.tp, m.vocab // self.tp


def block_linears(t: Training) -> dict[str, list[tuple[int, int]]]:
    """(outputs, inputs) of the linear layers of a block, by half."""
    wide, narrow, inner, _ = t.widths
    h = t.model.hidden
    attention = [(wide, h), (narrow, h), (narrow, h), (h, wide)]
    return {"attention": attention, "mlp": [(inner, h), (inner, h), (h, inner)]}


def write_train(t: Training, tape: Tape) -> None:
    """All steps, then the states."""
    write = Writer(tape=tape, module="", dtype=t.dtype, elem_bytes=t.elem_bytes)
    for _ in range(t.steps):
        for number in range(t.microbatches):
            _forward(t, write)
            _backward(t, write.in_phase("backward"), is_last=number == t.microbatches - 1)
    held_bytes = STATE_BYTES * sum(local_elements(shape, t, tape.rank // t.tp) for shape in all_shapes(t))
    for name, copies in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
        tape.op(name, module="states", phase="step", weight_bytes=copies * held_bytes)


def all_shapes(t: Training) -> list[tuple[int, ...]]:
    """Shapes of all weights of a rank before data parallelism cuts them."""
    blocks = [shape for _ in range(t.model.num_layers) for shape in block_shapes(t)]
    return root_shapes(t) + blocks


def block_shapes(t: Training) -> list[tuple[int, ...]]:
    """Shapes of the weights of a block: linear layers and two norms."""
    linears = [shape for half in block_linears(t).values() for shape in half]
    return [*linears, (t.model.hidden,), (t.model.hidden,)]


def root_shapes(t: Training) -> list[tuple[int, ...]]:
    """Shapes of the weights outside the blocks: embedding, last norm, head."""
    h, vocab = t.model.hidden, t.widths[3]
    return [(vocab, h), (h,), (vocab, h)]


def padded_elements(shapes: list[tuple[int, ...]], dp: int) -> int:
    """Elements that FSDP2 moves for weights of `shapes`: each first dim rounded up to a multiple of dp."""
    return sum(-(-rows // dp) * dp * (rest[0] if rest else 1) for rows, *rest in shapes)


def local_elements(shape: tuple[int, ...], t: Training, place: int) -> int:
    """Elements of a weight of `shape` that data-parallel rank `place` keeps."""
    part = -(-shape[0] // t.dp)
    rows = max(0, min(part, shape[0] - place * part))
    return rows * (shape[1] if len(shape) > 1 else 1)


def _forward(t: Training, write: Writer) -> None:
    h, vocab, tokens = t.model.hidden, t.widths[3], t.batch * t.seq
    _fsdp(t, write, root_shapes(t))
    _exchange(t, write, "reduce_scatter")
    for _ in range(t.model.num_layers):
        _fsdp(t, write, block_shapes(t))
        for half, linears in block_linears(t).items():
            _exchange(t, write, "all_gather")
            for outputs, inputs in linears:
                _matmul(write, tokens, outputs, inputs)
            if half == "attention":
                _attention(t, write, flash_attention)
            _exchange(t, write, "reduce_scatter")
    _exchange(t, write, "all_gather")
    _matmul(write, tokens, vocab, h)
    if t.tp > 1:
        for _ in range(3):  # the largest logit, the sum of exponentials, the label's own
            _collective(write, "all_reduce", (tokens, 1), "tp", t.tp, 4, "fp32")


def _backward(t: Training, write: Writer, *, is_last: bool) -> None:
    h, vocab, tokens = t.model.hidden, t.widths[3], t.batch * t.seq
    _linear_back(write, tokens, vocab, h)
    _exchange(t, write, "reduce_scatter")
    for _ in range(t.model.num_layers):
        _fsdp(t, write, block_shapes(t))
        for half, linears in block_linears(t).items():
            _exchange(t, write, "all_gather")
            for outputs, inputs in linears:
                _linear_back(write, tokens, outputs, inputs)
            if half == "attention":
                _attention(t, write, flash_attention_backward)
            _exchange(t, write, "reduce_scatter")
    _exchange(t, write, "all_gather")
    if not is_last:
        return
    summed_bytes = t.elem_bytes if t.microbatches == 1 else STATE_BYTES  # they add up in fp32
    for _ in range(2 * t.model.num_layers + 1 if t.tp > 1 else 0):
        dtype = t.dtype if t.microbatches == 1 else "fp32"
        _collective(write, "all_reduce", (h,), "tp", t.tp, summed_bytes, dtype)
    for shapes in [root_shapes(t)] + [block_shapes(t)] * t.model.num_layers:
        if t.dp > 1:
            moved = (padded_elements(shapes, t.dp),)
            _collective(write, "reduce_scatter", moved, "dp", t.dp, STATE_BYTES, "fp32")


def _fsdp(t: Training, write: Writer, shapes: list[tuple[int, ...]]) -> None:
    """The weights of `shapes` are gathered over dp, in the type that computes."""
    if t.dp > 1:
        moved = (padded_elements(shapes, t.dp),)
        _collective(write, "all_gather", moved, "dp", t.dp, t.elem_bytes, t.dtype)


def _exchange(t: Training, write: Writer, kind: str) -> None:
    """The activations between the halves of a block are gathered or scattered along the sequence."""
    if t.tp > 1:
        shape = (t.tp * t.batch, t.seq // t.tp, t.model.hidden)
        _collective(write, kind, shape, "tp", t.tp, t.elem_bytes, t.dtype)


def _matmul(write: Writer, m: int, n: int, k: int) -> None:
    write.matmul("mm", (1, m, n, k), "out", read=0)
    write.free("out")


def _linear_back(write: Writer, tokens: int, outputs: int, inputs: int) -> None:
    """Gradients of the weight and of the input."""
    _matmul(write, outputs, inputs, tokens)
    _matmul(write, tokens, inputs, outputs)


def _attention(t: Training, write: Writer, work: Any) -> None:
    """Keys and values are repeated to as many heads as queries have."""
    heads, size = t.model.num_heads // t.tp, t.model.head_dim
    sizes = (heads, heads, t.seq, t.seq, size, size)
    pairs = attended_pairs(t.seq, t.seq, causal=True)
    cost = work(pairs, *sizes, batch=t.batch, elem_bytes=t.elem_bytes)
    write.kernel("attention", (t.batch, *sizes), read=0, written=0, flop=float(cost.flop))


def _collective(
    write: Writer, kind: str, shape: tuple[int, ...], axis: str, ranks: int, elem_bytes: int, dtype: str
) -> None:
    Writer(tape=write.tape, module="", dtype=dtype, elem_bytes=elem_bytes, phase=write.phase).collective(
        kind, kind, shape, axis, ranks
    )

"""The weights of a training step: their shapes, what FSDP2 moves of them, and what a rank holds.

FSDP2 gathers a group of weights (the embedding, each block, the head; a tied table makes the ends one group)
where they are used: the ends once a microbatch, a block again in its backward. In a pipeline they stay
gathered: everything once a step, or each time the rank's schedule comes back to a stage (`gathers`). It cuts
each weight along its first dim into equal parts, the last ones short or empty, moves full parts, and reduces
gradients, in fp32 at least, when the last microbatch is through.

Weights that all tensor-parallel ranks hold whole (norms, learned positions) have their gradients summed over
tp one by one, once a step. So has a table that is embedding and head, over the two ends of a pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from meshwise.program.tape import Tape
from meshwise.program.train_collective import collective_row
from meshwise.program.training import Piece, Training

Shape = tuple[int, ...]

ACTIVE_STAGES = 3
"""So many stages of a rank torch's looped schedules keep gathered at once."""


@dataclass(frozen=True, slots=True)
class Group:
    """Weights that are gathered together, as a tensor-parallel rank has them; `is_block`: those of a block.

    `summed` are those of which every tensor-parallel rank has its own part of the gradient. `is_experts`: the
    experts of a block, a group of their own among the ranks that hold the same.
    """

    shapes: tuple[Shape, ...]
    summed: tuple[Shape, ...]
    is_block: bool = False
    is_experts: bool = False

    def padded_elements(self, shards: int) -> int:
        """Elements that are moved: each first dim rounded up to a multiple of the ranks."""
        return sum(-(-shape[0] // shards) * shards * prod(shape[1:]) for shape in self.shapes)

    def local_elements(self, shards: int, shard: int) -> int:
        """Elements that rank `shard` keeps."""
        total = 0
        for shape in self.shapes:
            part = -(-shape[0] // shards)
            total += max(0, min(part, shape[0] - shard * part)) * prod(shape[1:])
        return total


def block_groups(t: Training, *, has_experts: bool) -> list[Group]:
    """A block: two norms and its linear layers; and its experts."""
    m = t.model
    h, wide, narrow = m.hidden, m.num_heads * m.head_dim // t.tp, m.num_kv_heads * m.head_dim // t.tp
    inner = m.ffn_hidden // t.tp
    layers = [*((width, h, m.qkv_bias) for width in (wide, narrow, narrow)), (h, wide, m.out_bias)]
    mlp = [*((inner, h, m.linear_bias) for _ in range(1 + m.gated)), (h, inner, m.linear_bias)]
    linears = [
        shape
        for d_out, d_in, bias in layers + ([] if has_experts else mlp)
        for shape in [(d_out, d_in), (d_out,)][: 1 + bias]
    ]
    norms = 2 * _norm(t)
    if not has_experts or m.moe is None:
        return [Group((*norms, *linears), norms, is_block=True)]
    router, number, width = (m.moe.num_experts, h), m.moe.num_experts // t.ep, m.moe.ffn_hidden
    # A stack is cut along its width, so that width comes first here.
    stacks = (*[(h, number * width)] * (1 + m.gated), (width, number * h))
    return [
        Group((*norms, *linears, router), (*norms, router), is_block=True),
        Group(stacks, (), is_block=True, is_experts=True),
    ]


def end_groups(t: Training, piece: Piece) -> list[Group]:
    """The embedding and the head, as far as they are with `piece`."""
    m = t.model
    table: tuple[Shape, ...] = ((m.vocab // t.tp, m.hidden),)
    positions: tuple[Shape, ...] = ()
    if m.positions == "learned":
        positions = ((m.max_seq + m.extra_position_rows, m.hidden),)
    embedding = Group(table + positions, positions)
    head = Group(_norm(t) + table, _norm(t))
    if piece.has_embedding and piece.has_head and m.tied_embedding:
        return [Group(table + positions + _norm(t), positions + _norm(t))]
    return [embedding] * piece.has_embedding + [head] * piece.has_head


def _norm(t: Training) -> tuple[Shape, ...]:
    return ((t.model.hidden,),) * (1 + t.model.norm_bias)


def groups(t: Training, piece: Piece) -> list[Group]:
    """All groups of a piece."""
    blocks = [block_groups(t, has_experts=has_experts) for has_experts in piece.has_experts]
    return end_groups(t, piece) + [group for groups in blocks for group in groups]


def shards_of(t: Training, group: Group) -> tuple[int, int]:
    """Among how many ranks a group is spread, and which of them this is."""
    if not group.is_experts:
        return t.shards, t.shard
    return t.experts_shards, 0  # equal parts, so that any rank's will do


def gathers(t: Training) -> list[int]:
    """How often in a step each of a pipeline rank's pieces is gathered.

    A looped schedule keeps the next `ACTIVE_STAGES` pieces gathered that it will come to, and lets go of
    others: `_add_unshard_reshard` of torch.distributed.pipelining.
    """
    counts, active = [0] * len(t.pieces), set[int]()
    visits = [place for _, place in t.order]
    for number in range(len(visits)):
        coming = list(dict.fromkeys(visits[number:]))[:ACTIVE_STAGES]
        active &= set(coming)
        for place in coming:
            counts[place] += place not in active
            active.add(place)
    return counts


def write_weights(t: Training, tape: Tape) -> None:
    """What is gathered, and how gradients are summed."""
    accumulates = t.microbatches > 1 or t.pp > 1  # gradients then add up in fp32
    summed = (t.state_bytes, t.state_dtype) if accumulates else (t.elem_bytes, t.dtype)
    in_pipeline = gathers(t) if t.pp > 1 else [0] * len(t.pieces)
    for place, piece in enumerate(t.pieces.values()):
        for group in groups(t, piece):
            shards, _ = shards_of(t, group)
            moved = (group.padded_elements(shards),)
            if shards > 1:
                gather = collective_row("all_gather", "forward", moved, "dp", shards, t.elem_bytes, t.dtype)
                if t.pp > 1:
                    tape.op(**gather, count=t.steps * in_pipeline[place])
                else:
                    tape.op(**gather, count=t.steps * t.microbatches)
                    if group.is_block:
                        tape.op(**gather | {"phase": "backward"}, count=t.steps * t.microbatches)
                reduce = ("reduce_scatter", "backward", moved, "dp", shards, t.state_bytes, t.state_dtype)
                tape.op(**collective_row(*reduce), count=t.steps)
        write_tied(t, piece, tape)
        for group in groups(t, piece):
            for shape in group.summed if t.tp > 1 else ():
                tape.op(**collective_row("all_reduce", "backward", shape, "tp", t.tp, *summed), count=t.steps)


def write_tied(t: Training, piece: Piece, tape: Tape) -> None:
    """A tied table has a copy at each end of a pipeline; once a step both get the sum of their gradients.

    Where one rank has both ends, nothing is exchanged.
    """
    ends = [held for held in t.pieces.values() if held.has_embedding or held.has_head]
    if not t.model.tied_embedding or piece not in ends or len(ends) == 2 or t.pp == 1:
        return
    table = Group(((t.model.vocab // t.tp, t.model.hidden),), ())
    rows = table.local_elements(t.shards, t.shard) // t.model.hidden
    if rows:
        shape = (rows, t.model.hidden)
        row = collective_row("all_reduce", "backward", shape, "pp", 2, t.state_bytes, t.state_dtype)
        tape.op(**row, count=t.steps)


def write_states(t: Training, tape: Tape) -> None:
    """Bytes of parameters, gradients and both moments."""
    held = sum(
        group.local_elements(*shards_of(t, group))
        for piece in t.pieces.values()
        for group in groups(t, piece)
    )
    for name, copies in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
        tape.op(name, module="states", phase="step", weight_bytes=copies * held * t.state_bytes)

"""What the closed form of a training step is of: a model, how it is cut, and one rank's share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshwise.model.architecture import Layer, Model
from meshwise.program.block import block
from meshwise.program.cut import Cut
from meshwise.program.op import Op
from meshwise.program.vocabulary import embed, head


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive layers of a model, and whether its two ends are with them: one stage of a pipeline.

    `has_experts`: of each layer in turn, whether its MLP is a mixture of experts.
    """

    has_experts: tuple[bool, ...]
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model, how it is cut, and one rank's share of a step.

    `cut` is how the layout cuts a block; `shards` ranks share the weights, of which this is number `shard`,
    `experts_shards` the experts that this one holds; `ring_rank` is its place in the ring of context
    parallelism. `pieces` are this rank's, by the number of their stage; `order` is what the rank does in a
    step, (F, B, I or W, place in `pieces`). `elem_bytes` is what it computes in, `state_bytes` what it keeps
    states in.
    """

    model: Model
    cut: Cut
    tp: int
    cp: int
    pp: int
    ep: int
    shards: int
    shard: int
    experts_shards: int
    ring_rank: int
    pieces: dict[int, Piece]
    order: tuple[tuple[str, int], ...]
    microbatches: int
    steps: int
    recompute: str
    cp_kind: str
    dtype: str
    elem_bytes: int
    state_bytes: int

    @property
    def batch(self) -> int:
        """Sequences of a microbatch."""
        return int(self.cut.microbatch)

    @property
    def seq(self) -> int:
        """Tokens of each sequence that a tensor-parallel group works on."""
        return int(self.cut.seq) // self.cp

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * len(self.pieces)

    @property
    def state_dtype(self) -> str:
        """The name of what states are kept in."""
        return "fp64" if self.state_bytes == 8 else "fp32"


def piece_ops(t: Training, piece: Piece) -> Iterator[tuple[int, list[Op]]]:
    """The parts of a piece, and how often each occurs."""
    if piece.has_embedding:
        yield 1, embed(t.model, t.cut)
    for has_experts in sorted(set(piece.has_experts)):
        yield piece.has_experts.count(has_experts), block(t.model, t.cut, Layer(moe=has_experts))
    if piece.has_head:
        yield 1, head(t.model, t.cut)

"""One dimension: the first matmul of a pair cut by columns, the second by rows (`program.tensor_1d`).

A rank holds 1/t of the tokens between the pairs: they are gathered where a pair begins and reduce-scattered
where it ends. In columns x sequence (`program.tensor_2d_cp`) there are several such rows, each with its part
of the sequence: between them they exchange keys and values, and once a step the gradients of all weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwise.model.architecture import Model
from meshwise.program.cut import Cut
from meshwise.runtime.programs.tensor_parallel.attention import CutSequence
from meshwise.runtime.programs.tensor_parallel.block import (
    PAIRS,
    Pieces,
    TensorLayout,
    everything,
    with_vectors,
)
from meshwise.runtime.programs.tensor_parallel.exchange import ALONE, MeshAxis, axis
from meshwise.runtime.programs.tensor_parallel.product import Gathered
from meshwise.runtime.programs.tensor_parallel.spans import part

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context


class Layout1D(TensorLayout):
    """t ranks, each with 1/t of the heads and of the MLP's width, and 1/t of the tokens."""

    def __init__(self, context: Context, model: Model, cut: Cut) -> None:
        super().__init__(context, model, cut)
        self.tp, sequence = self._groups()
        self.take_heads(sequence, parts=self.tp.size)
        self.columns = everything(model.hidden)
        self.tokens = part(sequence.mine, self.tp.index, self.tp.size)
        self.into_pair = Gathered(self.tp, ALONE, ALONE)
        self.out_of_pair = Gathered(ALONE, ALONE, self.tp)

    def _groups(self) -> tuple[MeshAxis, CutSequence]:
        if self.cut.layout == "1d":
            mesh = self.context.mesh(tp=self.context.world_size)
            return axis(mesh, "tp"), CutSequence(self.seq, self.model.causal)
        columns, rows = map(int, self.cut.grid)
        mesh = self.context.mesh(tp_row=rows, tp_col=columns)
        return axis(mesh, "tp_col"), CutSequence(self.seq, self.model.causal, axis(mesh, "tp_row"))

    def pieces(self) -> Pieces:
        """Columns of the first matrices, rows of the second, all of the rest."""
        matrices: Pieces = {}
        for _, first, second in PAIRS:
            matrices[first] = (self.columns, self.inner_columns(first, self.tp)[self.tp.index])
            matrices[second] = (self.inner_columns(second, self.tp)[self.tp.index], self.columns)
        return with_vectors(self.model, matrices, self.columns)

    def shared(self) -> list[tuple[list[str], MeshAxis]]:
        """The norms, of which each rank has seen its own tokens; then everything, over the rows."""
        norms = [name for name in self.pieces() if name.startswith("norm")]
        shared = [(norms, self.tp)]
        rows = self.sequence.along
        return shared if rows is None else [*shared, (list(self.pieces()), rows)]

"""Three dimensions: products of a cube of q x q x q ranks (`program.tensor_3d`).

Rank (i, j, l) stands at depth i, row j, column l. The axis `depth` joins the ranks of all i, and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from meshwise.model.architecture import Model
from meshwise.program.cut import Cut
from meshwise.runtime.programs.heads import DealHeads
from meshwise.runtime.programs.tensor_parallel.attention import CutSequence, FusedAttention
from meshwise.runtime.programs.tensor_parallel.block import (
    PAIRS,
    Pieces,
    TensorLayout,
    everything,
    with_vectors,
)
from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis, axis
from meshwise.runtime.programs.tensor_parallel.product import Gathered
from meshwise.runtime.programs.tensor_parallel.spans import Index, part

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context


class Layout3D(TensorLayout):
    """A cube: the rank has T / q^2 tokens in h / q of their width, of its depth those of its row.

    Into a pair tokens (i, j) in columns l become tokens (i, l) in columns j; out of it, the other way.
    """

    def __init__(self, context: Context, model: Model, cut: Cut) -> None:
        super().__init__(context, model, cut)
        columns, rows, depths = map(int, cut.grid)
        mesh = context.mesh(tp_depth=depths, tp_row=rows, tp_col=columns)
        self.col, self.row, self.depth = (axis(mesh, name) for name in ("tp_col", "tp_row", "tp_depth"))
        self.row_axis = self.col
        self.into_pair = Gathered(self.row, self.depth, self.col)
        self.out_of_pair = Gathered(self.col, self.depth, self.row)
        sequence = CutSequence(self.seq, model.causal, self.depth)
        self.take_heads(sequence, parts=rows * columns)
        self.tokens = part(sequence.mine, self.row.index, self.row.size)
        self.columns = np.split(everything(model.hidden), self.col.size)[self.col.index]

    def pieces(self) -> Pieces:
        """Of the block that its product multiplies, the rows of its depth."""
        matrices: Pieces = {}
        for _, first, second in PAIRS:
            inner = {name: self.inner_columns(name, self.row)[self.row.index] for name in (first, second)}
            matrices[first] = (self._own(self.columns), inner[first])
            matrices[second] = (self._own(inner[second]), self.columns)
        return with_vectors(self.model, matrices, self.columns)

    def _own(self, rows: Index) -> Index:
        return np.split(rows, self.depth.size)[self.depth.index]

    def shared(self) -> list[tuple[list[str], MeshAxis]]:
        """The norms over the rows, then all vectors over the depth."""
        vectors = [name for name, piece in self.pieces().items() if len(piece) == 1]
        norms = [name for name in vectors if name.startswith("norm")]
        return [(norms, self.row), (vectors, self.depth)]

    def attend(self, qkv: Tensor) -> Tensor:
        """Heads split over rows and, by Ulysses' exchange, columns."""
        on, num, op = self.heads, self.col.size, self.recorder.op
        dealt = [on.heads * num, on.kv_heads * num, on.kv_heads * num]
        with op("ulysses_qkv"):
            qkv = DealHeads.apply(qkv, dealt, True, on.batch, on.head_dim, self.col)
        mixed: Tensor = FusedAttention.apply(qkv, on)
        with op("ulysses_out"):
            return DealHeads.apply(mixed, dealt[:1], False, on.batch, on.head_dim, self.col)

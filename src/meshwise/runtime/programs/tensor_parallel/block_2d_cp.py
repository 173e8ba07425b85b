"""Columns x sequence: rows of one-dimensional layouts, each with its part of it (`program.tensor_2d_cp`).

The only exchange between the rows is that of keys and values, and, once a step, of the gradients of the
weights, which every row holds.
"""

from __future__ import annotations

from meshwise.runtime.programs.tensor_parallel.attention import Sequence
from meshwise.runtime.programs.tensor_parallel.block_1d import Layout1D
from meshwise.runtime.programs.tensor_parallel.exchange import Axis, axis


class Layout2DCP(Layout1D):
    """m1 columns, m2 rows."""

    def _groups(self) -> tuple[Axis, Sequence]:
        columns, rows = map(int, self.cut.grid)
        mesh = self.context.mesh(tp_row=rows, tp_col=columns)
        self.row = axis(mesh, "tp_row")
        return axis(mesh, "tp_col"), Sequence(self.seq, self.model.causal, self.row)

    def shared(self) -> list[tuple[list[str], Axis]]:
        """The norms over the row, then everything over the rows."""
        return [*super().shared(), (list(self.pieces()), self.row)]

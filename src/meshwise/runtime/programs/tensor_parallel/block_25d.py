"""Two and a half dimensions: depths of SUMMA grids that share their weights (`program.tensor_2d`)."""

from __future__ import annotations

from meshwise.runtime.programs.tensor_parallel.block_2d import Layout2D
from meshwise.runtime.programs.tensor_parallel.exchange import Axis, axis


class Layout25D(Layout2D):
    """d grids of q x q ranks: the rank has T / (q d) tokens in h / q of their width."""

    def _groups(self) -> tuple[Axis, Axis, Axis]:
        columns, rows, depths = map(int, self.cut.grid)
        mesh = self.context.mesh(tp_depth=depths, tp_row=rows, tp_col=columns)
        over_tokens = self.context.mesh(tp_seq=depths * rows, tp_col=columns)
        self.depth = axis(mesh, "tp_depth")
        return axis(mesh, "tp_col"), axis(mesh, "tp_row"), axis(over_tokens, "tp_seq")

"""The kinds of rows from which a closed form is written on a tape: matmul, kernel, copy, collective.

Each method brings its result alive under a name, then writes its row. Sizes are in elements of one dtype;
bytes read and written are those of the distinct elements of the operands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from meshwise.cost.collective import sent_bytes
from meshwise.cost.op import matmul_flop
from meshwise.program.tape import Named, Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Writes rows of `module` in `phase` on `tape`; tensors are of `dtype`, `elem_bytes` an element."""

    tape: Tape
    module: str
    dtype: str
    elem_bytes: float
    phase: str = "forward"

    def in_phase(self, phase: str) -> Writer:
        """The same, for another phase."""
        return replace(self, phase=phase)

    def new(self, name: str, *shape: int) -> None:
        """A tensor that no row makes: an input, a weight, a buffer."""
        self.tape.allocate(name, prod(shape) * self.elem_bytes)

    def free(self, *names: str) -> None:
        """These tensors are gone."""
        for name in names:
            self.tape.release(name)

    def rename(self, old: str, new: str) -> None:
        """The tensor `old` is called `new` from now on."""
        self.tape.rename(old, new)

    def step(self, name: str, *tensors: tuple[str, str, tuple[int, ...]]) -> None:
        """The program shows `tensors`, each (name, symbols, shape)."""
        self.tape.step(name, [Named(*tensor, prod(tensor[2]) * self.elem_bytes) for tensor in tensors])

    def matmul(
        self,
        op: str,
        shape: tuple[int, int, int, int],
        out: str,
        *,
        read: float,
        weight: float = 0,
        saved: float = 0,
    ) -> None:
        """A product of `shape` (batch, m, n, k); `read` elements of operands, `weight` of them weights."""
        batch, m, n, k = shape
        self.new(out, batch, m, n)
        self._row(
            op,
            shape,
            read,
            batch * m * n,
            flop=float(matmul_flop(m, n, k, batch=batch)),
            weight_bytes=weight * self.elem_bytes,
            saved_bytes=saved * self.elem_bytes,
            is_matmul=True,
        )

    def kernel(
        self, op: str, shape: tuple[int, ...], *, out: str = "", read: float, written: float, **row: Any
    ) -> None:
        """Any other op: `read` and `written` elements; works in place where `out` is left empty."""
        if out:
            self.new(out, *shape)
        self._row(op, shape, read, written, **row)

    def copy(self, op: str, shape: tuple[int, ...], out: str, *, weight: bool = False) -> None:
        """A tensor of `shape` laid out anew, as a transpose does."""
        size = prod(shape)
        self.kernel(
            op,
            shape,
            out=out,
            read=size,
            written=size,
            weight_bytes=size * self.elem_bytes if weight else 0.0,
        )

    def collective(
        self, op: str, kind: str, shape: tuple[int, ...], axis: str, group_size: int, *, out: str = ""
    ) -> None:
        """A collective over the full tensor of `shape`; its result is `out`, or in place."""
        if out:
            self.new(out, *(result_shape(kind, shape, group_size)))
        payload_bytes = prod(shape) * self.elem_bytes
        sent = sent_bytes(kind, payload_bytes, group_size)  # type: ignore[arg-type]
        self.tape.op(
            op,
            module=self.module,
            phase=self.phase,
            shape=shape,
            dtype=self.dtype,
            collective=kind,
            axis=axis,
            group_size=group_size,
            payload_bytes=payload_bytes,
            sent_bytes=float(sent),
        )

    def _row(self, op: str, shape: tuple[int, ...], read: float, written: float, **row: Any) -> None:
        moved = {"read_bytes": read * self.elem_bytes, "write_bytes": written * self.elem_bytes}
        place = {"module": self.module, "phase": self.phase, "dtype": self.dtype, "shape": shape}
        self.tape.op(op, **(place | moved | {"flop": 0.0} | row))


def result_shape(kind: str, shape: tuple[int, ...], group_size: int) -> tuple[int, ...]:
    """What a rank holds after a collective whose full tensor is `shape`, cut along the first dim."""
    return (shape[0] // group_size, *shape[1:]) if kind == "reduce_scatter" else shape

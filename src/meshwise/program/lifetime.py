"""A program of one rank as a list of ops and the tensors they read and make; what is alive follows from it.

A tensor is alive from the op that makes it to the last one that reads it: what a backward op needs stays
until then. A function holds what it names until it returns, which is a point of the program of its own
(`Script.returns`). Bytes read and written by an op are those of its tensors, so nothing is stated twice.

`play` writes the running account on a tape, live bytes of every op included; `peak_bytes` gives the most
that is alive, for one program or, where sizes are arrays, for a grid of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwise.core.ledger import Collective
from meshwise.core.numbers import added
from meshwise.core.units import Num
from meshwise.cost.op import matmul_flop
from meshwise.program.op import ELEMENT_BYTES, Op, Tensor, bytes_of, collective, op_row, work
from meshwise.program.tape import Tape


def moment(reads: Iterable[Tensor] = (), makes: Iterable[Tensor] = ()) -> Op:
    """A point of a program that is no op but names tensors."""
    return Op(module="", name="", phase="", kind="", reads=tuple(reads), makes=tuple(makes))


@dataclass(slots=True, kw_only=True, eq=False)
class Script:
    """Writes down a program: each method adds an event and returns the tensor that it makes.

    Ops belong to `module` and `phase`; tensors are of `dtype` unless told otherwise.
    `has_backward`: what ops save is kept for it, else nothing is. Ops occur `times` times their own count.
    """

    module: str
    dtype: str
    phase: str = "forward"
    has_backward: bool = False
    times: Num = 1.0
    events: list[Op] = field(default_factory=list)

    def new(
        self, name: str, *shape: Num, dtype: str = "", is_weight: bool = False, reads: Sequence[Tensor] = ()
    ) -> Tensor:
        """A tensor that no stated op makes: an input, a weight, a buffer; or one that reads others."""
        tensor = Tensor(name, shape, dtype or self.dtype, is_weight=is_weight)
        self.events.append(moment(reads, (tensor,)))
        return tensor

    def returns(self, *tensors: Tensor) -> None:
        """A function that names these tensors returns here, or the program that holds them ends."""
        self.events.append(moment(tensors))

    def op(
        self, name: str, kind: str, shape: tuple[Num, ...], *, reads: Sequence[Tensor],
        makes: Sequence[Tensor] = (), writes: Sequence[Tensor] = (), saves: Sequence[Tensor] = (),
        flop: Num = 0.0, count: Num = 1.0, dtype: str = "", part: str = "",
    ) -> None:  # fmt: skip
        """An op that makes new tensors and `writes` into others; it `saves` some for its backward."""
        stated = Op(
            module=self.module, name=name, phase=self.phase, kind=kind, shape=shape,
            cost=work(flop, reads, (*makes, *writes)), reads=(*reads, *writes), makes=tuple(makes),
            saved_bytes=bytes_of(saves) if self.has_backward else 0.0,
            num_params=added(tensor.elements for tensor in reads if tensor.is_weight),
            count=self.times * count, dtype=dtype or self.dtype, part=part,
        )  # fmt: skip
        self.events.append(stated)

    def matmul(
        self, name: str, shape: tuple[Num, Num, Num, Num], reads: Sequence[Tensor], out: str = "", **how: Any
    ) -> Tensor:
        """A product of `shape` (batch, m, n, k)."""
        batch, m, n, k = shape
        made = Tensor(out or name, (batch, m, n), self.dtype)
        flop = matmul_flop(m, n, k, batch=batch)
        self.op(name, "matmul", shape, reads=reads, makes=(made,), flop=flop, **how)
        return made

    def kernel(
        self, name: str, shape: tuple[Num, ...], reads: Sequence[Tensor], out: str = "", *, dtype: str = "",
        **how: Any,
    ) -> Tensor:  # fmt: skip
        """An element-wise kernel with a result of `shape`."""
        made = Tensor(out or name, shape, dtype or self.dtype)
        self.op(name, "kernel", shape, reads=reads, makes=(made,), dtype=dtype, **how)
        return made

    def collective(
        self, name: str, kind: Collective, shape: tuple[Num, ...], axis: str, group_size: Num, reads: Tensor,
        out: str = "", *, dtype: str = "", stride: Num = 1.0, count: Num = 1.0, part: str = "",
    ) -> Tensor:  # fmt: skip
        """A collective over the full tensor of `shape`, cut along its first dim; in place without `out`."""
        full = Tensor(out, shape, dtype or self.dtype)
        made = reads
        if out:
            rows = shape[0] // group_size if kind == "reduce_scatter" else shape[0]
            made = Tensor(out, (rows, *shape[1:]), full.dtype)
        op = collective(
            self.module, name, self.phase, kind, axis, full.bytes, group_size, shape=shape, dtype=full.dtype,
            stride=stride, count=self.times * count, reads=(reads,), makes=(made,) if out else (), part=part,
        )  # fmt: skip
        self.events.append(op)
        return made


def lifetimes(events: Sequence[Op]) -> Iterator[tuple[Op, list[Tensor]]]:
    """Each op or moment, and the tensors whose memory is given back after it."""
    last = {one.memory: i for i, event in enumerate(events) for one in (*event.makes, *event.reads)}
    gone: list[list[Tensor]] = [[] for _ in events]
    for tensor, i in last.items():
        gone[i].append(tensor)
    return zip(events, gone, strict=True)


def ops_of(events: Iterable[Op]) -> list[Op]:
    """The ops that occur, collectives of more than one rank among them."""
    found = (op for op in events if op.kind and (np.ndim(op.count) or op.count))
    return [op for op in found if op.kind != "collective" or np.any(np.greater(op.group_size, 1))]


def play(events: Sequence[Op], tape: Tape) -> None:
    """Write the program on `tape`: its ops with what is alive at each."""
    for event, gone in lifetimes(events):
        for tensor in event.makes:
            tape.allocate(tensor, float(tensor.bytes))
        if event.kind:
            _write(event, tape)
        for tensor in gone:
            tape.release(tensor)


def write_ops(events: Sequence[Op], tape: Tape, times: int = 1) -> None:
    """Write on `tape` a program that states only some of its ops, done so many `times`, and its peak."""
    tape.is_partial = True
    tape.allocate("the peak", float(peak_bytes(events)))
    tape.release("the peak")
    for op in ops_of(events) if times else ():
        _write(op, tape, times)


def _write(op: Op, tape: Tape, times: int = 1) -> None:
    row = op_row(op, weight_elem_bytes=ELEMENT_BYTES[op.dtype])
    tape.op(is_matmul=op.kind == "matmul", **row | {"count": times * row["count"]})


def peak_bytes(events: Sequence[Op]) -> Num:
    """The most bytes that the tensors of a program hold at once."""
    live: Num = 0.0
    peak: Num = 0.0
    for event, gone in lifetimes(events):
        live = live + bytes_of(event.makes)
        peak = np.maximum(peak, live)
        live = live - bytes_of(gone)
    return peak

"""The most that is alive at once on a rank under FSDP2: one step, unit of weights by unit of weights.

FSDP2 gathers a unit into a buffer and copies it out. In the forward the buffer stays until the next unit has
been copied out; in the backward the next unit's buffer is gathered ahead. When a unit's gradients are there,
they are added to whole sums, or copied into the input of a reduction, which stays until the next unit's.

Without a pipeline the first, one more and the last microbatch tell all. A pipeline's rank has microbatches
in flight (`program.order`), and a forward or a backward of one chunk on top. Memory is linear in a layer's
place: of a run of alike layers those at its ends are looked at, the others count together.

Source: torch.distributed.fsdp._fully_shard and torch.distributed.pipelining, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwise.core.numbers import added
from meshwise.core.units import Num
from meshwise.plan.mesh import Mesh
from meshwise.program.cut import Cut
from meshwise.program.exchange import FSDP2, at_stage
from meshwise.program.fsdp2 import Unit, reduced_bytes, shard_bytes
from meshwise.program.order import ACTIVE_CHUNKS, Moments
from meshwise.program.walk import PartBytes

MICROBATCHES = 3
"""The first, the last, and one that stands for all between them."""
UnitPlace = tuple[int, int]
"""The number of a layer among those of a chunk, and of a unit of its weights."""


class UnitBytes(NamedTuple):
    """Bytes of a unit of weights.

    `whole`: gathered; `buffer`: what it is gathered into; `copies`: made on the way out where the cut is not
    along the first dim (what came from the host before takes the place of both). `grad`: gradients as
    computed, `sums` as added up over microbatches, `reduced` as a reduction reads them, `result` what it
    leaves, on the way to the `shard` that is kept; where groups of ranks add up theirs, what is `added` to a
    shard stays to the end of the backward. `last_grad`, `last_sum`: of the unit's last weight, which goes
    last; `is_laid_out`: 1 where they are copied first.
    """

    whole: Num = 0.0
    buffer: Num = 0.0
    copies: Num = 0.0
    grad: Num = 0.0
    sums: Num = 0.0
    reduced: Num = 0.0
    result: Num = 0.0
    shard: Num = 0.0
    last_grad: Num = 0.0
    last_sum: Num = 0.0
    is_laid_out: Num = 0.0
    added: Num = 0.0

    @classmethod
    def of(cls, unit: Unit, mesh: Mesh, cut: Cut, beyond: Num = 0.0) -> UnitBytes:
        """`beyond`: elements of gradients that the rank has of other ranks' parts of a table."""
        ranks, trained = unit.sharing(mesh), unit.trained
        act, summed, kept = cut.precision.act_bytes, reduced_bytes(mesh, cut), shard_bytes(mesh, cut)
        is_cut = (ranks > 1) * 1.0
        whole = unit.gathered_bytes(mesh, cut)
        sizes = [rows * width for rows, width in trained.stored(cut)] or [0.0]
        size, last = beyond + added(sizes), sizes[-1] + beyond
        padded = trained.padded_size(mesh, cut)
        shard = kept * trained.local_size(mesh, cut)
        cast = (summed != kept) * summed * padded / ranks
        in_groups = (unit.replicas(mesh)[0] > ranks) * 1.0
        on_host = mesh.offload_optimizer
        return cls(
            whole=whole,
            buffer=whole * is_cut,
            copies=np.maximum(whole * is_cut * unit.is_experts, unit.host_bytes(mesh, cut) - whole),
            grad=act * size,
            sums=summed * size,
            reduced=summed * padded,
            result=shard + cast,
            shard=(1.0 - on_host) * (shard + cast * in_groups),
            last_grad=act * last,
            last_sum=summed * last,
            is_laid_out=is_cut * unit.is_experts,
            added=(1.0 - on_host) * in_groups * (summed == kept) * shard,
        )

    def times(self, number: Num) -> UnitBytes:
        """So many of it, or none."""
        return UnitBytes(*(size * number for size in self))

    def plus(self, other: UnitBytes) -> UnitBytes:
        """Both gathered and reduced together."""
        return UnitBytes(*(mine + its for mine, its in zip(self, other, strict=True)))


class LivePart(NamedTuple):
    """A part of the model on a rank: units of weights as its forward needs them, moments, what it keeps.

    `is_block`: it is given back behind its forward; the ends of a model are not. `is_redone`: its forward
    runs again in the backward. `repeats`: alike neighbours. `loose`: of what it
    keeps, what goes with the gradient of its input where a backward is split. `back`: what recomputation
    brings back of it, beyond what it keeps. `table`: the gradient of a table that this end of the model
    makes, other tensor-parallel ranks' parts included. `shared`: the gradient that a part above leaves of a
    weight that both use.
    """

    units: tuple[UnitBytes, ...]
    part: PartBytes
    kept: Num
    is_redone: bool = False
    repeats: int = 1
    loose: Num = 0.0
    back: Num = 0.0
    table: Num = 0.0
    shared: Num = 0.0
    is_block: bool = False

    def total(self, name: str) -> Num:
        """The sum over units of one of their sizes."""
        return self.repeats * added(getattr(unit, name) for unit in self.units)


@dataclass(slots=True, eq=False)
class Live:
    """What is alive on a rank beside its shards of weights and states, and the most of it."""

    gradients: Num = 0.0
    kept: Num = 0.0
    gathered: Num = 0.0
    buffer: Num = 0.0
    ahead: Num = 0.0
    reducing: Num = 0.0
    added: Num = 0.0
    most: Num = 0.0
    whole: set[UnitPlace] = field(default_factory=set)
    summed: set[UnitPlace] = field(default_factory=set)
    reduced: set[UnitPlace] = field(default_factory=set)

    def see(self, values: Num, more: Num = 0.0) -> None:
        """A moment with `values` of a part, and `more`."""
        held = self.gradients + self.kept + self.gathered + self.buffer + self.ahead + self.reducing
        self.most = np.maximum(self.most, held + self.added + values + more)

    def gather(self, place: UnitPlace, unit: UnitBytes, count: int, values: Num, *, forward: bool) -> None:
        """A unit becomes whole, if it is not."""
        if place in self.whole:
            return
        if not forward:
            self.ahead = 0.0  # it was this unit's buffer
        self.see(values, unit.whole + unit.buffer + unit.copies)
        self.whole.add(place)
        self.gathered = self.gathered + count * unit.whole
        if forward:
            self.buffer = unit.buffer

    def let_go(self, place: UnitPlace, unit: UnitBytes, count: int) -> None:
        """A whole unit is given back."""
        if place in self.whole:
            self.whole.discard(place)
            self.gathered = self.gathered - count * unit.whole

    def add(self, place: UnitPlace, unit: UnitBytes, count: int, values: Num) -> None:
        """Gradients as computed are added to those of the microbatches before."""
        is_first = place not in self.summed
        self.see(values, unit.grad + is_first * unit.sums)
        if is_first:
            self.summed.add(place)
            self.gradients = self.gradients + count * unit.sums

    def reduce(self, place: UnitPlace, unit: UnitBytes, count: int, values: Num) -> None:
        """Gradients, or their sums, are reduced; the input of the reduction before is given back."""
        grad, sums, last = unit.grad, 0.0 * unit.sums, unit.last_grad
        if place in self.summed:
            self.see(values, unit.grad)
            self.summed.discard(place)
            self.gradients = self.gradients - count * unit.sums
            grad, sums, last = unit.sums, (count - 1) * unit.sums, unit.last_sum
        self.reducing = 0.0
        self.see(values, sums + grad + unit.reduced + unit.is_laid_out * last)
        self.see(values, sums + last + unit.reduced + unit.result)
        if place not in self.reduced:
            self.reduced.add(place)
            self.gradients = self.gradients + count * unit.shard
        else:
            self.added = self.added + count * unit.added
        self.reducing = unit.reduced


def shortened(layers: Sequence[LivePart], bottom: int, top: int) -> list[LivePart]:
    """Runs of alike layers by so many at their bottom and top, what lies between as one."""
    found: list[LivePart] = []
    for _, run in groupby(layers, key=lambda one: (id(one.units), id(one.kept), one.is_redone)):
        alike = list(run)
        between = len(alike) - bottom - top
        middle = [alike[0]._replace(repeats=between)] if between > 1 else alike[bottom : bottom + between]
        found += [*alike[:bottom], *middle, *alike[-top:]] if between > 0 else alike
    return found


class Chunk(NamedTuple):
    """Consecutive parts on a rank, from the embedding, if it is there, to the head.

    `one_input`: bytes between two blocks. `received`: buffers for what comes from other stages in a step.
    `size`: what a microbatch keeps, the result that waits for it included. `let_go`: of what is kept, what
    goes with the gradient of the input where a backward is split; `in_piece`: what a loss in pieces needs
    beyond what is kept of it.
    """

    parts: Sequence[LivePart]
    one_input: Num
    has_embedding: bool
    let_go: Num = 0.0
    in_piece: Num = 0.0
    received: Num = 0.0
    size: Num = 0.0

    def total(self, name: str) -> Num:
        """The sum over all units of one of their sizes."""
        return added(layer.total(name) for layer in self.parts)

    @property
    def kept(self) -> Num:
        """What its parts keep of a microbatch."""
        return added(layer.repeats * layer.kept for layer in self.parts)

    @property
    def brought_back(self) -> Num:
        """What recomputation brings back in a backward, at most, beyond what is gone by then."""
        most, gone = 0.0 * self.one_input, 0.0 * self.one_input
        for layer in reversed(self.parts):
            most = np.maximum(most, layer.back - gone)
            gone = gone + layer.repeats * layer.kept
        return most

    def places(self) -> set[UnitPlace]:
        """All units."""
        return {(i, j) for i, layer in enumerate(self.parts) for j in range(len(layer.units))}

    def forward(self, live: Live, *, reshards: bool) -> None:
        """One microbatch; blocks are given back behind their forward where it `reshards`."""
        for i, layer in enumerate(self.parts):
            for j, unit in enumerate(layer.units):
                live.gather((i, j), unit, layer.repeats, 0.0, forward=True)
            if layer.repeats == 1:
                live.see(layer.part.bare_forward if layer.is_redone else layer.part.forward)
            live.kept = live.kept + layer.repeats * layer.kept
            for j, unit in enumerate(layer.units):
                if reshards and layer.is_block:
                    live.let_go((i, j), unit, layer.repeats)
        live.buffer = 0.0

    def backward(self, live: Live, *, reduces: bool, reshards: bool, prefetches: bool) -> None:
        """One microbatch, from the head down."""
        for i in reversed(range(len(self.parts))):
            layer = self.parts[i]
            live.kept = live.kept - layer.repeats * layer.kept
            below = self.parts[i - 1].units[:1] if prefetches and i and self.parts[i - 1].is_block else ()
            ahead = added(unit.buffer for unit in below)
            if i > 0 and not layer.is_block:
                live.see(layer.part.backward.most, layer.shared)
                live.ahead = ahead
            elif layer.repeats == 1:
                self._block(live, i, ahead, reduces=reduces, reshards=reshards)
            if layer is self.parts[-1]:
                live.gradients = live.gradients + added(one.shared for one in self.parts)
            live.gradients = live.gradients - layer.shared
            for j in reversed(range(len(layer.units))) if layer.repeats > 1 or not layer.is_block else (0,):
                self._through(live, (i, j), self.one_input, reduces=reduces, reshards=reshards)
        live.reducing = live.added = 0.0

    def _block(self, live: Live, i: int, ahead: Num, *, reduces: bool, reshards: bool) -> None:
        layer = self.parts[i]
        spans = layer.part.whole_backward if layer.is_redone else layer.part.backward
        entering = self.one_input + layer.kept
        for unit in layer.units[:1]:
            live.gather((i, 0), unit, 1, entering, forward=False)
        if layer.is_redone:
            for unit in layer.units[1:]:
                live.gather((i, 1), unit, 1, entering, forward=False)
            live.ahead = ahead
            live.see(layer.part.whole_forward, self.one_input)
        for unit in layer.units[1:]:
            live.ahead = unit.buffer * ((i, 1) not in live.whole)
            live.see(spans.before)
            live.gather((i, 1), unit, 1, spans.before, forward=False)
            live.ahead = ahead
            live.see(spans.experts)
            self._through(live, (i, 1), spans.experts_done, reduces=reduces, reshards=reshards)
        live.ahead = ahead
        live.see(spans.behind if layer.units[1:] else spans.most)
        live.see(self.one_input, layer.table + layer.shared)

    def _through(self, live: Live, place: UnitPlace, values: Num, *, reduces: bool, reshards: bool) -> None:
        """The gradients of a unit are there."""
        layer = self.parts[place[0]]
        for unit in layer.units[place[1] : place[1] + 1]:
            if reshards:
                live.let_go(place, unit, layer.repeats)
            (live.reduce if reduces else live.add)(place, unit, layer.repeats, values)


def peak_without_pipeline(chunk: Chunk, num_microbatches: int, zero: int) -> Num:
    """The most in a step of microbatches one after the other."""
    live, rounds = Live(), min(num_microbatches, MICROBATCHES)
    reshards, reduces = (bool(at_stage(column, zero)) for column in (FSDP2.weights, FSDP2.sums))
    for number in range(rounds):
        is_last = number == rounds - 1
        chunk.forward(live, reshards=reshards)
        chunk.backward(live, reduces=is_last or reduces, reshards=is_last or reshards, prefetches=reshards)
    return live.most


class PipelineRank:
    """A rank of a pipeline and its `chunks`, whatever the number of microbatches; sizes are [chunk, cell].

    Weights stay gathered. Sums are reduced behind the last backward of a chunk.
    """

    def __init__(self, chunks: Sequence[Chunk], num_cells: int) -> None:
        self.chunks, self.num_cells = chunks, num_cells
        self.held = self._column(lambda chunk: chunk.total("sums"))
        self.shards = self._column(lambda chunk: chunk.total("shard"))
        self.sizes = self._column(lambda chunk: chunk.size)
        self.received = self._column(lambda chunk: chunk.received).sum(axis=0)
        self.active_frac = min(ACTIVE_CHUNKS / len(chunks), 1.0)
        self.whole = self.active_frac * self._column(lambda chunk: chunk.total("whole"))
        self.waiting = self._column(_waiting)
        self.first = self._column(self._first_forward).max(axis=0)
        self.tops: dict[tuple[str, bool], NDArray[np.float64]] = {}
        self.ends = self._column(_end)

    def kept(self, moments: Moments, cells: Any) -> Num:
        """The most that is kept for the backward at once; a backward that is split recomputes nothing."""
        kept, let_go, pieces, back = (
            self._column(attrgetter(name))[:, cells]
            for name in ("kept", "let_go", "in_piece", "brought_back")
        )
        held = moments.alive @ kept - moments.turned @ let_go
        return (held + moments.entering @ pieces + moments.turning @ back).max(axis=0)

    def peak(self, moments: Moments, cells: Any) -> Num:
        """The most in a step with these moments, in some of the cells."""
        several = len(self.chunks) > 1  # a lone chunk's reduction ends the step
        total = self._state(moments.alive, moments.turned, moments.summed, moments.done * several, cells)
        for kind, at_work in (
            ("forward", moments.entering), ("backward", moments.turning), ("input", moments.leaving),
            ("weights", moments.waited),
        ):  # fmt: skip
            for is_summed in (False, True):
                flags = at_work * (moments.summed == is_summed)
                if flags.any():
                    total = total + flags @ self._top(kind, is_summed)[:, cells]
        most = np.maximum(self.whole[:, cells].sum(axis=0) + total.max(axis=0), self.first[cells])
        for number, ends in enumerate(moments.ends):
            others = 1.0 * (np.arange(len(self.chunks)) != number)
            alive, turned, summed, done = (row * others for row in ends)
            state = self._state(alive, turned, summed, done * several, cells)
            own = (ends[0][number] - 1.0) * self.sizes[number, cells]
            rest = state + others @ self.whole[:, cells] + own
            most = np.maximum(most, rest + self.ends[number][cells])
        return most + self.received[cells]

    def _state(self, alive: Any, turned: Any, summed: Any, done: Any, cells: Any) -> Any:
        """Beside the chunk at work: what is kept, gradients, weights given back."""
        sizes, waiting, held, shards, whole = (
            one[:, cells] for one in (self.sizes, self.waiting, self.held, self.shards, self.whole)
        )
        return alive @ sizes + turned @ waiting + (summed * (1.0 - done)) @ held + done @ (shards - whole)

    def _top(self, kind: str, is_summed: bool) -> NDArray[np.float64]:
        """What the microbatch at work takes beyond its share of what is kept."""
        if (kind, is_summed) not in self.tops:
            self.tops[kind, is_summed] = self._column(
                lambda chunk: _top(chunk, kind, is_summed=is_summed) - chunk.size
            )
        return self.tops[kind, is_summed]

    def _first_forward(self, chunk: Chunk) -> Num:
        """The most while the weights of a chunk are gathered, those of the others there already."""
        live = Live(gathered=self.whole.sum(axis=0) - self.active_frac * chunk.total("whole"))
        chunk.forward(live, reshards=False)
        return live.most

    def _column(self, of: Callable[[Chunk], Num]) -> NDArray[np.float64]:
        """A number of each chunk, [chunk, cell]; of chunks that are the same one, found once."""
        found = {id(chunk): of(chunk) for chunk in {id(chunk): chunk for chunk in self.chunks}.values()}
        table = np.empty((len(self.chunks), self.num_cells))
        for row, chunk in zip(table, self.chunks, strict=True):
            row[:] = found[id(chunk)]
        return table


def _waiting(chunk: Chunk) -> Num:
    """Beyond what a microbatch keeps, what it holds between the backward of its input and of its weights.

    Where tokens enter there is no gradient of the input: the whole backward waits.
    """
    if chunk.has_embedding:
        return 0.0
    return added(one.repeats * (one.part.backward.waiting - one.loose) for one in chunk.parts)


def _top(chunk: Chunk, kind: str, *, is_summed: bool) -> Num:
    """The most that one microbatch of a chunk holds while it runs, its share of what is kept included."""
    live, before = Live(whole=chunk.places()), chunk.total("sums")
    if is_summed:
        live.summed.update(chunk.places())
        live.gradients = before
    if kind == "forward":
        chunk.forward(live, reshards=False)
    elif kind == "backward" or (chunk.has_embedding and kind == "weights"):
        live.kept = chunk.kept
        chunk.backward(live, reduces=False, reshards=False, prefetches=False)
    elif kind == "input" and not chunk.has_embedding:
        through: Num = 0.0
        for layer in reversed(chunk.parts):
            own = layer.part.backward.most - layer.kept - layer.total("grad") / layer.repeats
            live.see(chunk.kept + through + np.maximum(own, 0.0))
            through = through + layer.repeats * layer.part.backward.waiting
        live.see(chunk.kept + through)
    elif kind == "weights":
        freed = added(layer.repeats * layer.part.backward.freed for layer in chunk.parts)
        last = max((layer.part.backward.waiting for layer in chunk.parts[-1:]), default=0.0)
        for layer in chunk.parts:
            for unit in layer.units:
                beside = unit.sums * (not is_summed)
                live.see(chunk.size - freed - _waiting(chunk) + chunk.total("grad"), np.maximum(last, beside))
    return live.most - (before if is_summed else 0.0)


def _end(chunk: Chunk) -> Num:
    """The most while the sums of a chunk are reduced, unit by unit."""
    live = Live(gradients=chunk.total("sums"), gathered=chunk.total("whole"), summed=chunk.places())
    for i, layer in enumerate(chunk.parts):
        for j, unit in enumerate(layer.units):
            live.gathered = live.gathered - layer.repeats * unit.whole
            live.reduce((i, j), unit._replace(grad=0.0), layer.repeats, 0.0)
    return live.most

"""Tensors that are nothing but their bytes, and the gradients of what is computed with them.

A storage is alive for as long as Python refers to it, so a program written with them holds what the same
program holds in torch. Each op that has a backward adds a node to a graph: what it reads, what it keeps, and
what its backward makes. `Graph.backward` takes the nodes from the last to the first, as autograd does: the
gradients that a node takes and what it kept go when it is through; where two gradients of one tensor meet,
their sum is a third.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

Result = TypeVar("Result")
Back = Callable[..., "tuple[Storage | None, ...]"]
"""From gradients of results and what was saved to gradients of inputs."""
Source = tuple["Node | Leaf", int]
"""What made a tensor, as which of its results."""


class Memory:
    """Bytes that are alive, now and at most."""

    __slots__ = ("live", "peak")

    def __init__(self) -> None:
        self.live = self.peak = 0.0

    def play(self, *changes: float) -> None:
        """Bytes come (positive) and go (negative), one after the other."""
        for change in changes:
            self.live += change
            self.peak = max(self.peak, self.live)

    def new(self, size: float) -> Storage:
        """So many bytes more."""
        return Storage(self, size)


class Storage:
    """So many bytes, alive until the last reference to this goes."""

    __slots__ = ("memory", "size")

    def __init__(self, memory: Memory, size: float) -> None:
        self.memory, self.size = memory, size
        memory.play(size)

    def __del__(self) -> None:
        self.memory.live -= self.size


class Leaf:
    """A weight, or what comes from another stage, that has a gradient: a sum over its `num_uses`.

    `value`: a tensor that is there for as long as this.
    """

    def __init__(self, memory: Memory, num_uses: int = 1, value: Storage | None = None) -> None:
        self.memory, self.num_uses, self.value = memory, num_uses, value
        self.grad: Storage | None = None
        self._waiting: list[Storage] = []

    def take(self, grad: Storage, _: int) -> None:
        """What a node finds; a gradient that is there already grows in place."""
        self._waiting.append(grad)
        if len(self._waiting) == self.num_uses:
            found = self.summed(self._waiting)
            self._waiting = []
            self.grad = self.grad or found

    def summed(self, grads: list[Storage]) -> Storage:
        """Of all uses."""
        return grads[0] if len(grads) == 1 else self.memory.new(grads[0].size)


@dataclass(slots=True, eq=False)
class Tensor:
    """A storage, or `part` bytes of it, and what made it: the result number `place` of an op."""

    storage: Storage
    origin: Node | Leaf | None = None
    place: int = 0
    part: float = 0.0

    @property
    def size(self) -> float:
        """Bytes."""
        return self.part or self.storage.size


@dataclass(slots=True, eq=False)
class Node:
    """An op: `back` makes gradients of the first `inputs` from that of its results and from what it `saved`.

    Gradients of the last inputs, of the sizes `sums`, are added up behind it, as of biases. `alone`: sizes of
    those that are made one by one, where not all are wanted. `widened`: bytes that each of what it saved
    takes when it is read, if not the same. `before` runs when the gradient of the result is there. `frame`:
    the recomputation that brings back what it saved.
    """

    back: Back | None
    inputs: tuple[Source | None, ...]
    saved: tuple[Storage, ...]
    sums: tuple[float, ...] = ()
    alone: tuple[float, ...] = ()
    widened: float = 0.0
    frame: Frame | None = None
    before: Callable[[], None] | None = None
    grads: list[Storage | None] = field(default_factory=lambda: [None])

    def take(self, grad: Storage, place: int) -> None:
        """The gradient of a result, from one of its readers."""
        while len(self.grads) <= place:
            self.grads.append(None)
        before = self.grads[place]
        self.grads[place] = grad if before is None else grad.memory.new(grad.size)

    def origins(self) -> Iterator[Node | Leaf]:
        """What made the inputs."""
        return (source[0] for source in self.inputs if source is not None)

    def run(self, memory: Memory, wanted: Set[Node | Leaf] | None = None, *, is_kept: bool = False) -> None:
        """Hand gradients on to what made the inputs, if it is `wanted`; what is saved may be kept."""
        if self.before is not None:
            self.before()
        if self.frame is not None:
            self.frame.run()
        takers = [source if _is_in(source, wanted) else None for source in self.inputs]
        goes = not is_kept and self.frame is not None and not self.frame.graph.is_lasting  # it is read once
        made = self._made(memory, takers, goes=goes)
        if goes:
            self.saved = ()
        first = len(takers) - len(self.sums)
        made[first:] = _each(memory, self.sums, takers[first:])
        self.grads = []
        if not is_kept:
            self.saved, self.frame = (), None
        for taker in takers:
            grad = made.pop(0)
            if taker is not None and grad is not None:
                taker[0].take(grad, taker[1])
            del grad

    def _made(self, memory: Memory, takers: list[Source | None], *, goes: bool) -> list[Storage | None]:
        if self.back is None:
            return _each(memory, self.alone, takers)
        if not self.widened:
            return [*self.back(*self.grads, *self.saved)]
        read = [memory.new(self.widened) for _ in self.saved]
        self.saved = () if goes else self.saved
        return [*self.back(*self.grads, *read)]


def _is_in(source: Source | None, wanted: Set[Node | Leaf] | None) -> bool:
    return source is not None and (wanted is None or source[0] in wanted)


def _each(memory: Memory, sizes: Iterable[float], takers: Iterable[Source | None]) -> list[Storage | None]:
    """A gradient of each size that someone takes."""
    return [memory.new(size) if taker else None for size, taker in zip(sizes, takers, strict=False)]


class Frame:
    """A function that is computed again in the backward: its nodes keep nothing until then.

    `to_its_end`: all of it, or until all is back that they saved. `results`: what is kept all the same.
    """

    def __init__(
        self, graph: Graph, function: Callable[..., object], inputs: tuple[Tensor, ...], *, to_its_end: bool
    ) -> None:
        self.graph, self.function, self.to_its_end = graph, function, to_its_end
        self.entry = Node(lambda: (), (), tuple(each.storage for each in inputs))
        self.parts = [each.part for each in inputs]
        self.nodes: list[Node] = []
        self.results: deque[Any] = deque()

    def run(self) -> None:
        """Bring back what its nodes save, at the first of them."""
        nodes, self.nodes = self.nodes, []
        if not nodes:
            return
        around = self.entry.frame
        if around is not None:
            around.run()
        function = partial(self.function, *map(Tensor, self.entry.saved, repeat(None), repeat(0), self.parts))
        if around is not None and not self.graph.is_lasting:
            self.entry.saved = ()
        number = math.inf if self.to_its_end else len(nodes)
        for node, again in zip(nodes, self.graph.computed(function, number, self.results), strict=True):
            node.saved = again.saved


class _EnoughError(Exception):
    """All that was saved is back."""


@dataclass(slots=True)
class _Again:
    """A frame that is computed for the second time: the nodes so far, of `number`, that save something."""

    number: float
    results: deque[Any]
    nodes: list[Node] = field(default_factory=list)


class Graph:
    """The nodes of a pass, in the order in which they were made.

    `is_lasting`: what comes back for a node stays until this is through, not only until it is read.
    """

    def __init__(self, memory: Memory, *, is_lasting: bool = False) -> None:
        self.memory = memory
        self.nodes: list[Node] = []
        self.is_lasting = is_lasting
        self._frame: Frame | None = None
        self._again: _Again | None = None

    @property
    def is_again(self) -> bool:
        """Whether what is computed now is computed for the second time."""
        return self._again is not None

    def op(
        self, result: Storage | float, back: Back | None, *inputs: Tensor | Leaf,
        saved: tuple[Storage, ...] = (), sums: tuple[float, ...] = (), alone: tuple[float, ...] = (),
        place: int = 0, widened: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """`result`, as an op makes it of `inputs`; so many bytes are made behind what it saves."""
        sources = tuple((each, 0) if isinstance(each, Leaf) else _source(each) for each in inputs)
        node = Node(back, sources, saved, sums, alone, widened)
        if saved:
            self._save(node)
        self.nodes.append(node)
        return Tensor(result if isinstance(result, Storage) else self.memory.new(result), node, place)

    def cast(self, x: Tensor, size: float) -> Tensor:
        """In another type, of so many bytes."""
        before = x.size
        return x if size == before else self.op(size, lambda _: (self.memory.new(before),), x)

    def _save(self, node: Node) -> None:
        """What a node saves, or a frame enters with, is kept, unless there is a frame around."""
        if self._frame is not None:
            node.saved, node.frame = (), self._frame
            self._frame.nodes.append(node)
        elif self._again is not None:
            self._again.nodes.append(node)
            if len(self._again.nodes) == self._again.number:
                raise _EnoughError

    def again(self, function: Callable[..., Any], *inputs: Tensor, to_its_end: bool = True) -> Any:
        """`function` of `inputs`, computed again in the backward."""
        frame = Frame(self, function, inputs, to_its_end=to_its_end)
        self._save(frame.entry)
        with self._in(frame):
            return function(*inputs)

    def computed(self, function: Callable[[], object], number: float, results: deque[Any]) -> list[Node]:
        """Nodes of a function that save something, computed for the second time; the first `number`."""
        before, self.nodes = self.nodes, []
        self._again = _Again(number, results)
        with suppress(_EnoughError):
            function()
        found, self.nodes, self._again = self._again.nodes, before, None
        return found

    def kept(self, make: Callable[[], Result]) -> Result:
        """What `make` makes; the frame around keeps it till it is computed again, which takes it as it is."""
        if self._again is not None:
            result: Result = self._again.results.popleft()
            return result
        result = make()
        if self._frame is not None:
            self._frame.results.append(result)
        return result

    @contextmanager
    def _in(self, frame: Frame | None) -> Iterator[None]:
        before, self._frame = self._frame, frame
        try:
            yield
        finally:
            self._frame = before

    def taken(self) -> list[Node]:
        """The nodes so far, for `backward`; those of another pass follow."""
        found, self.nodes = self.nodes, []
        return found

    def backward(self, nodes: list[Node]) -> None:
        """From the gradient that the last of `nodes` has to those of all leaves."""
        while nodes:
            node = nodes.pop()
            if any(node.grads):
                node.run(self.memory)


def _source(tensor: Tensor) -> Source | None:
    return None if tensor.origin is None else (tensor.origin, tensor.place)

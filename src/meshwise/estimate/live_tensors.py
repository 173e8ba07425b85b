"""Tensors that are nothing but their bytes, and the gradients of what is computed with them.

A storage is alive for as long as Python refers to it, so a program written with them holds what the same
program holds in torch. Each op that has a backward adds a node to a graph: what it reads, what it keeps, and
what its backward makes. `Graph.backward` takes the nodes from the last to the first, as autograd does: the
gradients that a node takes and what it kept go when it is through; where two gradients of one tensor meet,
their sum is a third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

Back = Callable[..., "tuple[Storage | None, ...]"]
"""From gradients of results and what was saved to gradients of inputs."""
Source = tuple["Node | Leaf", int]
"""What made a tensor, as which of its results."""


class Saved(Protocol):
    """What a node keeps for its backward: a storage, or where one is to be found."""

    def found(self) -> Storage:
        """The storage."""


Pack = Callable[["Storage"], Saved]
"""What is kept in place of a storage."""


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

    def found(self) -> Storage:
        """Itself, kept as it is (`Saved`)."""
        return self


class Slice(Storage):
    """A part of what another storage holds, which stays for as long as this."""

    __slots__ = ("whole",)

    def __init__(self, whole: Storage, size: float) -> None:
        self.memory, self.size, self.whole = whole.memory, size, whole

    def __del__(self) -> None:
        pass


class OnHost:
    """In place of a storage whose bytes are in host memory: a copy of them comes each time it is read."""

    __slots__ = ("memory", "size")

    def __init__(self, storage: Storage) -> None:
        self.memory, self.size = storage.memory, storage.size

    def found(self) -> Storage:
        """The copy."""
        return self.memory.new(self.size)


class Leaf:
    """A weight, or what comes from another stage, that has a gradient: a sum over its `num_uses`.

    `value`: a tensor that is there for as long as this. `is_held`: what is found is `noted`, till it counts.
    """

    def __init__(self, memory: Memory, num_uses: int = 1, value: Storage | None = None) -> None:
        self.memory, self.num_uses, self.value = memory, num_uses, value
        self.grad: Storage | None = None
        self.noted: Storage | None = None
        self.is_held = False
        self._waiting: list[Storage] = []

    def take(self, grad: Storage, _: int) -> None:
        """What a node finds."""
        self._waiting.append(grad)
        if len(self._waiting) == self.num_uses:
            self.noted = self.summed(self._waiting)
            self._waiting = []
            if not self.is_held:
                self.count()

    def count(self) -> Storage | None:
        """What was noted; a gradient that is there already grows by it in place."""
        found, self.noted, self.is_held = self.noted, None, False
        self.grad = self.grad or found
        return found

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

    Gradients of the last inputs, of the sizes `sums`, are added up behind it, as of biases. `alone`: makes
    those that are made one by one, where not all are wanted. `widened`: bytes that each of what it saved
    takes when it is read, if not the same. `before` runs when the gradient of the result is there.
    """

    back: Back | None
    inputs: tuple[Source | None, ...]
    saved: tuple[Saved, ...]
    sums: tuple[float, ...] = ()
    alone: tuple[Callable[[], Storage], ...] = ()
    widened: float = 0.0
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
        takers = [source if _is_in(source, wanted) else None for source in self.inputs]
        made = self._made(memory, takers)
        first = len(takers) - len(self.sums)
        made[first:] = _each(memory, self.sums, takers[first:])
        self.grads = []
        if not is_kept:
            self.saved = ()
        for taker in takers:
            grad = made.pop(0)
            if taker is not None and grad is not None:
                taker[0].take(grad, taker[1])
            del grad

    def _made(self, memory: Memory, takers: list[Source | None]) -> list[Storage | None]:
        read = [each.found() for each in self.saved]
        if self.back is None:
            return [make() if taker else None for make, taker in zip(self.alone, takers, strict=False)]
        if self.widened:
            read = [memory.new(self.widened) for _ in read]
        return [*self.back(*self.grads, *read)]


def _is_in(source: Source | None, wanted: Set[Node | Leaf] | None) -> bool:
    return source is not None and (wanted is None or source[0] in wanted)


def _each(memory: Memory, sizes: Iterable[float], takers: Iterable[Source | None]) -> list[Storage | None]:
    """A gradient of each size that someone takes."""
    return [memory.new(size) if taker else None for size, taker in zip(sizes, takers, strict=False)]


class Graph:
    """The nodes of a pass, in the order in which they were made."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.nodes: list[Node] = []
        self._packs: list[Pack] = []

    def op(
        self, result: Storage, back: Back | None, *inputs: Tensor | Leaf, saved: tuple[Storage, ...] = (),
        sums: tuple[float, ...] = (), alone: tuple[Callable[[], Storage], ...] = (), place: int = 0,
        widened: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """`result`, as an op makes it of `inputs`."""
        sources = tuple((each, 0) if isinstance(each, Leaf) else _source(each) for each in inputs)
        node = Node(back, sources, tuple(map(self.pack, saved)), sums, alone, widened)
        self.nodes.append(node)
        return Tensor(result, node, place)

    def cast(self, x: Tensor, size: float) -> Tensor:
        """In another type, of so many bytes."""
        new, before = self.memory.new, x.size
        return x if size == before else self.op(new(size), lambda _: (new(before),), x)

    @property
    def pack(self) -> Pack:
        """What is kept now in place of what a node saves."""
        return self._packs[-1] if self._packs else _as_it_is

    @contextmanager
    def packing(self, pack: Pack) -> Iterator[None]:
        """Inside, `pack` says what is kept."""
        self._packs.append(pack)
        yield
        self._packs.pop()

    @contextmanager
    def aside(self, pack: Pack) -> Iterator[None]:
        """The same, and what is computed is not of this pass."""
        before, self.nodes = self.nodes, []
        with self.packing(pack):
            yield
        self.nodes = before

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


def _as_it_is(storage: Storage) -> Storage:
    return storage


def _source(tensor: Tensor) -> Source | None:
    return None if tensor.origin is None else (tensor.origin, tensor.place)

"""What is computed again in the backward, as tensors that are nothing but their bytes.

`Checkpoints` are torch.utils.checkpoint's: only a function's inputs are kept, until the first of its nodes
that reads what it saved has all of it computed once more. `MadeAgain` is that of the program
(runtime.programs.made_again): what a function makes is not kept by what reads it, which does not run again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from meshwise.estimate.live_tensors import Graph, Pack, Saved, Storage, Tensor

Make = Callable[..., tuple[Tensor, ...]]


class Checkpoints:
    """The functions that are computed again, of a graph.

    `is_lasting`: what comes back for a node stays as long as this, not only until it is read.
    """

    def __init__(self, graph: Graph, *, is_lasting: bool) -> None:
        self.graph, self.is_lasting = graph, is_lasting
        self.frame: _Frame | None = None
        self.is_again = False

    def again(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """`function` of `inputs`, computed again in the backward."""
        frame = _Frame(self, function, inputs)
        before, self.frame = self.frame, frame
        with self.graph.packing(frame.holder):
            found = function(*inputs)
        self.frame = before
        return found

    def kept(self, size: float) -> Storage:
        """A result of a frame that is not computed again: the second time it is taken as it was."""
        if self.frame is not None and self.is_again:
            return self.frame.results.popleft()
        result = self.graph.memory.new(size)
        if self.frame is not None:
            self.frame.results.append(result)
        return result


class _Frame:
    """A function and its inputs, what its nodes would have saved, and its `results` that are kept."""

    def __init__(self, of: Checkpoints, function: Callable[..., object], inputs: Sequence[Tensor]) -> None:
        self.of, self.function = of, function
        self.inputs = _packed(of.graph.pack, inputs)
        self.holders: list[ref[_Holder]] = []
        self.results: deque[Storage] = deque()

    def holder(self, _: Storage) -> _Holder:
        """In place of what a node saves."""
        found = _Holder(self)
        self.holders.append(ref(found))
        return found

    def run(self) -> None:
        """Bring back what its nodes save, at the first of them."""
        holders, self.holders = iter(self.holders), []

        def bring(storage: Storage) -> Storage:
            holder = next(holders)()
            if holder is not None:
                holder.storage = storage
            return storage

        inputs = _found(self.inputs)
        self.of.frame, self.of.is_again = self, True
        with self.of.graph.aside(bring):
            self.function(*inputs)
        self.of.frame, self.of.is_again = None, False


class _Holder:
    """In place of a storage that a frame brings back."""

    __slots__ = ("__weakref__", "frame", "storage")

    def __init__(self, frame: _Frame) -> None:
        self.frame = frame
        self.storage: Storage | None = None

    def found(self) -> Storage:
        """What came back."""
        if self.storage is None:
            self.frame.run()
        storage = self.storage
        assert storage is not None
        if not self.frame.of.is_lasting:
            self.storage = None
        return storage


def read_again(graph: Graph, make: Make, read: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`read` of what `make` makes, which the backward makes again."""
    again = MadeAgain(graph, make)
    results = again.make(*inputs)
    with again.reading(results):
        return read(*results)


class MadeAgain:
    """One call of a function, and what waits for what it makes."""

    def __init__(self, graph: Graph, function: Make) -> None:
        self.graph, self.function, self._pack = graph, function, graph.pack
        self._inputs: list[tuple[Saved, float]] = []
        self._waiting: dict[tuple[str, int], list[ref[_Missing]]] = {}

    def keep(self, *inputs: Tensor) -> None:
        """What the function will run on."""
        self._inputs = _packed(self._pack, inputs)

    def make(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The results of inputs, which are kept, and nothing on the way but they and weights."""
        self.keep(*inputs)
        known, number = {id(each.storage) for each in inputs}, -1

        def pack(storage: Storage) -> Saved:
            nonlocal number
            number += 1
            is_there = id(storage) in known or not storage.size
            return _Kept(self, self._pack(storage)) if is_there else self._missing("inside", number)

        with self.graph.packing(pack):
            return self.function(*inputs)

    @contextmanager
    def reading(self, results: Sequence[Tensor]) -> Iterator[None]:
        """Inside, results are not kept."""
        numbers = {id(result.storage): number for number, result in enumerate(results)}

        def pack(storage: Storage) -> Saved:
            number = numbers.get(id(storage))
            if number is None:
                return _Kept(self, self._pack(storage))
            return self._missing("result", number)

        with self.graph.packing(pack):
            yield

    def run(self) -> None:
        """Bring back what is missing."""
        number = -1

        def bring(storage: Storage) -> Storage:
            nonlocal number
            number += 1
            self._give("inside", number, storage)
            return storage

        inputs = _found(self._inputs)
        with self.graph.aside(bring):
            results = self.function(*inputs)
        for place, result in enumerate(results):
            self._give("result", place, result.storage)

    def _missing(self, kind: str, number: int) -> _Missing:
        found = _Missing(self)
        self._waiting.setdefault((kind, number), []).append(ref(found))
        return found

    def _give(self, kind: str, number: int, storage: Storage) -> None:
        for waiting in self._waiting.pop((kind, number), ()):
            missing = waiting()
            if missing is not None:
                missing.storage = storage


class _Missing:
    """In place of a storage, until it is made again; then it has it."""

    __slots__ = ("__weakref__", "_made", "storage")

    def __init__(self, made: MadeAgain) -> None:
        self._made = made
        self.storage: Storage | None = None

    def found(self) -> Storage:
        """What was made."""
        if self.storage is None:
            self._made.run()
        assert self.storage is not None
        return self.storage


class _Kept:
    """What stays beside what is missing; inputs stay as long as either."""

    __slots__ = ("_made", "_saved")

    def __init__(self, made: MadeAgain, saved: Saved) -> None:
        self._made, self._saved = made, saved

    def found(self) -> Storage:
        """What was kept."""
        return self._saved.found()


def _packed(pack: Pack, inputs: Sequence[Tensor]) -> list[tuple[Saved, float]]:
    return [(pack(each.storage), each.part) for each in inputs]


def _found(inputs: list[tuple[Saved, float]]) -> list[Tensor]:
    return [Tensor(saved.found(), None, 0, part) for saved, part in inputs]

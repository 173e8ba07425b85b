"""Results that their readers do not keep: the backward makes them again from what they were made of.

Of a function's results, and of what it makes on the way, autograd keeps nothing. The first node of the
backward that needs any of it has the function run once more on its inputs, which are kept, and all take
theirs. What reads the results does not run again (Megatron-LM's CheckpointWithoutOutput).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from meshwise.runtime.programs.context import Recorder
from meshwise.runtime.programs.local import local
from meshwise.runtime.torch_private import current_saved_tensors_hooks

Results = tuple[Tensor, ...]


class MadeAgain:
    """One call of a function, and who waits for what it makes."""

    def __init__(self, function: Callable[..., Results], recorder: Recorder) -> None:
        self._function, self._recorder = function, recorder
        self._pack: Callable[[Tensor], Any]
        self._unpack: Callable[[Any], Tensor]
        self._pack, self._unpack = current_saved_tensors_hooks(False) or (_as_it_is, _as_it_is)
        self._inputs: list[tuple[Any, bool]] = []
        self._waiting: dict[tuple[str, int], list[weakref.ref[_Missing]]] = {}

    def keep(self, *inputs: Tensor) -> None:
        """What the function will run on."""
        self._inputs = [(self._pack(tensor), tensor.requires_grad) for tensor in inputs]

    def make(self, *inputs: Tensor) -> Results:
        """The results of inputs, which are kept, and of what is kept on the way only they and weights."""
        self.keep(*inputs)
        known, number = {_storage(tensor) for tensor in inputs}, -1

        def pack(tensor: Tensor) -> Any:
            nonlocal number
            number += 1
            is_there = _storage(tensor) in known or self._recorder.is_weight(tensor)
            return self._pack(tensor) if is_there else _Missing(self, "inside", number)

        with saved_tensors_hooks(pack, self._found):
            return self._function(*inputs)

    @contextmanager
    def reading(self, results: Results) -> Iterator[None]:
        """Inside, results and views of them are not kept."""
        numbers = {_storage(result): number for number, result in enumerate(results)}

        def pack(tensor: Tensor) -> Any:
            number = numbers.get(_storage(tensor))
            return self._pack(tensor) if number is None else _Missing(self, "result", number, tensor)

        with saved_tensors_hooks(pack, self._found):
            yield

    def _found(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Missing):
            return self._unpack(packed)
        if packed.tensor is None:
            self._make_again()
        assert packed.tensor is not None
        return packed.tensor

    def wait(self, missing: _Missing, kind: str, number: int) -> None:
        """`missing` is for result `number`, or what is kept as the so-manieth inside."""
        self._waiting.setdefault((kind, number), []).append(weakref.ref(missing))

    def _make_again(self) -> None:
        inputs = [self._unpack(kept).detach().requires_grad_(trains) for kept, trains in self._inputs]
        number = -1

        def collect(tensor: Tensor) -> None:
            nonlocal number
            number += 1
            self._give("inside", number, tensor)

        with self._recorder.phase("recompute"), torch.enable_grad(), saved_tensors_hooks(collect, _as_it_is):
            results = self._function(*inputs)
        for place, result in enumerate(results):
            self._give("result", place, result)

    def _give(self, kind: str, number: int, tensor: Tensor) -> None:
        for waiting in self._waiting.pop((kind, number), ()):
            if (missing := waiting()) is not None:
                missing.tensor = missing.as_read(tensor.detach())
                self._recorder.hold(tensor, missing)


class _Missing:
    """In place of a kept tensor, until it is made again; then it holds it."""

    __slots__ = ("__weakref__", "_layout", "_made", "_view", "tensor")

    def __init__(self, made: MadeAgain, kind: str, number: int, view: Tensor | None = None) -> None:
        self._made = made
        part = view.to_local() if isinstance(view, DTensor) else view
        self._view = None if part is None else (part.shape, part.stride(), part.storage_offset())
        self._layout = (view.device_mesh, view.placements) if isinstance(view, DTensor) else None
        self.tensor: Tensor | None = None
        made.wait(self, kind, number)

    def as_read(self, tensor: Tensor) -> Tensor:
        """The part of a result that was read, or all."""
        part = tensor if self._view is None else tensor.as_strided(*self._view)
        return part if self._layout is None else DTensor.from_local(part, *self._layout, run_check=False)


def _storage(tensor: Tensor) -> int:
    return int(local(tensor).untyped_storage()._cdata)


def _as_it_is(tensor: Any) -> Any:
    return tensor

"""Recomputation where a schedule splits the backward: once, before the gradient of the input.

torch computes gradients of weights apart, group by group, and its checkpoints would run again for each. Here
what came back for the gradient of the input stays until the graph that saved it goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint
from torch.utils.checkpoint import GraphExecGroup

from meshwise.runtime.torch_private import CheckpointHolder


class _Handles(dict[Any, Any]):
    """What came back for a saved tensor: torch lets go of it, by None, when it is used for the first time."""

    def __setitem__(self, group: Any, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(group, handle)


class _LastingHolder(CheckpointHolder):
    def __init__(self) -> None:
        super().__init__()
        self.handles = _Handles()


@contextmanager
def redone_once() -> Iterator[None]:
    """Inside, a region that is recomputed runs once more, and what came back stays as long as its graph."""
    checkpoint._Holder = _LastingHolder
    try:
        with GraphExecGroup():
            yield
    finally:
        checkpoint._Holder = CheckpointHolder

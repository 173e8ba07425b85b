"""What autograd keeps for the backward, at any moment: storages, each counted once, weights apart.

A storage is kept from the moment a node of the graph saves a tensor in it until the last such node lets go.
What `torch.utils.checkpoint` computes again is kept by it, from then until the backward takes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as checkpointing


class SavedTensor:
    """A tensor that a node of the graph has saved, in place of the tensor itself."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Kept:
    """Bytes kept now and at most."""

    def __init__(self) -> None:
        self.bytes, self.peak_bytes = 0.0, 0.0
        self._holders: dict[int, int] = {}

    def hold(self, storage: torch.UntypedStorage, holder: object) -> None:
        """`storage` is kept for as long as `holder` is."""
        key, size_bytes = storage._cdata, storage.nbytes()
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] == 1:
            self.bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(holder, self._let_go, key, size_bytes)

    def _let_go(self, key: int, size_bytes: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.bytes -= size_bytes


def seen_through(pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """`pack` as a hook that a selective checkpoint takes for one of its own, of which it asks nothing.

    Before hooks of others torch 2.14 warns that it will hand them what it keeps, which is watched already.
    """
    hook = partial(pack)
    vars(hook).update(_checkpoint_internal=True, _user_hooks=None)
    return hook


def watched_checkpoints(keep: Callable[[torch.Tensor, object], None]) -> AbstractContextManager[Any]:
    """Tells `keep` what `torch.utils.checkpoint` holds beside its inputs, and what holds it."""
    holders: Any = {"_recomputation_hook": _recomputation_hook(keep), "_VersionWrapper": _kept_result(keep)}
    return mock.patch.multiple(checkpointing, **holders)


def _kept_result(keep: Callable[[torch.Tensor, object], None]) -> type:
    """torch's holder of a result that a recomputation takes as it is, which tells `keep` of it and itself."""

    class Watched(checkpointing._VersionWrapper):
        def __init__(self, value: Any, **hooks: Any) -> None:
            super().__init__(value, **hooks)
            if isinstance(value, torch.Tensor):
                keep(value, self)

    return Watched


def _recomputation_hook(keep: Callable[[torch.Tensor, object], None]) -> type:
    """torch's hook around a recomputation, which tells `keep` each tensor that comes back, and its holder."""

    class Watched(checkpointing._recomputation_hook):
        def __init__(self, frame_ref: Any, gid: Any) -> None:
            super().__init__(frame_ref, gid)
            pack: Callable[[torch.Tensor], Any] = self.pack_hook  # type: ignore[has-type]

            def watched_pack(tensor: torch.Tensor) -> Any:
                frame = frame_ref()
                number = frame.recomp_counter[gid]
                try:
                    return pack(tensor)
                finally:  # it raises at the last tensor where no more is computed than is needed
                    holder = frame.weak_holders[number]() if number < len(frame.weak_holders) else None
                    if holder is not None:
                        keep(tensor, holder.handles[gid])

            self.pack_hook = watched_pack

    return Watched

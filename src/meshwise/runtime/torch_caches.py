"""What torch.distributed remembers of meshes and their groups, for a process that makes them often.

Its caches hold groups that have ended. They are found among all objects of the process, which also takes
the collector of garbage a quarter of a second to look through; `freeze` takes what is imported out of that.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

from meshwise.runtime.programs.context import forget_groups

_frozen: list[Any] = []


def freeze() -> None:
    """Say that all objects of now last as long as the process; forks of it share their memory."""
    _frozen.extend(_caches())
    gc.collect()
    gc.freeze()


def forget() -> None:
    """Let go of groups that have ended."""
    for cache in _frozen + _caches():
        cache.cache_clear()
    forget_groups()
    gc.collect()


def _caches() -> list[Any]:
    return [
        held
        for held in gc.get_objects()
        if type(held) is functools._lru_cache_wrapper  # isinstance would wake lazy objects of torch
        and held.__module__.startswith("torch.distributed")
    ]

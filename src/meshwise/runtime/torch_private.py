"""Every private name of torch that meshwise uses, and where torch keeps it (`torch_private.json`).

Torch may move or change these with any release. `tests/test_torch_private.py` says which are missing in the
torch at hand, so that a new release is tried by installing it and running that test. Nothing is imported
before it is asked for, and nothing of meshwise at all: the hook of a capture loads this file in processes of
others, whose torch may be older and whose Python may not hold meshwise.

    from meshwise.runtime.torch_private import FakeTensorMode
"""

from __future__ import annotations

import json
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor, FakeTensorMode as FakeTensorMode
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    PipelineRuntime = _PipelineScheduleRuntime

_GROUPS = json.loads(Path(__file__).with_suffix(".json").read_text())
HOMES: dict[str, str] = {name: home for group in _GROUPS.values() for name, home in group.items()}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"torch_private has no {name!r}")
    globals()[name] = found = resolve_name(HOMES[name])  # asked for once: some are called at every op
    return found


def release(version: str) -> tuple[int, ...]:
    """The major and the minor number of a version of torch."""
    return tuple(map(int, version.split(".")[:2]))


def need_torch(feature: str, least: str) -> None:
    """ImportError in one sentence where the torch at hand is older than `feature` needs, or there is none."""
    need = f"{feature} need torch {least} or newer"
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"{need}, which cannot be imported: {error}") from None
    if release(torch.__version__) < release(least):
        raise ImportError(f"{need}, and this is {torch.__version__}")

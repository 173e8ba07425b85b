"""torchtitan's selective activation checkpointing (distributed/activation_checkpoint.py, b5bcd76).

A block runs again in the backward, all of it, but for the ops whose results were kept: attention,
reduce-scatters, all-to-alls, and every other matmul of a weight, the first one included. Matmuls of a router
do not count, nor do those of stacks of experts. torch keeps a result until the op's turn comes again.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from meshwise.runtime.programs.attention_kernels import attention
from meshwise.runtime.programs.linear_layers import local
from meshwise.runtime.torch_private import TorchDispatchMode, disable_current_modes

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
MATMULS = (aten.mm.default, aten.addmm.default, aten._scaled_mm.default)
KEPT = (attention._opoverload, c10d.reduce_scatter_tensor.default, c10d.all_to_all_single.default)


def per_op_contexts(router: nn.Linear | None) -> Callable[[], tuple[Any, Any]]:
    """For `torch.utils.checkpoint.checkpoint`: what one block keeps, which may have a router."""
    number = 0

    def policy(_context: Any, op: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        nonlocal number
        is_kept = op in KEPT
        right = args[2 if op is aten.addmm.default else 1] if op in MATMULS else None
        if right is not None and (router is None or not _shares_storage(right, local(router.weight))):
            number += 1
            is_kept = number % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> tuple[Any, Any]:
        forward, backward = create_selective_checkpoint_contexts(policy)
        return _without_labels(forward), _without_labels(backward)

    return contexts


def _shares_storage(tensor: Tensor, other: Tensor) -> bool:
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)


@contextmanager
def _without_labels(context: AbstractContextManager[Any]) -> Iterator[None]:
    """`context` that does not see labels of profiles: FSDP writes another number of them the second time."""
    with context, _LabelsApart():
        yield


class _LabelsApart(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with disable_current_modes() if func.namespace == "profiler" else nullcontext():
            return func(*args, **(kwargs or {}))

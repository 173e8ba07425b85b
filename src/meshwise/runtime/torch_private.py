"""Every private name of torch that meshwise uses, and where torch keeps it.

Torch may move or change these with any release. `tests/test_torch_private.py` says which are missing in the
torch at hand, so that a new release is tried by installing it and running that test. Nothing is imported
before it is asked for, and nothing of meshwise at all: the hook of a capture loads this file in processes of
others, whose torch may be older and whose Python may not hold meshwise.

    from meshwise.runtime.torch_private import FakeTensorMode
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    PipelineRuntime = _PipelineScheduleRuntime

HOMES = {
    # fake tensors and fake ranks
    "FakeTensor": "torch._subclasses.fake_tensor.FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor.FakeTensorMode",
    "FakeStore": "torch.testing._internal.distributed.fake_pg.FakeStore",
    "set_default_backend": "torch.distributed.ProcessGroup._set_default_backend",
    "FakeWork": "torch._C._distributed_c10d.FakeWork",
    "setup_private_device": "torch.utils.backend_registration._setup_privateuseone_for_python_backend",
    "ensure_cuda_device_guard": "torch._C._ensureCUDADeviceGuardSet",
    "swap_tensor_impl": "torch._C._swap_tensor_impl",
    # what the recorder sees
    "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
    "disable_current_modes": "torch.utils._python_dispatch._disable_current_modes",
    "current_dispatch_mode": "torch.utils._python_dispatch._get_current_dispatch_mode",
    "tree_leaves": "torch.utils._pytree.tree_leaves",
    "tree_map": "torch.utils._pytree.tree_map",
    "current_autograd_node": "torch._C._current_autograd_node",
    "current_graph_task_id": "torch._C._current_graph_task_id",
    "will_engine_execute_node": "torch._C._will_engine_execute_node",
    "autograd_sequence_nr": "torch.autograd._get_sequence_nr",
    # DTensor, FSDP2, context parallelism
    "dtensor_dispatch": "torch.distributed.tensor._dispatch",
    "ShardingPropagator": "torch.distributed.tensor._sharding_prop.ShardingPropagator",
    "gen_transform_infos": "torch.distributed.tensor._redistribute._gen_transform_infos",
    "clear_redistribute_planner_cache": (
        "torch.distributed.tensor._redistribute.clear_redistribute_planner_cache"
    ),
    "dtensor_dispatcher": "torch.distributed.tensor.DTensor._op_dispatcher",
    "clear_fast_sharding_cache": "torch._C._clear_DTensor_sharding_propagator_cache",
    "AsyncCollectiveTensor": "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    "all_to_all_single": "torch.distributed._functional_collectives.all_to_all_single",
    "all_gather_single": "torch.distributed._functional_collectives.all_gather_single_autograd",
    "reduce_scatter_single": "torch.distributed._functional_collectives.reduce_scatter_single_autograd",
    "fsdp_param": "torch.distributed.fsdp._fully_shard._fsdp_param",
    "ShardedTensor": "torch.distributed._shard.sharded_tensor.ShardedTensor",
    "fsdp1_states": "torch.distributed.fsdp._optim_utils",
    "MeshLayout": "torch.distributed._mesh_layout._MeshLayout",
    "pipelining_utils": "torch.distributed.pipelining._utils",
    "pipelining_schedules": "torch.distributed.pipelining.schedules",
    "PipelineAction": "torch.distributed.pipelining.schedules._Action",
    "PipelineRuntime": "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
    "ring_attention": "torch.distributed.tensor.experimental._context_parallel._attention",
    # measuring and capturing
    "scaled_mm": "torch._scaled_mm",
    "ProfilerConfig": "torch._C._profiler._ExperimentalConfig",
    "lazy_modules": "torch._lazy_modules",
    "profiler_enabled": "torch._C._autograd._profiler_enabled",
    "add_metadata_json": "torch.autograd._add_metadata_json",
    "dump_flight_recorder_json": "torch._C._distributed_c10d._dump_fr_trace_json",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"torch_private has no {name!r}")
    return resolve_name(HOMES[name])


def release(version: str) -> tuple[int, ...]:
    """The major and the minor number of a version of torch."""
    return tuple(map(int, version.split(".")[:2]))


def need_torch(feature: str, least: str) -> None:
    """ImportError in one sentence where the torch at hand is older than `feature` needs, or there is none."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{feature} need torch {least} or newer, which cannot be imported: {error}"
        ) from None
    have = torch.__version__
    if release(have) < release(least):
        raise ImportError(f"{feature} need torch {least} or newer, and this is {have}")

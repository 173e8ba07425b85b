"""How a decoder is cut over ranks, applied from outside to a plain one.

Tensor and sequence parallelism (DTensor): q, k, v, gate and up are cut by columns, out and down by rows, the
embedding and the head by vocabulary; norms and residuals run on a part of the sequence each. Data
parallelism (FSDP2): weights, gradients and optimizer states of the embedding, of each block and of the head
are spread over the replicas, gathered where they are used; they are kept, and reduced, in fp32.

Source: the tensor-parallel tutorial, `fully_shard`, and torchtitan's `parallelize_llama`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, parallel

from meshwise.runtime.fakes import Parts
from meshwise.runtime.programs.decoder import (
    WHOLE,
    Block,
    Decoder,
    ExpertPlace,
    Experts,
    LatentAttention,
    Mixture,
    fill,
)
from meshwise.runtime.programs.linear_layers import Adapted, cut_as
from meshwise.runtime.torch_private import fsdp_param


def cut_tensors(decoder: Decoder, mesh: DeviceMesh, rows: Shard | Replicate) -> None:
    """Tensor parallelism over `mesh`, in place; `rows`: how activations are cut between matmuls, or not.

    What each rank does for all tokens is not cut at all.
    """
    is_split = isinstance(rows, Shard)
    ends: dict[str, Any] = {
        "embedding.tokens": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "head.norm": parallel.SequenceParallel(),
        "head.logits": parallel.ColwiseParallel(input_layouts=rows, use_local_output=False),
    }
    if not is_split:
        del ends["head.norm"]
    held = {name for name in ends if getattr(decoder, name.split(".")[0]) is not None}
    parallel.parallelize_module(decoder, mesh, {name: style for name, style in ends.items() if name in held})
    decoder.tie()
    if is_split and decoder.embedding is not None and decoder.embedding.positions is not None:
        whole = distribute_tensor(decoder.embedding.positions.data, mesh, [Replicate()])
        decoder.embedding.positions = nn.Parameter(whole)
    columns = parallel.ColwiseParallel(input_layouts=rows, output_layouts=Replicate(), use_local_output=False)
    names = ("embedding_norm", "hidden_norm", "norm") if is_split else ()
    for further in decoder.further:
        norms = dict.fromkeys(names, parallel.SequenceParallel())
        parallel.parallelize_module(further, mesh, {"projection": columns, **norms})
    for layer in decoder.blocks:
        styles: dict[str, Any] = {}
        for name, style in block_plan(rows, layer).items():
            if isinstance(style, parallel.SequenceParallel) and not is_split:
                continue
            is_adapted = isinstance(layer.get_submodule(name), Adapted)
            styles |= cut_as(style, name, rows) if is_adapted else {name: style}
        parallel.parallelize_module(layer, mesh, styles)
        if isinstance(layer.mlp, Mixture):
            for module in (layer.mlp, layer.mlp.router):
                for name, parameter in list(module.named_parameters(recurse=False)):
                    whole = distribute_tensor(parameter.data, mesh, [Replicate()])
                    setattr(module, name, nn.Parameter(whole))


def block_plan(rows: Shard | Replicate, layer: Block) -> dict[str, Any]:
    """The styles of a block's modules; `rows` is how activations between them are cut.

    Latents and routed experts take each rank's own tokens, as they are.
    """
    gather = {"input_layouts": (rows,), "desired_input_layouts": (Replicate(),)}
    plan: dict[str, Any] = dict.fromkeys(("norm1", "norm2"), parallel.SequenceParallel())
    plan["attention.out"] = parallel.RowwiseParallel(output_layouts=rows)
    if isinstance(layer.attention, LatentAttention):
        plan |= {f"attention.{name}": parallel.ColwiseParallel(input_layouts=rows) for name in ("q", "kv")}
        plan |= {f"attention.{name}": parallel.SequenceParallel() for name in ("kv_down", "kv_norm")}
        if not isinstance(layer.attention.q_down, nn.Identity):
            plan |= {f"attention.{name}": parallel.SequenceParallel() for name in ("q_down", "q_norm")}
        plan["attention.shared_key"] = parallel.PrepareModuleInput(**gather)
    else:
        plan |= {"attention": parallel.PrepareModuleInput(**gather)}
        plan |= {f"attention.{name}": parallel.ColwiseParallel() for name in "qkv"}
    is_mixture = isinstance(layer.mlp, Mixture)
    mlp, name = (layer.mlp.shared, "mlp.shared") if is_mixture else (layer.mlp, "mlp")
    if mlp is None:
        return plan
    columns = [f"{name}.up"] if mlp.gate is None else [f"{name}.gate", f"{name}.up"]
    plan |= {name: parallel.PrepareModuleInput(**gather)}
    plan |= {column: parallel.ColwiseParallel() for column in columns}
    return plan | {f"{name}.down": parallel.RowwiseParallel(output_layouts=rows)}


def shard_states(
    decoder: Decoder, mesh: DeviceMesh, experts_mesh: DeviceMesh | None, device: torch.device,
    policy: MixedPrecisionPolicy, kept: torch.dtype, seed: int | None, *, reshard_after_forward: bool,
    on_host: bool,
) -> None:  # fmt: skip
    """FSDP2 over `mesh`: the embedding, each block, the head; its weights are in the type `kept`.

    Experts are spread over `experts_mesh`, the ranks that hold the same ones, along the width of their
    matrices; FSDP2 divides the sum of their gradients by the number of these ranks, not by the replicas.

    The decoder comes without storage (meta tensors); each group gets its weights on `device` just before it
    is cut, so that never more than one is whole: from `seed`, or unset (None), when tensor parallelism leaves
    no more of them than this rank's part. Blocks are gathered again in the backward if
    `reshard_after_forward`; the ends stay gathered till then. `on_host`: the shards lie in the host's memory.
    """
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host else OffloadPolicy()
    shard = partial(fully_shard, mp_policy=policy, offload_policy=offload)
    names = {id(parameter): decoder.alias(name) for name, parameter in decoder.named_parameters()}
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(decoder.trains(name))
    for modules in _groups(decoder):
        _materialize(modules, names, partial(_made, device=device, dtype=kept, seed=seed))
        is_block = isinstance(modules[0], Block)
        with mock.patch.object(fsdp_param, "_chunk_with_empty", Parts):
            if isinstance(modules[0], Block) and isinstance(modules[0].mlp, Mixture):
                experts = modules[0].mlp.experts
                shard(
                    experts, mesh=experts_mesh, shard_placement_fn=lambda _: Shard(1),
                    reshard_after_forward=reshard_after_forward,
                )  # fmt: skip
            shard(
                modules if len(modules) > 1 else modules[0], mesh=mesh,
                reshard_after_forward=reshard_after_forward and is_block,
            )  # fmt: skip
    shard(decoder, mesh=mesh)


def _groups(decoder: Decoder) -> list[list[nn.Module]]:
    """What is gathered together; a table that is embedding and head at once makes them one group."""
    ends = [module for module in (decoder.embedding, decoder.head) if module is not None]
    others: list[list[nn.Module]] = [[layer] for layer in decoder.blocks]
    others += [[one for one in further.children() if one is not further.block] for further in decoder.further]
    return [ends, *others] if decoder.tie() else [*([end] for end in ends), *others]


def _materialize(modules: list[nn.Module], names: dict[int, str], make: Callable[..., Tensor]) -> None:
    """Give the parameters of `modules` storage and numbers: what `make` makes of each, its name and place."""
    made: dict[int, nn.Parameter] = {}  # a tied one is made once
    owners = [owner for module in modules for owner in module.modules()]
    for owner in owners:
        for key, parameter in list(owner.named_parameters(recurse=False)):
            if id(parameter) not in made:
                place = owner.place if isinstance(owner, Experts) else WHOLE
                whole = make(parameter, names[id(parameter)], place)
                made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            setattr(owner, key, made[id(parameter)])


def _made(
    parameter: nn.Parameter, name: str, place: ExpertPlace, *, device: torch.device, dtype: torch.dtype,
    seed: int | None,
) -> Tensor:  # fmt: skip
    """A weight whole, of numbers that depend on its name and `seed` alone, and then cut as `parameter` is.

    One that has no numbers needs its own part alone.
    """
    cut = parameter if isinstance(parameter, DTensor) else None
    if cut is not None and seed is None:
        own = torch.empty(cut.to_local().shape, dtype=dtype, device=device)
        return DTensor.from_local(
            own, cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
        )
    whole = torch.empty(parameter.shape, dtype=dtype, device=device)
    if seed is not None:
        fill(name, whole, seed, place)
    if cut is None:
        return whole
    return distribute_tensor(whole, cut.device_mesh, cut.placements, src_data_rank=None)


def local_bytes(tensors: list[Tensor]) -> int:
    """Bytes that this rank holds of `tensors`."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)

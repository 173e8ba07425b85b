"""One rank of a training step: its piece of the model, cut as the plan says, and its tokens.

A plain decoder is cut from outside. Tensor and sequence parallelism (DTensor): q, k, v, gate and up are cut
by columns, out and down by rows, the embedding and the head by vocabulary; norms and residuals run on a part
of the sequence each. Data parallelism (FSDP2): weights, gradients and optimizer states of the embedding, of
each block and of the head are spread over the replicas, gathered where they are used; they are kept, and
reduced, in fp32.

Source: the tensor-parallel tutorial, `fully_shard`, and torchtitan's `parallelize_llama`.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, parallel
from torch.distributed.tensor.parallel import loss_parallel

from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import Plan, number_of
from meshwise.plan.stages import V_SHAPED, chunks_of_rank
from meshwise.program.implementation import stops_early
from meshwise.runtime.fakes import Parts
from meshwise.runtime.programs import decoder as plain
from meshwise.runtime.programs.attention_kernels import Attend, RingAttend, own_places, wide_dtype
from meshwise.runtime.programs.context import Context, line_of, numbers_of
from meshwise.runtime.programs.functions import turned_width, turns
from meshwise.runtime.programs.linear_layers import Adapted, cut_as
from meshwise.runtime.programs.pipeline import make_schedule
from meshwise.runtime.programs.tensor_parallel.exchange import ALONE, MeshAxis, axis_of
from meshwise.runtime.recorder import own_part
from meshwise.runtime.torch_private import fsdp_param


class Trainer:
    """The modules, groups and tokens of a rank, and how it runs a step."""

    def __init__(self, options: Any, plan: Plan, model: Model, on: Mesh, context: Context) -> None:
        self.options, self.context = options, context
        self.plan, self.model, self.rank = plan, model, context.rank
        self.dp, self.num = int(on.dp), int(on.num_microbatches)
        axes = plan.pp, self.dp, int(on.ring), int(on.ulysses), plan.tp
        self.world = np.arange(context.world_size).reshape(axes)
        self.pp, self.replica, *_, self.tp = map(int, np.unravel_index(self.rank, axes))
        self.sharing = int(on.shard_ranks(self.dp * plan.cp)), int(on.shard_ranks(on.expert_replicas))
        self.line = context.group("pp", line_of(self.world, self.rank, 0))
        # the ranks of this one's stage, and under DualPipe those of the stage with the same weights
        stages = {self.pp, plan.pp - 1 - self.pp if plan.schedule == "dualpipe" else self.pp}
        self.holders = self.world[sorted(stages)].flatten().tolist()
        replicas = _copies_and_shards(len(self.holders) // plan.tp, self.sharing[0])
        self.mesh = context.grid(self.holders, **replicas, tp=plan.tp)
        self.replica_axes = tuple(replicas)
        # the ranks whose keys come round, and, neighbours, those that exchange heads
        self.ring, self.heads = (self._along("cp", line_of(self.world, self.rank, dim)) for dim in (2, 3))
        self.ends = self._ends()
        self.ep, self.etp = plan.ep, int(on.etp)
        self.experts, self.experts_mesh = self._expert_groups()
        with context.recorder.setup():
            places = own_places(options.seq, self.ring.size, self.ring.index, context.device)
            self.places = places.chunk(self.heads.size)[self.heads.index]
            self.setting = self._setting()
            held = chunks_of_rank(model, plan.pp, plan.vpp, plan.schedule, plan.stages, self.pp)
            self.pieces = {int(chunk.index): self._piece(int(chunk.index), layers) for chunk, layers in held}
            self.tokens, self.labels = self._tokens()
            context.recorder.weights(self.tokens, self.labels)  # inputs, not activations
        self._step = self._alone if plan.pp == 1 else self._pipeline()

    def parameters(self) -> list[Tensor]:
        """All weights of this rank."""
        return [parameter for piece in self.pieces.values() for parameter in piece.parameters()]

    def forward_backward(self) -> float | None:
        """All microbatches; the mean loss of the whole batch (None where numbers are not real)."""
        with warnings.catch_warnings(), loss_parallel() if self.plan.tp > 1 else nullcontext():
            # outputs are views: none is written
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            losses = self._step(self.tokens, self.labels)
        self._sum_tied_gradients()
        self._scale_gradients_of_experts()
        with self.context.recorder.setup():
            total = torch.zeros((), dtype=torch.float64, device=self.context.device)
            for loss in losses:
                total += loss.detach()
            for axis in self.replica_axes:
                dist.all_reduce(total, op=dist.ReduceOp.AVG, group=self.mesh.get_group(axis))
            if self.plan.pp > 1:  # ranks without losses have zero
                dist.all_reduce(total, op=dist.ReduceOp.MAX, group=self.line)
        return None if self.context.is_fake else float(total)

    def _alone(self, tokens: Tensor, labels: Tensor) -> list[Tensor]:
        """Without a pipeline: forward and backward of one microbatch after the other."""
        decoder, losses = self.pieces[0], []
        parts = zip(tokens.chunk(self.num), labels.chunk(self.num), strict=True)
        for number, (part, targets) in enumerate(parts):
            is_last = number == self.num - 1
            decoder.set_requires_gradient_sync(is_last or self.plan.zero >= 2)
            decoder.set_reshard_after_backward(is_last or self.plan.zero == 3)
            loss = decoder(part, targets) / self.num
            loss.backward()
            losses.append(loss.detach())
        return losses

    def _pipeline(self) -> Callable[[Tensor, Tensor], list[Tensor]]:
        plan = self.plan
        tokens = self.options.seq // plan.cp // (plan.tp if plan.sequence_parallel else 1)
        shape = (self.options.microbatch, tokens, self.model.hidden)
        return make_schedule(
            plan.schedule, self.pieces, plan.pp * plan.vpp, self.num, (shape, self.context.dtype(plan.dtype)),
            self.line, self.context,
        )  # fmt: skip

    def _along(self, axis: str, ranks: Sequence[int]) -> MeshAxis:
        """This rank's place among `ranks`, which form a group if they are several."""
        return ALONE if len(ranks) == 1 else axis_of(self.context.group(axis, ranks))

    def _expert_groups(self) -> tuple[plain.ExpertPlace, DeviceMesh | None]:
        """This rank's place among those that hold experts, and the ranks that hold the same parts of them."""
        if self.model.moe is None:
            return plain.WHOLE, None
        both = self.ep * self.etp
        grid = self.world.reshape(-1, self.ep, self.etp)
        sharing = self._along("ep", line_of(grid, self.rank, 1))
        parts = self._along("tp", line_of(grid, self.rank, 2))
        alike = [rank for rank in self.holders if rank % both == self.rank % both]
        same_parts = self.context.grid(alike, **_copies_and_shards(len(alike), self.sharing[1]))
        return plain.ExpertPlace(sharing, parts), same_parts

    def _ends(self) -> dist.ProcessGroup | None:
        """The first and the last rank of this rank's pipeline, each with its copy of a tied table."""
        num, place = self.plan.pp, self.pp
        has_both = self.plan.schedule in (*V_SHAPED, "dualpipe")  # a rank with one end has the other
        if num == 1 or has_both or not self.model.shares_table or place not in (0, num - 1):
            return None
        return self.context.group("pp", line_of(self.world, self.rank, 0)[:: num - 1])

    def _sum_tied_gradients(self) -> None:
        """Both copies of a tied table get the sum of their gradients, as Megatron-LM does it."""
        tables = [table for piece in self.pieces.values() if (table := piece.tied()) is not None]
        grads = [table.grad.to_local() for table in tables]
        with self.context.recorder.phase("backward"):
            if len(grads) == 2:  # some schedules bring the model's end back to the first rank
                grads[0].add_(grads[1])
                grads[1].copy_(grads[0])
            elif grads and grads[0].numel():
                dist.all_reduce(grads[0], group=self.ends)

    def _scale_gradients_of_experts(self) -> None:
        """From the mean over ranks with the same parts of experts, dp cp tp / (ep etp), to one over dp cp."""
        if self.plan.tp == self.ep * self.etp or self.plan.lora_rank:
            return
        with self.context.recorder.phase("backward"):
            for piece in self.pieces.values():
                for module in piece.modules():
                    for parameter in module.parameters() if isinstance(module, plain.Experts) else ():
                        parameter.grad.mul_(self.plan.tp / (self.ep * self.etp))

    def _setting(self) -> plain.Setting:
        plan, context = self.plan, self.context
        angles = turns(self.places, turned_width(self.model), context.dtype(plan.dtype))
        own = self.places.chunk(plan.tp)[self.tp] if plan.sequence_parallel else self.places
        context.recorder.weights(*angles, own)  # constants
        way = None
        if self.model.moe is not None:
            way = plain.routes(own, self.options.microbatch, self.model, self.experts)
            context.recorder.weights(way.experts, way.sources, way.back)
        redone = plan.recompute_modules if plan.recompute == "selective" else ()
        if "moe" in redone:  # covers what is inside
            redone = tuple(module for module in redone if module != "shared_experts")
        layers = number_of("recompute_layers", plan.recompute_layers) / plan.vpp
        return plain.Setting(
            turns=angles, own_places=own, recorder=context.recorder, attend=self._attend, heads=self.heads,
            redone_modules=redone, redone_layers=layers if plan.recompute == "full" else 0.0, routes=way,
            is_narrow=plan.dtype == "fp8", lora_rank=plan.lora_rank, stops_early=stops_early(plan),
        )  # fmt: skip

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention, to the keys of all ranks of a ring."""
        if self.ring.size == 1:
            return Attend.apply(q, k, v, True)
        return RingAttend.apply(q, k, v, self.ring.group, self.plan.cp_kind)

    def _piece(self, stage: int, layers: range) -> plain.Decoder:
        """Some layers of the model, cut by tp and spread over the replicas."""
        plan, context = self.plan, self.context
        dtype = context.dtype(plan.dtype)
        wide = wide_dtype(dtype)
        reduced = wide if plan.grad_dtype == "fp32" else context.dtype(plan.grad_dtype)
        last = plan.pp * plan.vpp - 1
        with torch.device("meta"), numbers_of(dtype if plan.optimizer == "adam-bf16" else wide):
            decoder = plain.Decoder(
                self.model, self.setting, layers, is_first=stage == 0, is_last=stage == last
            )
        if plan.tp > 1:
            cut_tensors(decoder, self.mesh["tp"], Shard(1) if plan.sequence_parallel else Replicate())
        offload = fsdp.CPUOffloadPolicy(pin_memory=context.device.type == "cuda")
        policies = {
            "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced),
            "offload_policy": offload if plan.offload_optimizer else fsdp.OffloadPolicy(),
        }
        shard_states(
            decoder, self.mesh[self.replica_axes], self.experts_mesh, policies,
            reshard_after_forward=plan.pp == 1 and plan.zero == 3,
        )  # fmt: skip
        home = torch.device("cpu") if plan.offload_optimizer else context.device
        make_states(decoder, home, None if context.is_fake else self.options.seed, context.device)

        def gathered_are_weights(module: nn.Module, _: object) -> None:
            context.recorder.weights(*module.parameters())

        for module in decoder.modules():
            if isinstance(module, fsdp.FSDPModule):
                if plan.zero < 3:
                    module.reshard = lambda: None  # looped schedules call it between two visits of a chunk
                module.register_forward_pre_hook(gathered_are_weights)
        return decoder

    def _tokens(self) -> tuple[Tensor, Tensor]:
        """This rank's tokens [microbatches x sequences, own tokens], and of each the next ones.

        Labels [microbatches x sequences, number, own tokens]: those of one kind lie together, so that a loss
        reads them as they are.
        """
        mine = self.all_tokens()[self.replica]
        tokens, *labels = (mine[:, self.places + later] for later in range(2 + self.model.mtp_layers))
        return tokens.contiguous(), torch.stack(labels).transpose(0, 1)

    def all_tokens(self) -> Tensor:
        """The tokens of a step in the whole world: [replicas, microbatches x sequences, tokens]."""
        torch.manual_seed(self.options.seed)
        length = self.options.seq + 1 + self.model.mtp_layers
        shape = self.dp, self.num * self.options.microbatch, length
        return torch.randint(self.model.vocab, shape).to(self.context.device)


def _copies_and_shards(replicas: int, sharing: int) -> dict[str, int]:
    """Axes of `replicas` ranks of which each `sharing` neighbours share the states."""
    return {"dp": replicas} if sharing == replicas else {"copies": replicas // sharing, "dp": sharing}


def cut_tensors(decoder: plain.Decoder, mesh: DeviceMesh, rows: Shard | Replicate) -> None:
    """Tensor parallelism over `mesh`, in place; `rows`: how activations are cut between matmuls, or not.

    Where they are, weights that every rank has whole see a part of the tokens on each.
    """
    ends: dict[str, Any] = {
        "embedding.tokens": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "head.logits": parallel.ColwiseParallel(input_layouts=rows, use_local_output=False),
    }
    held = {name for name in ends if getattr(decoder, name.split(".")[0]) is not None}
    parallel.parallelize_module(decoder, mesh, {name: style for name, style in ends.items() if name in held})
    decoder.tie()
    columns = parallel.ColwiseParallel(input_layouts=rows, output_layouts=Replicate(), use_local_output=False)
    for further in decoder.further:
        parallel.parallelize_module(further, mesh, {"projection": columns})
    for layer in decoder.blocks:
        styles: dict[str, Any] = {}
        for name, style in block_plan(rows, layer).items():
            is_adapted = isinstance(layer.get_submodule(name), Adapted)
            styles |= cut_as(style, name, rows) if is_adapted else {name: style}
        parallel.parallelize_module(layer, mesh, styles)
    for module in decoder.modules() if isinstance(rows, Shard) else ():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor) and not isinstance(module, plain.Experts):
                whole = distribute_tensor(parameter.data, mesh, [Replicate()])
                setattr(module, name, nn.Parameter(whole))


def block_plan(rows: Shard | Replicate, layer: plain.Block) -> dict[str, Any]:
    """The styles of a block's modules; `rows` is how activations between them are cut.

    Norms, latents and routed experts take each rank's own tokens, as they are.
    """
    gather = {"input_layouts": (rows,), "desired_input_layouts": (Replicate(),)}
    plan: dict[str, Any] = {"attention.out": parallel.RowwiseParallel(output_layouts=rows)}
    if isinstance(layer.attention, plain.LatentAttention):
        plan |= {f"attention.{name}": parallel.ColwiseParallel(input_layouts=rows) for name in ("q", "kv")}
        plan["attention.shared_key"] = parallel.PrepareModuleInput(**gather)
    else:
        plan |= {"attention": parallel.PrepareModuleInput(**gather)}
        plan |= {f"attention.{name}": parallel.ColwiseParallel() for name in "qkv"}
    is_mixture = isinstance(layer.mlp, plain.Mixture)
    mlp, name = (layer.mlp.shared, "mlp.shared") if is_mixture else (layer.mlp, "mlp")
    if mlp is None:
        return plan
    columns = [f"{name}.up"] if mlp.gate is None else [f"{name}.gate", f"{name}.up"]
    plan |= {name: parallel.PrepareModuleInput(**gather)}
    plan |= {column: parallel.ColwiseParallel() for column in columns}
    return plan | {f"{name}.down": parallel.RowwiseParallel(output_layouts=rows)}


def shard_states(
    decoder: plain.Decoder, mesh: DeviceMesh, experts_mesh: DeviceMesh | None, policies: Mapping[str, Any],
    *, reshard_after_forward: bool,
) -> None:  # fmt: skip
    """FSDP2 over `mesh`: the embedding, each block, the head (one group where they are one table).

    What multi-token prediction has beside a block is one group too.
    Experts are spread over `experts_mesh`, the ranks that hold the same ones, along the width of their
    matrices; FSDP2 divides the sum of their gradients by the number of these ranks, not by the replicas.
    Blocks are gathered again in the backward if `reshard_after_forward`; the ends stay gathered till then.
    """
    shard = partial(fsdp.fully_shard, mesh=mesh, **policies)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(decoder.trains(name))
    with mock.patch.object(fsdp_param, "_chunk_with_empty", Parts):
        for block in decoder.blocks:
            if isinstance(block.mlp, plain.Mixture):
                shard(
                    block.mlp.experts, mesh=experts_mesh, shard_placement_fn=lambda _: Shard(1),
                    reshard_after_forward=reshard_after_forward,
                )  # fmt: skip
            shard(block, reshard_after_forward=reshard_after_forward)
        ends = [module for module in (decoder.embedding, decoder.head) if module is not None]
        others: list[Any] = [ends] if decoder.tie() else ends
        for further in decoder.further:
            others.append([module for module in further.children() if module is not further.block])
        for unit in others:
            shard(unit, reshard_after_forward=False)
    shard(decoder)


def make_states(decoder: plain.Decoder, home: torch.device, seed: int | None, device: torch.device) -> None:
    """Give this rank's part of each weight (a meta tensor) its memory, on `home`, and its numbers.

    They depend on name and `seed` alone (None: there are none). Each weight is made whole on `device` and cut
    as the rank's is, one after the other.
    """
    for path, module in decoder.named_modules():
        place = module.place if isinstance(module, plain.Experts) else plain.WHOLE
        for key, weight in list(module.named_parameters(recurse=False)):
            made = torch.empty_like(weight, device=home)
            if seed is not None:
                whole = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                plain.fill(decoder.alias(f"{path}.{key}"), whole, seed, place)
                on = weight.device_mesh, weight.placements
                made.to_local().copy_(distribute_tensor(whole, *on, src_data_rank=None).to_local())
            setattr(module, key, nn.Parameter(made, requires_grad=weight.requires_grad))
    decoder.tie()


def local_bytes(tensors: list[Tensor]) -> int:
    """Bytes that this rank holds of `tensors`."""
    return sum(own_part(tensor).nbytes for tensor in tensors)

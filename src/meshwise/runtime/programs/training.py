"""One rank of a training step: its piece of the model, cut as the plan says, and its tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import Plan, number_of
from meshwise.plan.stages import V_SHAPED, chunks_of_rank
from meshwise.runtime.programs.attention_kernels import Attend
from meshwise.runtime.programs.context import Context
from meshwise.runtime.programs.decoder import WHOLE, Decoder, ExpertPlace, Experts, Setting, routes
from meshwise.runtime.programs.functions import turned_width, turns
from meshwise.runtime.programs.parallelize import cut_tensors, shard_states
from meshwise.runtime.programs.pipeline import make_schedule
from meshwise.runtime.programs.ring import RingAttend, own_places
from meshwise.runtime.programs.tensor_parallel.exchange import ALONE, MeshAxis


class Place(NamedTuple):
    """Where a rank stands on each axis, the outermost first."""

    pp: int
    dp: int
    cp: int
    tp: int


class Trainer:
    """The modules, groups and tokens of a rank, and how it runs a step."""

    def __init__(self, options: Any, plan: Plan, model: Model, on: Mesh, context: Context) -> None:
        self.options, self.context = options, context
        self.plan, self.model, self.rank = plan, model, context.rank
        self.dp, self.num = int(on.dp), int(on.num_microbatches)
        axes = plan.pp, self.dp, plan.cp, plan.tp
        self.place = place = Place(*map(int, np.unravel_index(self.rank, axes)))
        replicas = self.dp * plan.cp
        self.sharing = int(on.shard_ranks(replicas)), int(on.shard_ranks(on.expert_replicas))
        per_stage = replicas * plan.tp
        self.line = context.group("pp", range(self.rank % per_stage, context.world_size, per_stage))
        self.holders = self._holders(per_stage)
        copies = _copies_and_shards(len(self.holders) // plan.tp, self.sharing[0])
        self.mesh = context.grid(self.holders, **copies, tp=plan.tp)
        self.ring, self.heads = self._context_groups(int(on.ring), int(on.ulysses))
        self.ends = self._ends()
        self.ep, self.etp = plan.ep, int(on.etp)
        self.experts, self.experts_mesh = self._expert_groups()
        with context.recorder.setup():
            places = own_places(options.seq, self.ring.size, self.ring.index, context.device)
            self.places = places.chunk(self.heads.size)[self.heads.index]
            self.setting = self._setting()
            held = chunks_of_rank(model, plan.pp, plan.vpp, plan.schedule, plan.stages, place.pp)
            self.pieces = {int(chunk.index): self._piece(int(chunk.index), layers) for chunk, layers in held}
            self.tokens, self.labels = self._tokens()
            context.recorder.weights(self.tokens, self.labels)  # inputs, not activations
        self._step = self._alone if plan.pp == 1 else self._pipeline()

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that the replicas stand on: copies of states, and ranks that share them."""
        return tuple(axis for axis in self.mesh.mesh_dim_names or () if axis in ("copies", "dp"))

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

    def _holders(self, per_stage: int) -> list[int]:
        """The ranks of this one's stage, and under DualPipe those of the stage with the same weights."""
        stages = {self.place.pp}
        if self.plan.schedule == "dualpipe":
            stages.add(self.plan.pp - 1 - self.place.pp)
        return [stage * per_stage + rank for stage in sorted(stages) for rank in range(per_stage)]

    def _along(self, axis: str, ranks: Sequence[int]) -> MeshAxis:
        """This rank's place among `ranks`, which form a group if they are several."""
        if len(ranks) == 1:
            return ALONE
        return MeshAxis(self.context.group(axis, ranks), len(ranks), ranks.index(self.rank))

    def _context_groups(self, ring: int, ulysses: int) -> tuple[MeshAxis, MeshAxis]:
        """The ranks whose keys come round, and, neighbours, those that exchange heads."""
        ring_rank, part = divmod(self.place.cp, ulysses)
        first, around = self.rank - part * self.plan.tp, self.plan.tp * ulysses
        of_ring = range(self.rank - ring_rank * around, self.rank + (ring - ring_rank) * around, around)
        of_heads = range(first, first + around, self.plan.tp)
        return self._along("cp", of_ring), self._along("cp", of_heads)

    def _expert_groups(self) -> tuple[ExpertPlace, DeviceMesh | None]:
        """This rank's place among those that hold experts, and the ranks that hold the same parts of them."""
        if self.model.moe is None:
            return WHOLE, None
        etp, both = self.etp, self.ep * self.etp
        own, part = self.rank // both * both, self.rank % etp
        sharing = self._along("ep", range(own + part, own + both, etp))
        parts = self._along("tp", range(self.rank - part, self.rank - part + etp))
        alike = [rank for rank in self.holders if rank % both == self.rank % both]
        same_parts = self.context.grid(alike, **_copies_and_shards(len(alike), self.sharing[1]))
        return ExpertPlace(sharing, parts), same_parts

    def _ends(self) -> dist.ProcessGroup | None:
        """The first and the last rank of this rank's pipeline, each with its copy of a tied table."""
        num, place = self.plan.pp, self.place.pp
        has_both = self.plan.schedule in (*V_SHAPED, "dualpipe")  # a rank with one end has the other
        if num == 1 or has_both or not self.model.shares_table or place not in (0, num - 1):
            return None
        per_stage = self.context.world_size // num
        first = self.rank - place * per_stage
        return self.context.group("pp", [first, first + (num - 1) * per_stage])

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
                    for parameter in module.parameters() if isinstance(module, Experts) else ():
                        parameter.grad.mul_(self.plan.tp / (self.ep * self.etp))

    def _setting(self) -> Setting:
        plan, context = self.plan, self.context
        angles = turns(self.places, turned_width(self.model), context.dtype(plan.dtype))
        own = self.places.chunk(plan.tp)[self.place.tp] if plan.sequence_parallel else self.places
        context.recorder.weights(*angles, own)  # constants
        way = None
        if self.model.moe is not None:
            way = routes(own, self.options.microbatch, self.model, self.experts)
            context.recorder.weights(way.experts, way.sources, way.back)
        redone = plan.recompute_modules if plan.recompute == "selective" else ()
        if "moe" in redone:  # covers what is inside
            redone = tuple(module for module in redone if module != "shared_experts")
        layers = number_of("recompute_layers", plan.recompute_layers) / plan.vpp
        return Setting(
            turns=angles, own_places=own, recorder=context.recorder, attend=self._attend,
            redone_modules=redone, redone_layers=layers if plan.recompute == "full" else 0.0,
            is_narrow=plan.dtype == "fp8", routes=way, heads=self.heads, lora_rank=plan.lora_rank,
        )  # fmt: skip

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention, to the keys of all ranks of a ring."""
        if self.ring.size == 1:
            return Attend.apply(q, k, v, True)
        return RingAttend.apply(q, k, v, self.ring.group, self.plan.cp_kind)

    def _piece(self, stage: int, layers: range) -> Decoder:
        """Some layers of the model, cut by tp and spread over the replicas."""
        plan, context = self.plan, self.context
        with torch.device("meta"):
            last = plan.pp * plan.vpp - 1
            decoder = Decoder(self.model, self.setting, layers, is_first=stage == 0, is_last=stage == last)
        if plan.tp > 1:
            cut_tensors(decoder, self.mesh["tp"], Shard(1) if plan.sequence_parallel else Replicate())
        dtype, seed = context.dtype(plan.dtype), None if context.is_fake else self.options.seed
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        reduced = wide if plan.grad_dtype == "fp32" else context.dtype(plan.grad_dtype)
        shard_states(
            decoder, self.mesh[self.replica_axes], self.experts_mesh, context.device,
            MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced),
            dtype if plan.optimizer == "adam-bf16" else wide, seed,
            reshard_after_forward=plan.pp == 1 and plan.zero == 3, on_host=plan.offload_optimizer > 0,
        )  # fmt: skip

        def gathered_are_weights(module: nn.Module, _: object) -> None:
            context.recorder.weights(*module.parameters())

        for module in decoder.modules():
            if isinstance(module, FSDPModule):
                if plan.zero < 3:
                    module.reshard = lambda: None  # looped schedules call it between two visits of a chunk
                module.register_forward_pre_hook(gathered_are_weights)
        return decoder

    def _tokens(self) -> tuple[Tensor, Tensor]:
        """This rank's tokens [microbatches x sequences, own tokens], and their labels (`with_labels`).

        Labels of one kind lie together, so that a loss reads them as they are.
        """
        mine = self.all_tokens()[self.place.dp]
        tokens, labels = with_labels(mine, self.options.seq)
        by_kind = labels[..., self.places].transpose(0, 1).contiguous()
        return tokens[:, self.places].contiguous(), by_kind.transpose(0, 1)

    def all_tokens(self) -> Tensor:
        """The tokens of a step in the whole world: [replicas, microbatches x sequences, tokens]."""
        torch.manual_seed(self.options.seed)
        length = self.options.seq + 1 + self.model.mtp_layers
        shape = self.dp, self.num * self.options.microbatch, length
        return torch.randint(self.model.vocab, shape).to(self.context.device)


def with_labels(sequences: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The first tokens of each sequence, and for each the next ones, [sequences, number, tokens]."""
    return sequences[:, :num_tokens], sequences[:, 1:].unfold(1, num_tokens, 1)


def _copies_and_shards(replicas: int, sharing: int) -> dict[str, int]:
    """Axes of `replicas` ranks of which each `sharing` neighbours share the states."""
    return {"dp": replicas} if sharing == replicas else {"copies": replicas // sharing, "dp": sharing}

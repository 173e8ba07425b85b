"""A layer of experts: gate, dispatch, all-to-all, experts, all-to-all, combine (GShard, arXiv 2006.16668).

The gate gives each of S tokens its `top_k` experts of E. An expert has C slots a rank, filled in the
order of the tokens, all first choices before any second; who finds no slot is dropped and goes through
on the residual alone. All that is decided on one rank, for its own tokens: a batch is routed the same
in a world of any size.

Dense dispatch spells the routing out as weights [S, E, C] and moves tokens by two matrix products;
sparse dispatch copies rows. In both, E C slots leave a rank, filled or not, so all ranks send equal
sizes. Experts whose hidden width is cut over `tp` ranks each give a part of the sum, which is completed
after the combine, on S rows and not on E C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from meshwise.model.gpt_config import GptConfig
from meshwise.program.expert_parallel import num_slots
from meshwise.runtime.programs.functions import Exchange, all_to_all

SAMPLE_FRACTION = 0.2
"""The share of experts whose load `expert1_balance_top` and `_bottom` add up (fairseq's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds: its place in, and the process group of, each axis (None: no such axis).

    `section` opens a named part of the forward, for profilers and recorders.
    """

    tp: int = 1
    tp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None
    ep: int = 1
    ep_rank: int = 0
    ep_group: dist.ProcessGroup | None = None
    section: Callable[[str], AbstractContextManager[Any]] = record_function


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Where the S tokens go: one entry of each list a choice, [S] each.

    `expert`, and its slot (`slot`; meaningless where not `kept`); `weight`: of this expert in the token's
    result, 0 where dropped. `gate_loss`: the load-balancing loss. `metrics`: in the order of
    `metric_names`.
    """

    expert: list[Tensor]
    slot: list[Tensor]
    kept: list[Tensor]
    weight: list[Tensor]
    gate_loss: Tensor
    metrics: Tensor


def metric_names(top_k: int) -> list[str]:
    """The routing metrics, in fairseq's names."""
    names = ["entropy_gating"]
    for i in range(1, top_k + 1):
        names += [f"overflow_expert{i}", f"unused_expert{i}_count"]
        names += [f"expert{i}_balance_top", f"expert{i}_balance_bottom"]
    return names


def route(
    logits: Tensor, num_slots: int, config: GptConfig, *, padding: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Routing:  # fmt: skip
    """The routing of S tokens from their gate logits [S, E], with `num_slots` slots an expert.

    `padding` [S] marks tokens that take no slot. `generator` serves the policies that draw. The masks
    [S, E] count positions by a running sum over the tokens; with `moe_batch_prioritized_routing` the
    tokens queue by their largest gate probability in place of their position.
    """
    num_tokens, num_experts = logits.shape
    if config.moe_gating_use_fp32:
        logits = logits.float()
    gates = logits.softmax(dim=-1)
    experts = _chosen(logits, gates, config, generator)
    masks = [_one_hot(expert, num_experts) for expert in experts]
    weights = [gates.gather(1, expert[:, None]).squeeze(1) for expert in experts]
    if config.moe_normalize_gate_prob_before_dropping and len(weights) > 1:
        weights = _normalised(weights)
    if config.moe_second_expert_policy == "random" and len(weights) > 1:
        drawn = torch.rand(num_tokens, generator=generator, device=logits.device, dtype=gates.dtype)
        masks[1] = masks[1] & (2 * weights[1] > drawn)[:, None]
    if padding is not None:
        masks = [mask & ~padding[:, None] for mask in masks]

    order = _queue(gates, config.moe_batch_prioritized_routing)
    places = _places(masks, order)
    slots = [
        place.gather(1, expert[:, None]).squeeze(1) for place, expert in zip(places, experts, strict=True)
    ]
    kept = [mask.any(dim=1) & (slot < num_slots) for mask, slot in zip(masks, slots, strict=True)]
    weights = [weight * fits for weight, fits in zip(weights, kept, strict=True)]
    if not config.moe_normalize_gate_prob_before_dropping and len(weights) > 1:
        weights = _normalised(weights)

    shares = gates.mean(dim=0), masks[0].to(gates.dtype).mean(dim=0)
    gate_loss = (shares[0] * shares[1]).mean() * num_experts**2
    with torch.no_grad():
        metrics = torch.stack([_entropy(gates), *_load(masks, kept)])
    return Routing(experts, slots, kept, weights, gate_loss, metrics)


def _chosen(
    logits: Tensor, gates: Tensor, config: GptConfig, generator: torch.Generator | None
) -> list[Tensor]:
    first = gates.argmax(dim=1)
    if config.top_k == 1:
        return [first]
    if config.moe_second_expert_policy == "sampling":  # the Gumbel-max trick
        uniform = torch.rand(logits.shape, generator=generator, device=logits.device, dtype=logits.dtype)
        tiny = torch.finfo(uniform.dtype).tiny
        logits = logits - (-uniform.clamp_min(tiny).log()).clamp_min(tiny).log()
    others = logits.masked_fill(_one_hot(first, logits.shape[1]), -math.inf)
    return [first, others.argmax(dim=1)]


def _one_hot(index: Tensor, width: int) -> Tensor:
    """[S] numbers -> bool [S, width]; the same as F.one_hot, which would look at the values first."""
    return torch.zeros(len(index), width, dtype=torch.bool, device=index.device).scatter_(
        1, index[:, None], True
    )


def _normalised(weights: list[Tensor]) -> list[Tensor]:
    total = sum(weights[1:], start=weights[0]).clamp_min(torch.finfo(weights[0].dtype).eps)
    return [weight / total for weight in weights]


def _queue(gates: Tensor, prioritized: bool) -> Tensor | None:
    return gates.amax(dim=1).argsort(descending=True, stable=True) if prioritized else None


def _places(masks: Sequence[Tensor], order: Tensor | None) -> list[Tensor]:
    """Each choice's place [S, E] in each expert's queue; second choices queue behind all first ones."""
    places = []
    ahead: Tensor | None = None
    for mask in masks:
        queued = mask if order is None else mask[order]
        place = queued.cumsum(dim=0).sub_(1)
        if order is not None:
            place = torch.empty_like(place).index_copy_(0, order, place)
        count = mask.sum(dim=0)
        places.append(place if ahead is None else place.add_(ahead))
        ahead = count if ahead is None else ahead.add_(count)
    return places


def _entropy(gates: Tensor) -> Tensor:
    return torch.special.entr(gates).sum(dim=1).mean()


def _load(masks: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
    """Per choice: overflow %, unused experts, and the % of tokens at the top and bottom fifth of experts."""
    result = []
    for mask, fits in zip(masks, kept, strict=True):
        num_tokens, num_experts = mask.shape
        loads = mask.sum(dim=0)
        wanted = loads.sum()
        by_load = loads.sort(descending=True).values * (100.0 / num_tokens)
        num_sampled = max(math.ceil(num_experts * SAMPLE_FRACTION), 1)
        result += [
            100.0 * (wanted - fits.sum()) / wanted.clamp_min(1),
            (loads == 0).sum().float(),
            by_load[:num_sampled].sum(),
            by_load[-num_sampled:].sum(),
        ]
    return result


@dataclass(frozen=True, slots=True, eq=False)
class DenseDispatch:
    """The routing as tensors [S, E, C]: the weights, and a one wherever there is a weight; both cast."""

    combine: Tensor
    mask: Tensor

    @classmethod
    def of(cls, routing: Routing, num_experts: int, num_slots: int, dtype: torch.dtype) -> DenseDispatch:
        """One outer product a choice, expert by slot, in the precision of the gate."""
        combine = _combine_weights(routing, num_experts, num_slots)
        return cls(combine.to(dtype), combine.bool().to(dtype))

    def scatter(self, tokens: Tensor) -> Tensor:
        """Rows of `tokens` [S, M] in their slots [E C, M]; empty slots are zero."""
        return torch.mm(self.mask.view(len(tokens), -1).t(), tokens)

    def gather(self, slots: Tensor) -> Tensor:
        """Each token's weighted sum [S, M] of its rows of `slots` [E C, M]."""
        return torch.mm(self.combine.view(len(self.combine), -1), slots)


def _combine_weights(routing: Routing, num_experts: int, num_slots: int) -> Tensor:
    """The weights [S, E, C] that the choices add up to."""

    def outer(expert: Tensor, slot: Tensor, weight: Tensor) -> Tensor:
        by_expert = _one_hot(expert, num_experts) * weight[:, None]
        by_slot = _one_hot(slot.clamp(0, num_slots - 1), num_slots).to(weight.dtype)
        return torch.bmm(by_expert.unsqueeze(-1), by_slot.unsqueeze(1))

    parts = [outer(*choice) for choice in zip(routing.expert, routing.slot, routing.weight, strict=True)]
    return parts[0] + parts[1] if len(parts) > 1 else parts[0]


@dataclass(frozen=True, slots=True, eq=False)
class SparseDispatch:
    """The routing as a row of the slots [E C] for each token and choice; `num_rows` is E C."""

    rows: list[Tensor]
    weight: list[Tensor]
    num_rows: int

    @classmethod
    def of(cls, routing: Routing, num_experts: int, num_slots: int, dtype: torch.dtype) -> SparseDispatch:
        """Dropped tokens go to one more row, which no expert sees."""
        num_rows = num_experts * num_slots
        rows = [
            torch.where(kept, expert * num_slots + slot, num_rows)
            for expert, slot, kept in zip(routing.expert, routing.slot, routing.kept, strict=True)
        ]
        return cls(rows, [weight.to(dtype) for weight in routing.weight], num_rows)

    def scatter(self, tokens: Tensor) -> Tensor:
        """Rows of `tokens` [S, M] in their slots [E C, M]; empty slots are zero."""
        slots = tokens.new_zeros(self.num_rows + 1, tokens.shape[1])
        for rows in self.rows:
            slots.index_copy_(0, rows, tokens)
        return slots[:-1]

    def gather(self, slots: Tensor) -> Tensor:
        """Each token's weighted sum [S, M] of its rows of `slots` [E C, M]."""
        found = [slots.index_select(0, rows.clamp_max(self.num_rows - 1)) for rows in self.rows]
        parts = [rows * weight[:, None] for rows, weight in zip(found, self.weight, strict=True)]
        return parts[0] + parts[1] if len(parts) > 1 else parts[0]


def _alias(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(x, group=group)
    return x


def _summed_copy(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _summed(x.clone(), group)


def to_tensor_parallel(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`x`, at the entrance of layers that are cut over `group`: each rank's gradient is a part of the sum."""
    return x if group is None else Exchange.apply(x, _alias, _summed_copy, group)


def from_tensor_parallel(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of the parts `x`, at the exit of layers cut over `group`: each gets the whole gradient."""
    if group is None:
        return x
    there = _summed_copy if x.requires_grad else _summed
    return Exchange.apply(x.contiguous(), there, _alias, group)


class Linear(nn.Module):
    """Weight [.., outputs, inputs] and bias [.., outputs], not initialised; who holds them applies them.

    `bias` None: there is none; False: it is a constant zero, since another rank of the group adds it.
    """

    def __init__(
        self, outputs: int, inputs: int, *, stack: tuple[int, ...] = (), bias: bool | None = None,
        device: torch.device | str, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*stack, outputs, inputs, device=device, dtype=dtype))
        zeros = None if bias is None else torch.zeros(*stack, outputs, device=device, dtype=dtype)
        if bias:
            self.bias = nn.Parameter(zeros)
        else:
            self.register_buffer("bias", zeros, persistent=False)


def gelu(x: Tensor) -> Tensor:
    """GELU computed in fp32 (the exact one, with erf), in the type of `x`."""
    return F.gelu(x.float()).type_as(x)


class Experts(nn.Module):
    """The experts of one layer that one rank holds, of one width, cut over `tp` ranks."""

    def __init__(
        self, config: GptConfig, shard: Shard, *, grouped: bool, device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_experts = config.moe_expert_count // shard.ep
        self.grouped = grouped
        width, hidden = config.decoder_embed_dim, config.expert_ffn_dim // shard.tp
        stack = {"stack": (self.num_experts,), "device": device, "dtype": dtype}
        self.fc1 = Linear(hidden, width, bias=True, **stack)
        self.fc2 = Linear(width, hidden, bias=shard.tp_rank == 0, **stack)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Rows for each expert [W, experts, C, M] -> results, a list to be joined along dim 1."""
        if self.grouped:
            rows = x.transpose(0, 1).flatten(1, 2)
            hidden = gelu(torch.baddbmm(self.fc1.bias.unsqueeze(1), rows, self.fc1.weight.transpose(1, 2)))
            out = torch.baddbmm(self.fc2.bias.unsqueeze(1), hidden, self.fc2.weight.transpose(1, 2))
            return [out.unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)]
        stacks = (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        chunks = x.chunk(self.num_experts, dim=1)
        outputs = []
        for chunk, w1, b1, w2, b2 in zip(chunks, *(stack.unbind() for stack in stacks), strict=True):
            rows = chunk.reshape(-1, x.shape[-1])
            outputs.append(F.linear(gelu(F.linear(rows, w1, b1)), w2, b2).view(chunk.shape))
        return outputs


class MoELayer(nn.Module):
    """Experts in place of the feed-forward. `grouped`: one batched GEMM in place of a loop over experts."""

    def __init__(
        self, config: GptConfig, shard: Shard, *, grouped: bool, device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.shard = config, shard
        self.gate = Linear(config.moe_expert_count, config.decoder_embed_dim, device=device, dtype=dtype)
        self.experts = Experts(config, shard, grouped=grouped, device=device, dtype=dtype)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, M] -> the experts' result [B, T, M], the gate loss, the routing metrics."""
        shard, width = self.shard, x.shape[-1]
        with shard.section("MoELayer"):
            tokens = x.reshape(-1, width)
            capacity = num_slots(self.config, len(tokens), training=self.training)
            dispatch, gate_loss, metrics = self._gate(tokens, capacity, padding, generator)
            slots = dispatch.scatter(to_tensor_parallel(tokens, shard.tp_group))
            slots = self._exchanged(slots)
            outputs = self.experts(slots.view(shard.ep, -1, capacity, width))
            returned = torch.cat(outputs, dim=1).view(-1, width)
            returned = self._exchanged(returned)
            result = from_tensor_parallel(dispatch.gather(returned), shard.tp_group)
        return result.view_as(x), gate_loss, metrics

    def _gate(
        self, tokens: Tensor, capacity: int, padding: Tensor | None, generator: torch.Generator | None
    ) -> tuple[DenseDispatch | SparseDispatch, Tensor, Tensor]:
        config = self.config
        masked = padding.reshape(-1) if padding is not None and config.use_moe_pad_mask else None
        logits = F.linear(tokens, self.gate.weight)
        routing = route(logits, capacity, config, padding=masked, generator=generator)
        routing = replace(
            routing, weight=[to_tensor_parallel(weight, self.shard.tp_group) for weight in routing.weight]
        )
        kind = SparseDispatch if config.use_tutel_moe else DenseDispatch
        dispatch = kind.of(routing, config.moe_expert_count, capacity, tokens.dtype)
        return dispatch, routing.gate_loss, routing.metrics

    def _exchanged(self, slots: Tensor) -> Tensor:
        """Part i of the slots' rows to rank i, and back the second time; nothing moves without a group."""
        if self.shard.ep_group is None or self.config.dummy_a2a:
            return slots
        return Exchange.apply(slots.contiguous(), all_to_all, all_to_all, self.shard.ep_group)

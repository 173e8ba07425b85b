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

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from meshwise.model.gpt_config import GptConfig
from meshwise.program.expert_pass import num_slots
from meshwise.runtime.programs.tensor_parallel.exchange import ALONE, MeshAxis, all_sum, start_swap

SAMPLE_FRACTION = 0.2
"""The share of experts whose load `expert1_balance_top` and `_bottom` add up (fairseq's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds: its place among the ranks that cut matrices, and among those that share experts.

    `section` opens a named part of the forward, for profilers and recorders.
    """

    tp: MeshAxis = ALONE
    ep: MeshAxis = ALONE
    section: Callable[[str], AbstractContextManager[Any]] = record_function


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Where tokens go, by choice and token [top_k, S].

    `expert`, and its slot (`slot`; meaningless where not `kept`); `weight`: of this expert in the token's
    result, 0 where dropped. `metrics`: in the order of `metric_names`.
    """

    expert: Tensor
    slot: Tensor
    kept: Tensor
    weight: Tensor
    metrics: Tensor


def metric_names(top_k: int) -> list[str]:
    """The routing metrics, in fairseq's names."""
    names = ["entropy_gating"]
    for i in range(1, top_k + 1):
        names += [f"overflow_expert{i}", f"unused_expert{i}_count"]
        names += [f"expert{i}_balance_top", f"expert{i}_balance_bottom"]
    return names


def route(logits: Tensor, num_slots: int, top_k: int) -> Routing:
    """The routing of S tokens from their gate logits [S, E], with `num_slots` slots an expert, in fp32.

    Places in the queues of experts are counted by a running sum, over all first choices and then all second
    ones. The weights of two choices are those of the experts that had a slot left, in proportion to their
    gates.
    """
    gates = logits.float().softmax(dim=-1)
    num_experts = gates.shape[1]
    chosen = gates.argmax(dim=1)
    if top_k > 1:
        others = logits.masked_fill(_one_hot(chosen, num_experts), -math.inf)
        chosen = torch.cat([chosen, others.argmax(dim=1)])
    mask = _one_hot(chosen, num_experts)
    place = mask.cumsum(dim=0).gather(1, chosen[:, None]) - 1
    expert, slot = chosen.view(top_k, -1), place.view(top_k, -1)
    kept = slot < num_slots
    weight = gates.gather(1, expert.t()).t() * kept
    if top_k > 1:
        weight = weight / weight.sum(dim=0).clamp_min(torch.finfo(gates.dtype).eps)
    entropy = torch.special.entr(gates).sum(dim=1).mean()
    metrics = torch.cat([entropy[None], _load(mask.unflatten(0, (top_k, -1)), kept)])
    return Routing(expert, slot, kept, weight, metrics)


def _one_hot(index: Tensor, width: int) -> Tensor:
    """[S] numbers -> bool [S, width]; the same as F.one_hot, which would look at the values first."""
    mask = torch.zeros(len(index), width, dtype=torch.bool, device=index.device)
    return mask.scatter_(1, index[:, None], True)


def _load(masks: Tensor, kept: Tensor) -> Tensor:
    """Per choice: overflow %, unused experts, and the % of tokens at the top and bottom fifth of experts."""
    _, num_tokens, num_experts = masks.shape
    loads = masks.sum(dim=1)
    by_load = loads.sort(dim=1, descending=True).values * (100.0 / num_tokens)
    num_sampled = max(math.ceil(num_experts * SAMPLE_FRACTION), 1)
    overflow, unused = 100.0 * (~kept).sum(dim=1) / num_tokens, (loads == 0).sum(dim=1)
    ends = by_load[:, :num_sampled].sum(dim=1), by_load[:, -num_sampled:].sum(dim=1)
    return torch.stack([overflow, unused, *ends], dim=1).flatten()


class DenseDispatch:
    """The routing as tensors [S, E, C]: the weights, and a one wherever there is a weight; both cast.

    One outer product a choice, expert by slot, in the precision of the gate.
    """

    def __init__(self, routing: Routing, num_experts: int, num_slots: int, dtype: torch.dtype) -> None:
        combine = _combine_weights(routing, num_experts, num_slots)
        self.combine, self.mask = combine.to(dtype), combine.bool().to(dtype)

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


class SparseDispatch:
    """The routing as a row of the slots [E C] for each token and choice; `num_rows` is E C.

    Dropped tokens go to one more row, which no expert sees.
    """

    def __init__(self, routing: Routing, num_experts: int, num_slots: int, dtype: torch.dtype) -> None:
        self.num_rows = num_rows = num_experts * num_slots
        self.rows = torch.where(routing.kept, routing.expert * num_slots + routing.slot, num_rows)
        self.weight = routing.weight.to(dtype)

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


class Affine(nn.Module):
    """Weight [.., outputs, inputs] and bias [.., outputs], not initialised; who holds them applies them.

    `bias` None: there is none; False: it is a constant zero, since another rank of the group adds it.
    """

    def __init__(
        self, outputs: int, inputs: int, *, stack: tuple[int, ...] = (), bias: bool | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*stack, outputs, inputs))
        zeros = None if bias is None else torch.zeros(*stack, outputs)
        if bias:
            self.bias = nn.Parameter(zeros)
        else:
            self.register_buffer("bias", zeros, persistent=False)


def gelu(x: Tensor) -> Tensor:
    """GELU computed in fp32 (the exact one, with erf), in the type of `x`."""
    return F.gelu(x.float()).type_as(x)


class ExpertStack(nn.Module):
    """The experts of one layer that one rank holds, of one width, cut over `tp` ranks."""

    def __init__(self, config: GptConfig, shard: Shard, *, grouped: bool) -> None:
        super().__init__()
        self.num_experts = config.moe_expert_count // shard.ep.size
        self.grouped = grouped
        width, hidden = config.decoder_embed_dim, config.expert_ffn_dim // shard.tp.size
        stack = (self.num_experts,)
        self.fc1 = Affine(hidden, width, stack=stack, bias=True)
        self.fc2 = Affine(width, hidden, stack=stack, bias=shard.tp.index == 0)

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

    def __init__(self, config: GptConfig, shard: Shard, *, grouped: bool) -> None:
        super().__init__()
        self.config, self.shard = config, shard
        self.gate = Affine(config.moe_expert_count, config.decoder_embed_dim)
        self.experts = ExpertStack(config, shard, grouped=grouped)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, M] -> the experts' result [B, T, M], and the routing metrics."""
        shard, config, width = self.shard, self.config, x.shape[-1]
        with shard.section("MoELayer"):
            tokens = x.reshape(-1, width)
            capacity = num_slots(config, len(tokens))
            routing = route(F.linear(tokens, self.gate.weight), capacity, config.top_k)
            kind = SparseDispatch if config.use_tutel_moe else DenseDispatch
            dispatch = kind(routing, config.moe_expert_count, capacity, tokens.dtype)
            metrics = routing.metrics
            del routing
            slots = start_swap(dispatch.scatter(tokens), shard.ep)()
            outputs = self.experts(slots.view(shard.ep.size, -1, capacity, width))
            returned = start_swap(torch.cat(outputs, dim=1).view(-1, width), shard.ep)()
            result = all_sum(dispatch.gather(returned), shard.tp)
        return result.view_as(x), metrics

"""A mixture of experts in place of a block's MLP, its experts spread over ranks, each cut over others.

Each rank routes its own tokens: a router gives every expert a probability, each token visits k experts, and
what they answer is weighed by theirs. Copies of the tokens go to the ranks that hold their experts by
all-to-all and come back by another. Ranks that hold parts of the same experts gather what came to any of
them, and add up what they answer.

Routing is balanced by force (`routes`); the router still learns, through the weights of the answers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwise.model.architecture import Model
from meshwise.runtime.programs.decoder_parts import FeedForward, Setting, activated
from meshwise.runtime.programs.local import local
from meshwise.runtime.programs.routes import ExpertPlace
from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis
from meshwise.runtime.torch_private import all_gather_single, all_to_all_single, reduce_scatter_single


class Experts(nn.Module):
    """The MLPs of this rank's experts, a matrix each in three (or two) stacks, or its parts of them."""

    def __init__(self, model: Model, place: ExpertPlace) -> None:
        super().__init__()
        assert model.moe is not None
        number, width = model.moe.num_experts // place.ranks.size, model.moe.ffn_hidden // place.parts.size
        self.number, self.place = number, place
        self.gate = nn.Parameter(torch.empty(number, model.hidden, width)) if model.gated else None
        self.up = nn.Parameter(torch.empty(number, model.hidden, width))
        self.down = nn.Parameter(torch.empty(number, width, model.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """[experts, rows, hidden] -> the same, or this rank's part of their sum."""
        matrices = [self.up] if self.gate is None else [self.gate, self.up]
        return torch.bmm(activated(*(torch.bmm(x, matrix) for matrix in matrices)), self.down)


class Mixture(nn.Module):
    """Router and experts, and the MLP that all tokens visit, where there is one."""

    def __init__(self, model: Model, setting: Setting) -> None:
        super().__init__()
        moe, routes = model.moe, setting.routes
        assert moe is not None and routes is not None
        self.router = nn.Linear(model.hidden, moe.num_experts, bias=moe.router_bias)
        if moe.balance_bias:  # moves the choice of experts, which is forced here, by a rule
            self.balance_bias = nn.Parameter(torch.empty(moe.num_experts))
        self.experts = Experts(model, routes.place)
        self.shared = FeedForward(model, setting, moe.shared_ffn_hidden) if moe.shared_ffn_hidden else None
        self.setting, self.routes = setting, routes

    def forward(self, x: Tensor) -> Tensor:
        """[batch, own tokens, hidden] -> the same."""
        bias = None if self.router.bias is None else local(self.router.bias)
        logits = F.linear(x.flatten(0, 1), local(self.router.weight), bias)
        way = self.routes
        tokens, num_choices = x.flatten(0, 1), way.experts.shape[1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        gates = wide.softmax(-1).gather(1, way.experts).to(x.dtype)
        copies = tokens.index_select(0, way.sources)
        ranks, parts = way.place
        arrived = self._by_expert(_gathered(_exchanged(copies, ranks), parts))
        answers = _exchanged(_added(self._by_rank(self.experts(arrived)), parts), ranks)
        weighed = answers.index_select(0, way.back) * gates.view(-1, 1)
        mixed = weighed.view(-1, num_choices, x.shape[-1]).sum(1).view(x.shape)
        return mixed if self.shared is None else mixed + self.setting.redone("shared_experts", self.shared, x)

    def _by_expert(self, copies: Tensor) -> Tensor:
        """Copies as they arrived, [sources x experts x rows, hidden] -> [experts, sources x rows, hidden]."""
        by_source = copies.view(self.routes.place.num_sources, self.experts.number, -1, copies.shape[-1])
        return by_source.transpose(0, 1).flatten(1, 2)

    def _by_rank(self, answers: Tensor) -> Tensor:
        """The inverse of `_by_expert`."""
        return answers.unflatten(1, (self.routes.place.num_sources, -1)).transpose(0, 1).flatten(0, 2)


def _exchanged(rows: Tensor, along: MeshAxis) -> Tensor:
    """Equal parts of the rows to the ranks that hold the experts: copies there, answers back."""
    return rows if along.size == 1 else all_to_all_single(rows, None, None, along.group)


def _gathered(copies: Tensor, along: MeshAxis) -> Tensor:
    """The copies that came to any of the ranks that hold parts of the same experts."""
    return copies if along.size == 1 else all_gather_single(copies, 0, along.group)


def _added(answers: Tensor, along: MeshAxis) -> Tensor:
    """The sum of what parts of experts answer, of the copies that came to this rank."""
    return answers if along.size == 1 else reduce_scatter_single(answers, "sum", 0, along.group)

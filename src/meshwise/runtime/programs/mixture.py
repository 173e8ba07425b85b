"""A mixture of experts in place of a block's MLP, its experts spread over the ranks of a group.

Each rank routes its own tokens: a router gives every expert a probability, each token visits k experts, and
what they answer is weighed by theirs. Copies of the tokens go to the ranks that hold their experts by
all-to-all and come back by another.

Routing is balanced by force (`routes`); the router still learns, through the weights of the answers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from meshwise.model.architecture import Model
from meshwise.runtime.programs.decoder_parts import FeedForward, Setting
from meshwise.runtime.programs.local import local
from meshwise.runtime.programs.routes import Routes
from meshwise.runtime.torch_private import all_to_all_single


class Experts(nn.Module):
    """The MLPs of this rank's experts, a matrix each in three (or two) stacks; `first` is its first one."""

    def __init__(self, model: Model, setting: Setting, ranks: int, rank: int) -> None:
        super().__init__()
        assert model.moe is not None
        self.setting = setting
        number, width = model.moe.num_experts // ranks, model.moe.ffn_hidden
        self.number, self.first = number, rank * number
        self.gate = nn.Parameter(torch.empty(number, model.hidden, width)) if model.gated else None
        self.up = nn.Parameter(torch.empty(number, model.hidden, width))
        self.down = nn.Parameter(torch.empty(number, width, model.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """[experts, rows, hidden] -> the same."""
        matrices = [self.up] if self.gate is None else [self.gate, self.up]
        wide = [torch.bmm(x, matrix) for matrix in matrices]
        return self.setting.redone("moe_act", self._answers, *wide, to_its_end=False)

    def _answers(self, *wide: Tensor) -> Tensor:
        return torch.bmm(self.setting.activated(*wide), self.down)


class Mixture(nn.Module):
    """Router and experts, and the MLP that all tokens visit, where there is one."""

    def __init__(self, model: Model, setting: Setting) -> None:
        super().__init__()
        moe, routes = model.moe, setting.routes
        assert moe is not None and routes is not None
        group = routes.group
        rank = 0 if group is None else dist.get_rank(group)
        self.router = nn.Linear(model.hidden, moe.num_experts, bias=False)
        self.experts = Experts(model, setting, routes.ranks, rank)
        self.shared = FeedForward(model, setting, moe.shared_ffn_hidden) if moe.shared_ffn_hidden else None
        self.setting, self.routes = setting, routes

    def scores(self, x: Tensor) -> Tensor:
        """The router's: [batch, own tokens, hidden] -> [batch x own tokens, experts]."""
        return F.linear(x.flatten(0, 1), local(self.router.weight))

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        """[batch, own tokens, hidden], and their `scores`, -> the same."""
        way = self.routes
        tokens, num_choices = x.flatten(0, 1), way.experts.shape[1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        gates = wide.softmax(-1).gather(1, way.experts).to(x.dtype)
        copies = tokens.index_select(0, way.sources)
        arrived = _by_expert(_exchange(copies, way), way, self.experts.number)
        answers = _exchange(_by_rank(self.experts(arrived), way), way)
        weighed = answers.index_select(0, way.back) * gates.view(-1, 1)
        mixed = weighed.view(-1, num_choices, x.shape[-1]).sum(1).view(x.shape)
        return mixed if self.shared is None else mixed + self.setting.redone("shared_experts", self.shared, x)


def _exchange(copies: Tensor, way: Routes) -> Tensor:
    """Copies to the ranks of their experts, or back: an equal part to each."""
    if way.group is None:
        return copies
    return all_to_all_single(copies, None, None, way.group)


def _by_expert(copies: Tensor, way: Routes, experts: int) -> Tensor:
    """Copies as they arrived, [ranks x experts x rows, hidden] -> [experts, ranks x rows, hidden]."""
    return copies.view(way.ranks, experts, -1, copies.shape[-1]).transpose(0, 1).flatten(1, 2)


def _by_rank(answers: Tensor, way: Routes) -> Tensor:
    """The inverse of `_by_expert`."""
    return answers.unflatten(1, (way.ranks, -1)).transpose(0, 1).flatten(0, 2)

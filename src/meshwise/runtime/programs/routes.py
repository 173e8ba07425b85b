"""Where tokens go whose layer has experts.

Which experts a token visits is set by its place in the sequence, not by the router, so that all get the
same number (Megatron-LM's `--moe-router-force-load-balancing`): every rank's shapes are known beforehand,
and every world computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.model.architecture import Model, MoE


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Where the tokens of a microbatch go, constants all.

    `experts` [tokens, k]: of each token's copies; `sources` [k tokens]: whose copies they are, sorted by
    expert; `back` [k tokens]: where each token's copies stand in that order. `group`: the ranks that hold the
    experts, None where this rank holds all; `parts`: those that hold parts of the same ones, None where they
    are whole.
    """

    experts: Tensor
    sources: Tensor
    back: Tensor
    group: dist.ProcessGroup | None = None
    parts: dist.ProcessGroup | None = None

    @property
    def place(self) -> ExpertPlace:
        """Which experts, and which part of them, this rank has."""
        return ExpertPlace(*_place(self.group), *_place(self.parts))


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """A rank among the `ranks` that hold the experts, and among the `parts` that each is cut into."""

    ranks: int
    rank: int
    parts: int
    part: int

    @property
    def sources(self) -> int:
        """Ranks whose tokens come to the experts of one."""
        return self.ranks * self.parts


WHOLE = ExpertPlace(1, 0, 1, 0)
"""One rank that holds all experts."""


def cut_dim(name: str) -> int:
    """The dim of a stack of experts' matrices `name` [experts, d_in, d_out] along which parts are cut."""
    return 1 if name.endswith("down") else 2


def part_of(experts: Tensor, name: str, place: ExpertPlace) -> Tensor:
    """Of the matrices `name` of all experts, those at `place`."""
    return experts.chunk(place.ranks)[place.rank].chunk(place.parts, cut_dim(name))[place.part]


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))


def routes(
    places: Tensor, sequences: int, model: Model, group: dist.ProcessGroup | None = None,
    parts: dist.ProcessGroup | None = None,
) -> Routes:  # fmt: skip
    """The routes of tokens at `places` of each of `sequences` sequences."""
    assert model.moe is not None
    experts = _in_turn(places, model.moe).repeat(sequences, 1)
    order = experts.flatten().argsort(stable=True)
    return Routes(experts, order // model.moe.top_k, order.argsort(), group, parts)


def _in_turn(places: Tensor, moe: MoE) -> Tensor:
    """[tokens] -> [tokens, k]: the experts one after the other."""
    choices = torch.arange(moe.top_k, device=places.device)
    return (places[:, None] * moe.top_k + choices).remainder(moe.num_experts)

"""Where tokens go whose layer has experts.

Which experts a token visits is set by its place in the sequence, not by the router, so that all get the
same number (Megatron-LM's `--moe-router-force-load-balancing`): every rank's shapes are known beforehand,
and every world computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshwise.model.architecture import Model, MoE
from meshwise.runtime.programs.tensor_parallel.exchange import ALONE, MeshAxis


class ExpertPlace(NamedTuple):
    """A rank among the `ranks` that hold the experts, and among those that hold `parts` of the same ones."""

    ranks: MeshAxis = ALONE
    parts: MeshAxis = ALONE

    @property
    def num_sources(self) -> int:
        """Ranks whose tokens come to the experts of one."""
        return self.ranks.size * self.parts.size


WHOLE = ExpertPlace()
"""One rank that holds all experts."""


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Where the tokens of a microbatch go, constants all.

    `experts` [tokens, k]: of each token's copies; `sources` [k tokens]: whose copies they are, sorted by
    expert; `back` [k tokens]: where each token's copies stand in that order. `place`: which experts, and
    which part of them, this rank has.
    """

    experts: Tensor
    sources: Tensor
    back: Tensor
    place: ExpertPlace = WHOLE


def cut_dim(name: str) -> int:
    """The dim of a stack of experts' matrices `name` [experts, d_in, d_out] along which parts are cut."""
    return 1 if name.endswith("down") else 2


def part_of(experts: Tensor, name: str, place: ExpertPlace) -> Tensor:
    """Of the matrices `name` of all experts, those at `place`."""
    mine = experts.chunk(place.ranks.size)[place.ranks.index]
    return mine.chunk(place.parts.size, cut_dim(name))[place.parts.index]


def routes(places: Tensor, sequences: int, model: Model, place: ExpertPlace = WHOLE) -> Routes:
    """The routes of tokens at `places` of each of `sequences` sequences."""
    assert model.moe is not None
    experts = _in_turn(places, model.moe).repeat(sequences, 1)
    order = experts.flatten().argsort(stable=True)
    return Routes(experts, order // model.moe.top_k, order.argsort(), place)


def _in_turn(places: Tensor, moe: MoE) -> Tensor:
    """[tokens] -> [tokens, k]: the experts one after the other."""
    choices = torch.arange(moe.top_k, device=places.device)
    return (places[:, None] * moe.top_k + choices).remainder(moe.num_experts)

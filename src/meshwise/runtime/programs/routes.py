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
from meshwise.program.expert_load import met_ranks


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Where the tokens of a microbatch go, constants all.

    `experts` [tokens, k]: of each token's copies; `sources` [k tokens]: whose copies they are, sorted by
    expert; `back` [k tokens]: where each token's copies stand in that order. `group`: the ranks that hold the
    experts, None where this rank holds all; `parts`: those that hold parts of the same ones, None where they
    are whole. `per_rank`: how a token goes once to each rank.
    """

    experts: Tensor
    sources: Tensor
    back: Tensor
    group: dist.ProcessGroup | None = None
    parts: dist.ProcessGroup | None = None
    per_rank: PerRank | None = None

    @property
    def constants(self) -> list[Tensor]:
        """All tensors."""
        each = self.per_rank
        more = [] if each is None else [each.gates, each.copies, each.weights]
        return [self.experts, self.sources, self.back, *more]

    @property
    def place(self) -> ExpertPlace:
        """Which experts, and which part of them, this rank has."""
        return ExpertPlace(*_place(self.group), *_place(self.parts))


@dataclass(frozen=True, slots=True, eq=False)
class PerRank:
    """A token goes once to each rank that holds some of its experts, and is copied there; constants all.

    `Routes.sources` and `back` are of the tokens sent. `gates` [tokens sent, most choices on a rank]: which
    weights of a rank's tokens go with each. Of what a rank gets from each other: `copies` [choices here]:
    whose copies they are, sorted by expert; `weights`: which of the weights that came is theirs.
    """

    gates: Tensor
    copies: Tensor
    weights: Tensor


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
    parts: dist.ProcessGroup | None = None, per_rank: int = 0,
) -> Routes:  # fmt: skip
    """The routes of tokens at `places` of each of `sequences` sequences.

    `per_rank`: of how many ranks each gets a token once (0: it goes to each expert).
    """
    assert model.moe is not None
    if per_rank:
        experts = _over_ranks(places, model.moe, per_rank).repeat(sequences, 1)
        if group is not None:
            return _once_to_each(experts, model.moe, group, parts)
    else:
        experts = _in_turn(places, model.moe).repeat(sequences, 1)
    order = experts.flatten().argsort(stable=True)
    return Routes(experts, order // model.moe.top_k, order.argsort(), group, parts)


def _in_turn(places: Tensor, moe: MoE) -> Tensor:
    """[tokens] -> [tokens, k]: the experts one after the other."""
    choices = torch.arange(moe.top_k, device=places.device)
    return (places[:, None] * moe.top_k + choices).remainder(moe.num_experts)


def _over_ranks(places: Tensor, moe: MoE, ranks: int) -> Tensor:
    """The same, so that the choices of a token lie on `met_ranks` neighbours among `ranks` ranks.

    In each run of as many tokens as ranks all get as many choices, and take their experts in turn.
    """
    choices, own = torch.arange(moe.top_k, device=places.device), moe.num_experts // ranks
    met = int(met_ranks(moe, float(ranks)))
    rank = (places[:, None] + choices * met // moe.top_k).remainder(ranks)
    return rank * own + (places[:, None] // ranks * moe.top_k + choices).remainder(own)


def _once_to_each(
    experts: Tensor, moe: MoE, group: dist.ProcessGroup, parts: dist.ProcessGroup | None
) -> Routes:
    """Routes of `experts` [tokens, k], of which a token's neighbours on a rank go there together."""
    place = ExpertPlace(*_place(group), *_place(parts))
    k, own = moe.top_k, moe.num_experts // place.ranks
    met = int(met_ranks(moe, float(place.ranks)))
    first = (
        torch.arange(met + 1, device=experts.device) * k + met - 1
    ) // met  # of a token's choices on a rank
    choices = first[:-1, None] + torch.arange(-(-k // met), device=experts.device)
    ranks = experts.index_select(1, first[:-1]) // own
    order = ranks.flatten().argsort(stable=True)  # of the tokens sent
    gates = (order // met)[:, None] * k + choices.clamp(max=k - 1)[order % met]
    here = order.view(place.ranks, -1)[place.rank]  # the ranks that send to this one do it alike
    wanted = experts.flatten()[gates.view(place.ranks, len(here), -1)[place.rank]] - place.rank * own
    found = torch.where((choices < first[1:, None])[here % met], wanted, own).flatten()
    weights = found.argsort(stable=True)[: experts.numel() // place.ranks]
    return Routes(
        experts, order // met, order.argsort(), group, parts,
        per_rank=PerRank(gates.flatten(), weights // choices.shape[1], weights),
    )  # fmt: skip

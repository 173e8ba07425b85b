"""Where tokens go whose layer has experts.

Which experts a token visits is set by its place in the sequence, not by the router, so that all get the
same number (Megatron-LM's `--moe-router-force-load-balancing`): every rank's shapes are known beforehand, and
every world computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.model.architecture import Model


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Where the tokens of a microbatch go, constants all.

    `experts` [tokens, k]: of each token's copies; `sources` [k tokens]: whose copies they are, sorted by
    expert; `back` [k tokens]: where each token's copies stand in that order. `group`: the ranks that hold the
    experts, None where this rank holds all.
    """

    experts: Tensor
    sources: Tensor
    back: Tensor
    group: dist.ProcessGroup | None = None

    @property
    def ranks(self) -> int:
        """Ranks that share the experts."""
        return 1 if self.group is None else dist.get_world_size(self.group)


def routes(places: Tensor, sequences: int, model: Model, group: dist.ProcessGroup | None = None) -> Routes:
    """The routes of tokens at `places` of each of `sequences` sequences."""
    assert model.moe is not None
    choices = torch.arange(model.moe.top_k, device=places.device)
    experts = (places[:, None] * model.moe.top_k + choices).remainder(model.moe.num_experts)
    experts = experts.repeat(sequences, 1)
    order = experts.flatten().argsort(stable=True)
    return Routes(experts, order // model.moe.top_k, order.argsort(), group)

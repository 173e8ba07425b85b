"""How routing by force spreads tokens over the experts of ranks where one of them has more than the mean.

The experts of the first rank have `imbalance` times the mean, as nearly as whole tokens allow; those of the
others share the rest as evenly. All experts of a rank are alike. This holds for each `period` of tokens in a
row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwise.core.units import Num
from meshwise.cost.experts import met_places
from meshwise.model.architecture import MoE


@dataclass(frozen=True, slots=True)
class Load:
    """Of the choices of `period` tokens: how many each of a rank's `own` experts has, by rank."""

    period: int
    own: int
    choices: tuple[int, ...]

    def frac(self, rank: int) -> float:
        """The load of a rank over the mean."""
        return len(self.choices) * self.choices[rank] / sum(self.choices)


def met_ranks(moe: MoE, ranks: Num) -> Num:
    """On how many of `ranks` each token's experts lie: the whole number nearest to random routing's mean."""
    mean = met_places(ranks, moe.top_k, (float(moe.expert_groups), float(moe.top_groups)))
    return np.maximum(np.rint(mean), np.ceil(moe.top_k * ranks / moe.num_experts))


def expert_load(moe: MoE, ranks: int, imbalance: float, tokens: int) -> Load:
    """The load of so many tokens in a row, whose choices the experts of a rank divide evenly."""
    own = moe.num_experts // ranks
    busy = round(imbalance * tokens * moe.top_k / moe.num_experts)
    least, more = divmod(tokens * moe.top_k // own - busy, max(ranks - 1, 1))
    others = (least + (rank < more) for rank in range(ranks - 1))
    return Load(tokens, own, (busy, *others))

"""What a rank holds as shards under each ZeRO stage: one table for memory and traffic.

Ranks that hold the same weights keep them whole or as shards, sum gradients over microbatches in whole
tensors or in shards, and update all optimizer states or a shard. What is exchanged follows: weights held as
shards are gathered where they are used; whole weights whose states are shards are gathered once a step;
sums held as shards are reduced after the backward of every microbatch, whole ones once a step. So no stage
has the memory of one row and the exchanges of another.

ZeRO 1, 2 and 3 are DeepSpeed's stages (arXiv 1910.02054) and Megatron-FSDP's `optim`, `optim_grads` and
`optim_grads_params`. FSDP2 (`program.fsdp2`) always has shards between steps, and within one under stage 3;
under stages 0 and 1 it sums whole gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwise.core.units import Num

Column = tuple[float, float, float, float]
"""1 where a tensor is held as shards, for each ZeRO stage."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """What is held as shards under ZeRO stages 0 to 3: weights between their uses in a step, sums of
    gradients between microbatches, and optimizer states.
    """

    weights: Column
    sums: Column
    states: Column


STAGES = Sharding(weights=(0.0, 0.0, 0.0, 1.0), sums=(0.0, 0.0, 1.0, 1.0), states=(0.0, 1.0, 1.0, 1.0))
FSDP2 = Sharding(weights=(0.0, 0.0, 0.0, 1.0), sums=(0.0, 0.0, 1.0, 1.0), states=(1.0, 1.0, 1.0, 1.0))


def at_stage(column: Column, zero: Num) -> Num:
    """The entry of `column` for each ZeRO stage of a grid."""
    return np.array(column)[np.asarray(zero, dtype=np.intp)]


def num_reductions(sums_are_shards: Num, num_microbatches: Num) -> Num:
    """How often in a step gradients are reduced: once, or for each microbatch where the sums are shards."""
    return 1.0 + sums_are_shards * (num_microbatches - 1.0)

"""Whose software does what a plan says, as data (`catalog/implementations.toml`): no file tests its name."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwise.core.files import read_catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """What one software does differently from the layouts, and what it cannot do.

    `software`: the generation that it runs on unless a plan says so. `parts`: whose modules do the ops
    (`program.implementation`), empty for those of the layouts. `shards_each_weight`: data parallelism is
    FSDP2's. Every weight is cut along its first dim and padded; weights, gradients and both moments are
    fp32 (fp64 under fp64); gradients are reduced as `program.fsdp2` says. `fuses_norms`: a norm is one
    kernel with the linear layer behind it, whose input is the residual stream. `softmax_matrices`: its
    softmax of scores in memory is one kernel for multiples of so many matrices (sequences x heads of a
    rank). `fuses_with_loss`: kernels
    of blocks that are fused where `loss_fusion=kernels`, by the same library. `sorts_arrivals`: copies of
    tokens from several ranks are put together by expert in a copy of their own, and back. `losses`: whose
    loss it runs (`program.loss`), unfused unless the plan says so; else that of the plan's software.
    `deals_evenly`: its pipeline places layers evenly. `pairs_microbatches`: it hides exchanges of experts
    behind another microbatch where a schedule has one. The others say whether it has weights in fp8,
    diffusion transformers, models of encoder and decoder, towers beside a pipeline, and experts in few
    bits or with adapters. `adam_8bit_bytes`: what Adam in 8 bits (arXiv 2110.02861) keeps a parameter:
    both moments, and fp32 weights unless it updates those of the model. `overheads`: those that differ
    from its software's.
    """

    software: str
    parts: str = ""
    losses: str = ""
    shards_each_weight: bool = False
    fuses_norms: bool = False
    softmax_matrices: float = 1.0
    fuses_with_loss: Collection[str] = ()
    sorts_arrivals: bool = False
    deals_evenly: bool = False
    pairs_microbatches: bool = True
    holds_fp8_weights: bool = False
    runs_diffusion: bool = False
    runs_encoders: bool = True
    pipelines_towers: bool = True
    adapts_experts: bool = True
    adam_8bit_bytes: float = 6.0
    overheads: Mapping[str, Any] = field(default_factory=dict)


IMPLEMENTATIONS = {
    name: Implementation(**facts) for name, facts in read_catalog("implementations.toml").items()
}
"""The implementations by the names of a `Plan`."""

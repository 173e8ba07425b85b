"""Experts over ranks: who holds which expert, how many tokens an expert takes, what a MoE layer does.

Notation, that of GShard (arXiv 2006.16668): S tokens a rank and pass, M model width, E experts of width F,
each token visits `top_k` of them, and an expert has C *slots* a rank: its capacity. W ranks share the
experts, so a rank holds E / W of them and its expert GEMMs have W C rows. Between ranks two all-to-alls
carry every slot, filled or not: their size does not depend on where the router sends the tokens.

*Dense dispatch* writes the routing as a tensor [S, E, C] and moves tokens by matrix products, 2 S E C M
FLOP each; *sparse dispatch* copies the rows that are routed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwise.core.errors import PlanError
from meshwise.core.units import Num
from meshwise.model.gpt_config import GptConfig


def capacity(num_tokens: Num, num_experts: Num, *, token_fraction: Num, top_k: int = 2) -> Num:
    """Tokens that one expert takes from one rank: ceil(token_fraction x tokens) in evaluation.

    A `token_fraction` of 0 or less gives the rule of training, top_k x ceil(tokens / experts).
    Source: fairseq's top2gate.py and top1gate.py (branch moe).
    """
    in_training = top_k * np.ceil(np.divide(num_tokens, num_experts))
    return np.where(
        np.greater(token_fraction, 0), np.ceil(np.multiply(token_fraction, num_tokens)), in_training
    )


def num_slots(config: GptConfig, num_tokens: int | None = None) -> int:
    """Slots of an expert for a batch of `num_tokens` (None: a full batch of the config) on one rank."""
    tokens = config.tokens_per_sample * config.batch_size_valid if num_tokens is None else num_tokens
    token_frac = config.moe_eval_capacity_token_fraction
    return int(capacity(tokens, config.moe_expert_count, token_fraction=token_frac, top_k=config.top_k))


def check_tp(config: GptConfig, tp: int) -> None:
    """PlanError where `tp` does not divide heads, hidden widths or words."""
    for name, size in (
        ("decoder_attention_heads", config.decoder_attention_heads),
        ("decoder_ffn_embed_dim", config.decoder_ffn_embed_dim),
        ("moe_expert_ffn_dim", config.expert_ffn_dim),
        ("vocab_size", config.vocab_size),
    ):
        if size % tp:
            raise PlanError(f"{name}={size} does not divide by tp={tp}; use a divisor of it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A world of tp x dp ranks, tp on neighbours; each `ep` consecutive ranks of dp share the experts.

    `num_copies`: groups that each hold all experts. Rank r holds, of every MoE layer, the experts
    [ep_rank(r) local_experts, (ep_rank(r) + 1) local_experts).
    """

    world_size: int
    tp: int
    dp: int
    ep: int
    num_experts: int

    @property
    def local_experts(self) -> int:
        """Experts of one layer on one rank."""
        return self.num_experts // self.ep

    @property
    def num_copies(self) -> int:
        """How often every expert exists."""
        return self.dp // self.ep

    def tp_rank(self, rank: int) -> int:
        """Place of `rank` in its tensor-parallel group."""
        return rank % self.tp


def place(num_ranks: int, num_experts: int, *, tp: int = 1, ep: int | None = None) -> Placement:
    """The placement of `num_experts` (0: a model without any) on `num_ranks`, or PlanError.

    `ep` None: as many as there are data-parallel ranks, or experts if those are fewer.
    """
    if num_ranks % tp:
        raise PlanError(f"{num_ranks} ranks do not divide by tp={tp}; use a multiple of {tp}")
    dp = num_ranks // tp
    ep = ep or min(dp, num_experts or 1)
    if dp % ep:
        raise PlanError(
            f"{dp} data-parallel ranks do not divide by ep={ep}; use a multiple of {ep} ranks or another ep"
        )
    if num_experts % ep:
        raise PlanError(
            f"{num_experts} experts do not divide by {ep} expert-parallel ranks; use a divisor of "
            f"{num_experts}"
        )
    return Placement(world_size=num_ranks, tp=tp, dp=dp, ep=ep, num_experts=num_experts)

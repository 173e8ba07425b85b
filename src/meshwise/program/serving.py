"""A pass of a serving engine on one rank: a batch of prompts, or one new token of each running sequence.

An instance is tp x dp ranks. The attention of b sequences is cut by tp; each dp rank has sequences of its
own, with their cache of keys and values. The experts of a layer lie on ep ranks, each cut by etp: on the tp
ranks of one dp rank, which all see the same tokens and only have to add up their results, or over the tp
ranks of several, who send each token to its experts and fetch the result (*exchange*). There are no gradients
and no sequence parallelism; residuals are added in the norm that follows; logits are made for the last token
of a sequence alone. Latent attention (MLA) is stated with its up-projection, whose work is that of the
absorbed form which decodes from the latents.

What the ordinary kernels do not time is stated by what their own need: `attends` for one query a sequence,
`experts_of` for the experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwise.core.errors import PlanError
from meshwise.core.units import DTYPE_BYTES, Num
from meshwise.model.architecture import Model
from meshwise.program.cut import Cut
from meshwise.program.op import Op, elementwise, linear, precision
from meshwise.program.tensor_1d import attention, feed_forward, mlp, norm
from meshwise.program.vocabulary import embed, head

MOE = "moe"


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """tp x dp ranks that serve one model; `dtype` of weights and products, `kv_dtype` of the cache."""

    model: Model
    tp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    dtype: str = "bf16"
    kv_dtype: str = "bf16"

    @property
    def world(self) -> int:
        """Ranks of the instance."""
        return self.tp * self.dp

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold all experts once."""
        return self.ep * self.etp

    @property
    def exchanges(self) -> bool:
        """Whether tokens travel to their experts: these lie on the ranks of several dp ranks."""
        return self.model.moe is not None and self.expert_ranks > self.tp

    def cut(self, sequences: Num, tokens: int) -> Cut:
        """How a pass of `tokens` new tokens of each of `sequences` sequences (a dp rank's) is cut."""
        return Cut(
            microbatch=sequences, seq=float(tokens), tp=float(self.tp), precision=precision(self.dtype)
        )


def check_instance(of: Instance) -> None:
    """PlanError where the degrees do not divide what they cut."""
    model = of.model
    for what, size in (("heads", model.num_heads), ("ffn width", model.ffn_hidden)):
        if size % of.tp:
            raise PlanError(f"tp={of.tp} does not divide the {size} {what} of {model.name}; use a divisor")
    if model.num_kv_heads % of.tp and of.tp % model.num_kv_heads:
        raise PlanError(
            f"tp={of.tp} neither divides nor is divided by the {model.num_kv_heads} key-value heads of "
            f"{model.name}; use a divisor or a multiple"
        )
    if model.moe is None:
        if of.expert_ranks > 1 and of.expert_ranks != of.tp:
            raise PlanError(f"{model.name} has no experts; leave ep and etp out")
        return
    for what, size, name, degree in (
        ("experts", model.moe.num_experts, "ep", of.ep),
        ("expert width", model.moe.ffn_hidden, "etp", of.etp),
    ):
        if size % degree:
            raise PlanError(
                f"{name}={degree} does not divide the {size} {what} of {model.name}; use a divisor"
            )
    if of.expert_ranks % of.tp or of.world % of.expert_ranks:
        raise PlanError(
            f"ep={of.ep} x etp={of.etp} must be a multiple of tp={of.tp} and divide the {of.world} ranks, so "
            "that experts are spread at least as wide as attention"
        )
    if of.exchanges and of.etp > 1:
        raise PlanError(f"experts on several dp ranks are not cut too: use etp=1 with ep={of.expert_ranks}")


def layer_ops(of: Instance, sequences: Num, tokens: int, *, moe: bool) -> list[Op]:
    """The ordinary ops of one layer, those of its experts left out."""
    cut = of.cut(sequences, tokens)
    ops = list(attention(of.model, cut))
    ops += [*_around_experts(of, cut)] if moe else [*mlp(of.model, cut)]
    return [op for op in ops if op.phase == "forward" and not _is_elsewhere(op, tokens)]


def _is_elsewhere(op: Op, tokens: int) -> bool:
    """Ops that are fused with another, or that `attends` states."""
    return op.name.startswith(("residual", "dropout")) or (op.kind == "attention" and tokens == 1)


def _around_experts(of: Instance, cut: Cut) -> Iterator[Op]:
    """The norm, the router (in fp32 on every rank), and the shared experts, whose sum is that of all."""
    model, moe = of.model, of.model.moe
    assert moe is not None
    if model.num_norms > 1:
        yield from norm(model, cut, MOE, "norm2")
    yield from linear(
        MOE, "router", cut.tokens, model.hidden, float(moe.num_experts), precision("bf16"),
        bias=moe.router_bias or moe.balance_bias,
    )  # fmt: skip
    yield from elementwise(
        MOE, "router_softmax", "softmax", cut.tokens, float(moe.num_experts), precision("fp32")
    )
    if moe.shared_ffn_hidden:
        shared = feed_forward(model, cut, "shared_expert", float(moe.shared_ffn_hidden))
        yield from (op for op in shared if op.kind != "collective")


def ends_ops(of: Instance, sequences: Num, tokens: int) -> list[Op]:
    """The embedding of all new tokens, and norm and logits of each sequence's last."""
    ops = [*embed(of.model, of.cut(sequences, tokens)), *head(of.model, of.cut(sequences, 1))]
    return [op for op in ops if op.phase == "forward" and op.name != "cross_entropy"]


# --- what the weights and the cache hold ------------------------------------------------------------


def layer_params(of: Instance, *, moe: bool) -> float:
    """Parameters of one layer on a rank, experts included."""
    local = sum(float(op.num_params) for op in layer_ops(of, 1.0, 2, moe=moe))
    return local + (expert_params(of) * of.model.moe.num_experts / of.ep if moe and of.model.moe else 0.0)


def expert_params(of: Instance) -> float:
    """Parameters of one expert on one of its etp ranks."""
    moe = of.model.moe
    return (
        0.0 if moe is None else (3.0 if of.model.gated else 2.0) * of.model.hidden * moe.ffn_hidden / of.etp
    )


def end_params(of: Instance) -> float:
    """Parameters of embedding and head on a rank."""
    return sum(float(op.num_params) for op in ends_ops(of, 1.0, 1))


def cached_numbers(of: Instance) -> float:
    """Numbers that one layer keeps of one token on a rank: keys and values of its heads, or the latent."""
    model = of.model
    if model.mla is not None:
        return float(model.mla.kv_lora_rank + model.mla.qk_rope_head_dim)
    return 2.0 * max(model.num_kv_heads / of.tp, 1.0) * model.head_dim


def cached_tokens(model: Model, length: Num) -> Num:
    """Tokens that all layers together keep of a sequence of `length`; some look back on a window alone."""
    window = model.sliding_window
    if not window:
        return model.num_layers * np.asarray(length, dtype=np.float64)
    far = model.num_layers // model.full_attention_every if model.full_attention_every else 0
    return far * np.asarray(length, dtype=np.float64) + (model.num_layers - far) * np.minimum(length, window)


def cache_bytes_per_token(of: Instance) -> float:
    """Bytes that one layer's cache holds of a token on one rank."""
    return cached_numbers(of) * DTYPE_BYTES[of.kv_dtype]


# --- what is timed by kernels of its own ----------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Attends:
    """Attention of one query a sequence: heads of a rank, and the widths of a score and of a value."""

    heads: float
    qk_dim: float
    v_dim: float
    is_latent: bool


def attends(of: Instance) -> Attends:
    """The decode attention of one layer; latent attention works on the latents themselves."""
    model, heads = of.model, of.model.num_heads / of.tp
    if model.mla is not None:
        rank = float(model.mla.kv_lora_rank)
        return Attends(heads, rank + model.mla.qk_rope_head_dim, rank, True)
    return Attends(heads, float(model.head_dim), float(model.head_dim), False)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWork:
    """Of one MoE layer on one rank: tokens that it sees, and how many of a token's choices are its own."""

    tokens: Num
    top_k: Num
    experts: float


def experts_of(of: Instance, sequences: Num, tokens: int) -> ExpertWork:
    """The experts' work under even routing.

    Without an exchange a rank sees all tokens of its tp group; with one, those that need one of its experts.
    """
    moe = of.model.moe
    assert moe is not None
    share = 1.0 / of.ep
    own = np.asarray(sequences, dtype=np.float64) * tokens
    if not of.exchanges:
        return ExpertWork(own, moe.top_k * share, moe.num_experts * share)
    needed = -np.expm1(moe.top_k * np.log1p(-share))
    return ExpertWork(own * of.ep / of.tp * needed, moe.top_k * share / needed, moe.num_experts * share)

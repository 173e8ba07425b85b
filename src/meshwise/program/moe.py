"""The MLP of a mixture-of-experts layer under expert parallelism (ep) and expert tensor parallelism (etp).

Each rank routes its own tokens (cut by tp): a small matmul scores the experts, the top k are taken, and each
token is copied k times and sent by all-to-all over `ep` to the ranks that hold its experts. The etp ranks of
an expert gather the arrivals, compute, and reduce-scatter; a second all-to-all brings the results home, where
they are added (Megatron-LM sorts what several ranks sent by expert, and back: `sort_chunks_by_idxs` of its
token_dispatcher.py): they were weighed with the activations, before the second matmul, so that no wide tensor
is kept for it. MaxText puts them in the order of tokens first and weighs them then: their gradients need
them, so that recomputation runs the second matmul too. Where the dispatch is per rank (DeepEP, HybridEP) a
token goes once to each of the d(ep) ranks that hold some of its experts, d(n) = n (1 - (1 - 1/n)^k), and on
its way once to each node (fewer of both where the router is limited to groups of experts). Balanced routing
gives each of the E/ep local experts k T etp ep / E rows, T the tokens a rank routes; `imbalance` scales the
busiest rank. With a capacity factor c every expert computes exactly c k T / E rows from each rank, full or
not.

Source: Megatron-LM's MoE (arXiv 2504.14960) and GShard (arXiv 2006.16668) for the capacity.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import structs

from meshwise.core.units import Num
from meshwise.cost.experts import met_places
from meshwise.model.architecture import Model, MoE
from meshwise.plan.implementation import IMPLEMENTATIONS
from meshwise.program import op as ops
from meshwise.program.cut import Cut
from meshwise.program.op import Op, Stated, Tensor, collective, elementwise, exchanged, made, precision
from meshwise.program.tensor_1d import dequantized, feed_forward, leave, norm, plain_linear

MODULE = "moe"


def moe_mlp(model: Model, cut: Cut, x: Tensor) -> Stated:
    """Norm, router, dispatch, experts, combine, shared experts, residual."""
    assert model.moe is not None
    moe, tokens = model.moe, cut.tokens / cut.tp
    normed = (yield from norm(model, cut, MODULE, "norm2", x)) if model.num_norms > 1 else x
    part = Tensor(f"{MODULE}.own", (tokens, model.hidden), x.dtype, normed)
    routed = own = normed if cut.sequence_parallel else part
    if moe.own_norms:
        routed = yield from norm(model, cut, MODULE, "router_norm", own)
        routed = yield from elementwise(MODULE, "router_scale", "layer_scale", routed, cut.precision)
    # The router runs in fp32; its input is the norm's output, which it keeps.
    wide = precision(cut.precision.stat_dtype)
    scores = yield from ops.linear(
        MODULE, "router", routed, float(moe.num_experts + moe.zero_experts), precision("bf16"),
        bias=moe.router_bias,
        frozen=cut.lora_rank > 0,
    )  # fmt: skip
    if moe.balance_bias:
        width = float(moe.num_experts)
        yield ops.kernel(MODULE, "balance_bias", "residual", tokens, width, wide, phase="forward")
    yield from elementwise(MODULE, "router_softmax", "softmax", scores, wide)
    if moe.own_norms:
        gates = made(MODULE, "gates", (tokens, float(moe.top_k)), wide.dtype)
        yield from elementwise(MODULE, "expert_scale", "scale_by_gate", gates, wide)
        own = yield from norm(model, cut, MODULE, "expert_norm", own)
    if moe.latent:
        (own,) = yield from plain_linear(
            MODULE, "latent_down", own, {"latent_down": moe.width(model.hidden)}, cut, bias=model.linear_bias
        )
    y = yield from _experts(model, moe, cut, tokens, own)
    if moe.latent_norm:
        y = yield from norm(model, cut, MODULE, "latent_norm", y)
    if moe.latent:
        (y,) = yield from plain_linear(
            MODULE, "latent_up", y, {"latent_up": float(model.hidden)}, cut, bias=model.linear_bias
        )
    if moe.own_norms:
        y = yield from norm(model, cut, MODULE, "sum_norm", y)
    if moe.shared_ffn_hidden:
        yield from shared_expert(model, moe, cut, normed)
    return (yield from leave(model, cut, MODULE, 2, y, x))


def shared_expert(model: Model, moe: MoE, cut: Cut, x: Tensor) -> Stated:
    """The MLP that all tokens visit, and the gate that scales it, where there is one."""
    module = "shared_expert"
    y = yield from feed_forward(model, cut, module, float(moe.shared_ffn_hidden), x)
    if moe.own_norms:
        y = yield from norm(model, cut, module, "sum_norm", y)
        y = yield from elementwise(module, "sum", "residual", y, cut.precision)
    if moe.shared_gate:
        yield from plain_linear(module, "gate", x, {"shared_gate": 1.0}, cut)
        y = yield from elementwise(module, "gate_scale", "scale_by_gate", y, cut.precision)
    return y


def expert_rows(moe: MoE, cut: Cut, tokens: Num) -> Num:
    """Rows that each local expert computes on the busiest rank, `tokens` routed by every rank."""
    sources = cut.ep * cut.etp
    if moe.capacity_factor:
        return np.ceil(moe.capacity_factor * moe.computed * tokens / moe.num_experts) * sources
    return moe.computed * tokens * sources / moe.num_experts * cut.imbalance


def _experts(model: Model, moe: MoE, cut: Cut, tokens: Num, x: Tensor) -> Stated:
    prec, hidden = cut.precision, moe.width(model.hidden)
    local_experts = moe.num_experts / cut.ep
    rows = expert_rows(moe, cut, tokens)
    arrivals = rows * local_experts
    sent = arrivals / cut.etp
    busier = sent if moe.capacity_factor else np.maximum(sent, moe.computed * tokens)  # of its two ways
    payload = busier * hidden * prec.act_bytes
    per_rank = cut.dispatch_per_rank * (cut.ep * cut.etp > 1)
    on_etp: dict[str, Any] = {
        "axis": "tp",
        "payload_bytes": arrivals * hidden * prec.act_bytes,
        "group_size": cut.etp,
        "stride": cut.tp_stride,
    }
    width = moe.ffn_hidden / cut.etp
    names = ("gate", "up") if model.gated else ("up",)
    of_all = local_experts, rows
    wide = tuple(made(MODULE, f"expert_{name}", (*of_all, width), prec.act_dtype) for name in names)

    def grouped(name: str, x: Tensor, results: tuple[Tensor, ...]) -> Iterator[Op]:
        if cut.lora_rank:
            d_out = sum(one.shape[-1] for one in results)
            yield from dequantized(MODULE, name, local_experts * x.shape[-1] * d_out, cut)
        for op in ops.linears(
            MODULE, name, x, results, prec, bias=model.linear_bias, grouped=True, frozen=cut.lora_rank > 0
        ):
            is_ragged = op.kind == "matmul" and not moe.capacity_factor
            yield structs.replace(op, library="ragged") if is_ragged else op

    copies = yield from elementwise(MODULE, "dispatch", "copy", x, prec, shape=(sent, hidden))
    # Tokens, and in the backward gradients, may go in a narrow type; what comes back is added in a wide one.
    out_bytes = payload * cut.dispatch_bytes / prec.act_bytes
    arrived = exchanged(copies, f"{MODULE}.arrived", (sent, hidden), cut.ep)
    sorts = IMPLEMENTATIONS[cut.implementation].sorts_arrivals and not np.all(per_rank)
    groups = float(moe.expert_groups), float(moe.top_groups)
    met = met_places(cut.ep, moe.computed, groups) if np.any(per_rank) else 0.0
    exchange = functools.partial(_exchange, moe, cut, per_rank, met)
    mixed = (1.0 - per_rank) * (cut.ep > 1) * (local_experts > 1)  # arrivals of several ranks and experts
    inputs = exchanged(arrived, f"{MODULE}.expert_input", (*of_all, hidden), cut.etp)
    yield from exchange("dispatch", "forward", out_bytes, copies, arrived)
    yield from exchange("dispatch", "backward", payload)
    if sorts:
        yield from _sorted("sort", arrived, cut, mixed)
    yield collective(
        MODULE, "expert_fc1", "forward", "all_gather", reads=(arrived,), makes=(inputs,), **on_etp
    )
    yield from grouped("expert_fc1", inputs, wide)
    yield collective(MODULE, "expert_fc1", "backward", "reduce_scatter", **on_etp)
    acted = yield from elementwise(
        MODULE, "expert_act", model.activation, wide, prec, shape=(arrivals, width)
    )
    yield collective(MODULE, "expert_fc2", "backward", "all_gather", **on_etp)
    acted = Tensor(acted.name, (*of_all, width), acted.dtype, acted)
    partial = made(MODULE, "expert_output", (*of_all, hidden), prec.act_dtype)
    yield from grouped("expert_fc2", acted, (partial,))
    answers = exchanged(partial, f"{MODULE}.answers", (sent, hidden), cut.etp)
    back = exchanged(answers, f"{MODULE}.combined", (sent, hidden), cut.ep)
    yield collective(
        MODULE, "expert_fc2", "forward", "reduce_scatter", reads=(partial,), makes=(answers,), **on_etp
    )
    if sorts:
        yield from _sorted("unsort", answers, cut, mixed)
    yield from exchange("combine", "forward", payload, answers, back)
    yield from exchange("combine", "backward", out_bytes)
    summed = made(MODULE, "sum", x.shape, prec.act_dtype)
    weighs_last = cut.weighs_last and moe.top_k > 1  # Llama 4, of one choice, weighs what its experts read
    if weighs_last and not moe.capacity_factor:
        yield from _sorted("to_tokens", back, cut, 1.0)
    for op in elementwise(MODULE, "combine", "weigh_copies" if weighs_last else "sum_copies", back, prec):
        yield structs.replace(op, makes=(summed,)) if op.makes else op
    return summed


def _exchange(
    moe: MoE, cut: Cut, per_rank: Num, met: Num, name: str, phase: str, payload_bytes: Num, *tensors: Tensor
) -> Iterator[Op]:
    """Tokens over `ep`, once for each of their experts, or for each of the `met` ranks where `per_rank` is 1.

    `payload_bytes`: those of all experts. `tensors`: what is read, and what is made.
    """
    groups = float(moe.expert_groups), float(moe.top_groups)
    to_ranks = payload_bytes * met / moe.computed
    named = {"reads": tensors[:1], "makes": tensors[1:]}
    for is_way, choices, size in ((1.0 - per_rank, 0.0, payload_bytes), (per_rank, moe.computed, to_ranks)):
        if np.any(is_way):
            yield collective(
                MODULE, name, phase, "all_to_all", "ep", size, cut.ep, stride=cut.ep_stride, count=is_way,
                choices=choices, groups=groups, **named,
            )  # fmt: skip
            named = {}  # where some plans have both ways, one of them names what they share


def _sorted(name: str, x: Tensor, cut: Cut, count: Num) -> Iterator[Op]:
    """Tokens of several ranks put together by expert, or back: a copy that takes their place."""
    for op in elementwise(MODULE, name, "copy", x, cut.precision):
        yield structs.replace(op, count=count, reads=(), makes=(), keeps=())

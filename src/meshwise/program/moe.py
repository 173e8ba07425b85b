"""The MLP of a mixture-of-experts layer under expert parallelism (ep) and expert tensor parallelism (etp).

Each rank routes its own tokens (cut by tp): a small matmul scores the experts, the top k are taken,
and each token is copied k times and sent by all-to-all over `ep` to the ranks that hold its experts.
The etp ranks of an expert gather the arrivals, compute, and reduce-scatter; a second all-to-all
brings the results home, where they are added: they were weighed with the activations, before the second
matmul, so that no wide tensor is kept for it. Where the dispatch is per rank (DeepEP, HybridEP)
a token goes once to each of the d(ep) ranks that hold some of its experts, d(n) = n (1 - (1 - 1/n)^k), and
on its way once to each node (fewer of both where the router is limited to groups of experts). Balanced
routing gives each of the E/ep local experts k T etp ep / E rows, T the tokens a rank routes; `imbalance`
scales the busiest rank. With a capacity factor c every expert computes exactly c k T / E rows from each
rank, full or not.

Source: Megatron-LM's MoE (arXiv 2504.14960) and GShard (arXiv 2006.16668) for the capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import structs

from meshwise.core.units import Num
from meshwise.cost.experts import met_places
from meshwise.model.architecture import Model, MoE
from meshwise.program.cut import Cut
from meshwise.program.expert_load import met_ranks
from meshwise.program.op import Op, collective, elementwise, kernel, linear, precision
from meshwise.program.tensor_1d import dequantized, feed_forward, leave, norm, plain_linear

MODULE = "moe"


def moe_mlp(model: Model, cut: Cut) -> Iterator[Op]:
    """Norm, router, dispatch, experts, combine, shared experts, residual."""
    assert model.moe is not None
    moe = model.moe
    if model.num_norms > 1:
        yield from norm(model, cut, MODULE, "norm2")
    tokens = cut.tokens / cut.tp
    if moe.own_norms:
        yield from norm(model, cut, MODULE, "router_norm")
        yield from elementwise(MODULE, "router_scale", "layer_scale", tokens, model.hidden, cut.precision)
    # The router runs in fp32; its input is the norm's output, which it keeps.
    yield from linear(
        MODULE, "router", tokens, model.hidden, float(moe.num_experts), precision("bf16"), saved_rows=tokens,
        bias=moe.router_bias, frozen=cut.lora_rank > 0,
    )  # fmt: skip
    if moe.balance_bias:
        scores = (tokens, float(moe.num_experts), precision("fp32"))
        yield kernel(MODULE, "balance_bias", "residual", *scores, phase="forward")
    yield from elementwise(
        MODULE, "router_softmax", "softmax", tokens, float(moe.num_experts), precision("fp32")
    )
    if moe.own_norms:
        yield from elementwise(MODULE, "expert_scale", "scale_by_gate", tokens, moe.top_k, precision("fp32"))
        yield from norm(model, cut, MODULE, "expert_norm")
    yield from _experts(model, moe, cut, tokens)
    if moe.own_norms:
        yield from norm(model, cut, MODULE, "sum_norm")
    if moe.shared_ffn_hidden:
        yield from shared_expert(model, cut)
    yield from leave(model, cut, MODULE, 2)


def shared_expert(model: Model, cut: Cut) -> Iterator[Op]:
    """The MLP that all tokens visit, and the gate that scales it, where there is one."""
    assert model.moe is not None
    module, rows = "shared_expert", cut.split_tokens
    for op in feed_forward(model, cut, module, float(model.moe.shared_ffn_hidden)):
        is_input = (op.name, op.kind, op.phase) == ("fc1", "matmul", "forward") and not cut.precision.casts
        own = 1.0 - cut.tokens / cut.tp / rows if is_input else 1.0  # the router keeps what it reads
        yield structs.replace(op, saved_bytes=op.saved_bytes * own)
    if model.moe.own_norms:
        yield from norm(model, cut, module, "sum_norm")
        yield from elementwise(module, "sum", "residual", rows, model.hidden, cut.precision)
    if model.moe.shared_gate:
        yield from plain_linear(module, "gate", rows, model.hidden, {"shared_gate": 1.0}, cut, saved_rows=0.0)
        yield from elementwise(module, "gate_scale", "scale_by_gate", rows, model.hidden, cut.precision)


def expert_rows(moe: MoE, cut: Cut, tokens: Num) -> Num:
    """Rows that each local expert computes on the busiest rank, `tokens` routed by every rank."""
    sources = cut.ep * cut.etp
    if moe.capacity_factor:
        return np.ceil(moe.capacity_factor * moe.top_k * tokens / moe.num_experts) * sources
    rows = moe.top_k * tokens * sources / moe.num_experts * cut.imbalance
    is_by_force = cut.implementation == "fsdp2" and np.any(cut.imbalance != 1.0)
    return np.rint(rows) if is_by_force else rows


def _experts(model: Model, moe: MoE, cut: Cut, tokens: Num) -> Iterator[Op]:
    prec, hidden = cut.precision, model.hidden
    local_experts = moe.num_experts / cut.ep
    rows = expert_rows(moe, cut, tokens)
    arrivals = rows * local_experts
    sent = arrivals / cut.etp
    busier = sent if moe.capacity_factor else np.maximum(sent, moe.top_k * tokens)  # of its two ways
    payload = busier * hidden * prec.act_bytes
    per_rank = cut.dispatch_per_rank and not moe.capacity_factor
    groups = float(moe.expert_groups), float(moe.top_groups)
    is_by_force = per_rank and cut.implementation == "fsdp2"
    met = met_ranks(moe, cut.ep) if is_by_force else met_places(cut.ep, moe.top_k, groups)
    copies_frac = met / moe.top_k if per_rank else 1.0
    on_ep: dict[str, Any] = {
        "axis": "ep",
        "group_size": cut.ep,
        "stride": cut.ep_stride,
        "choices": float(moe.top_k) if per_rank else 0.0,
        "groups": groups,
    }
    on_etp: dict[str, Any] = {
        "axis": "tp",
        "payload_bytes": arrivals * hidden * prec.act_bytes,
        "group_size": cut.etp,
        "stride": cut.tp_stride,
    }
    width = moe.ffn_hidden / cut.etp
    fc1_width = 2.0 * width if model.gated else width

    def grouped(name: str, rows: Num, d_in: Num, d_out: Num) -> Iterator[Op]:
        if cut.lora_rank:
            yield from dequantized(MODULE, name, local_experts * d_in * d_out, cut)
        yield from linear(
            MODULE, name, rows, d_in, d_out, prec, batch=local_experts, bias=model.linear_bias, grouped=True,
            frozen=cut.lora_rank > 0,
        )  # fmt: skip

    yield from elementwise(MODULE, "dispatch", "copy", sent, hidden, prec)
    # Tokens, and in the backward gradients, may go in a narrow type; what comes back is added in a wide one.
    home_bytes = payload * copies_frac
    out_bytes = home_bytes * cut.dispatch_bytes / prec.act_bytes
    yield collective(MODULE, "dispatch", "forward", "all_to_all", payload_bytes=out_bytes, **on_ep)
    yield collective(MODULE, "dispatch", "backward", "all_to_all", payload_bytes=home_bytes, **on_ep)
    if is_by_force:  # experts weigh their answers, so that those of a rank are added up there
        of_gates = tokens * met * np.ceil(moe.top_k / met) * prec.act_bytes
        for phase in ("forward", "backward"):
            yield collective(MODULE, "gates", phase, "all_to_all", payload_bytes=of_gates, **on_ep)
    yield collective(MODULE, "expert_fc1", "forward", "all_gather", **on_etp)
    yield from grouped("expert_fc1", rows, hidden, fc1_width)
    yield collective(MODULE, "expert_fc1", "backward", "reduce_scatter", **on_etp)
    yield from elementwise(MODULE, "expert_act", model.activation, arrivals, width, prec)
    yield collective(MODULE, "expert_fc2", "backward", "all_gather", **on_etp)
    yield from grouped("expert_fc2", rows, width, hidden)
    yield collective(MODULE, "expert_fc2", "forward", "reduce_scatter", **on_etp)
    home = [
        collective(MODULE, "combine", "forward", "all_to_all", payload_bytes=home_bytes, **on_ep),
        collective(MODULE, "combine", "backward", "all_to_all", payload_bytes=out_bytes, **on_ep),
    ]
    added = [*elementwise(MODULE, "combine", "sum_copies", sent, hidden, prec)]
    yield from added + home if is_by_force else home + added

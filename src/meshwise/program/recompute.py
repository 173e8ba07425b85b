"""Selective recomputation: which ops of a block the backward runs again, and what is not kept for that.

A plan names modules as Megatron-LM does (`--recompute-modules`; megatron/core/transformer, d98e8a6):

    core_attn       the attention itself; under fused attention only its statistics go
    mla_up_proj     queries, keys and values of latent attention, from the kept latents of a rank's own tokens
                    and the key that all heads share
    layernorm       results and statistics of norms that are kernels of their own: before latent attention and
                    before experts (other norms are one kernel with the matmul behind them)
    moe_act         the input of the experts' second matmul, from the kept result of the first
    mlp             a dense MLP but its input
    moe             router, exchange and experts but their input
    shared_experts  the MLP that all tokens visit but its input
    per_op          torchtitan's selective checkpointing (distributed/activation_checkpoint.py, b5bcd76): kept
                    are the block's input, and the results of fused attention, of reduce-scatters, of
                    all-to-alls and of every other matmul, the first one included

What modules drop adds up, as far as an op keeps it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import numpy as np
from msgspec import structs

from meshwise.core.units import Num
from meshwise.model.architecture import MLA, Model
from meshwise.program.context import CORE
from meshwise.program.cut import Cut
from meshwise.program.implementation import IMPLEMENTATIONS
from meshwise.program.op import Op
from meshwise.program.torch_ops import widths

AROUND = ("norm", "post_norm", "dropout", "residual")
"""How the names of ops begin that lie around a module: their input, the residual stream, stays."""


def with_recompute(model: Model, cut: Cut, ops: list[Op]) -> Iterator[Op]:
    """The ops of a block with what selective recomputation drops of each, and what share it runs again."""
    if "per_op" in cut.recompute_modules:
        yield from _per_op(model, cut, ops)
        return
    is_moe = any(op.module == "moe" for op in ops)
    only_core = cut.recompute_modules == ("core_attn",)
    for op in ops:
        if op.phase == "backward" or (only_core and op.name not in CORE):
            yield op
            continue
        found = [_by_module(model, cut, op, module, is_moe) for module in cut.recompute_modules]
        dropped = np.minimum(sum((dropped for dropped, _ in found), 0.0), op.saved_bytes)
        yield structs.replace(
            op,
            recomputed_bytes=dropped,
            redone_frac=float(any(again for _, again in found)),
            doubled_bytes=op.doubled_bytes + _normed_for_adapters(model, cut, op),
        )


def _by_module(model: Model, cut: Cut, op: Op, module: str, is_moe: bool) -> tuple[Num, bool]:
    """Bytes that recomputing `module` drops of an op of the forward, and whether it runs the op again."""
    place, everything = (op.module, op.name), op.saved_bytes
    if module == "core_attn":
        return op.recomputed_bytes, op.name in CORE
    if module == "mla_up_proj" and model.mla:
        return _of_up_projections(cut, op, model.mla)
    if module == "layernorm":
        return _of_norms(model, cut, op, is_moe)
    if module == "moe_act":
        return everything * (place == ("moe", "expert_fc2")), place == ("moe", "expert_act")
    inside = {"mlp": ("mlp",), "moe": ("moe", "shared_expert"), "shared_experts": ("shared_expert",)}
    is_inside = op.module in inside.get(module, ()) and not op.name.startswith(AROUND)
    fuses_norms = IMPLEMENTATIONS[cut.implementation].fuses_norms
    if not fuses_norms and (module == "mlp" or cut.lora_rank):  # else a router keeps what the norm made
        normed = cut.split_tokens * model.hidden * cut.precision.act_bytes
        # An exchange may gather it for the first matmul, and experts that do not train do not keep it.
        is_apart = cut.sequence_parallel * (cut.tp > 1) * 1.0
        if model.moe and not model.moe.shared_ffn_hidden and module == "moe":
            is_apart = 1.0
        if place == ("mlp" if module == "mlp" else "moe", "norm2"):
            is_redone = module != "mlp" and "layernorm" in cut.recompute_modules
            return -normed * is_apart * (module in _outermost(cut) and not is_redone), False
        if is_inside and op.name == (_first_adapter(model) if cut.lora_rank else "fc1"):
            return np.maximum(everything - normed * (1.0 - is_apart), 0.0), True
    keeps_input = place == ("moe", "router") or (fuses_norms and place == ("shared_expert", "fc1"))
    return everything * (is_inside and not keeps_input), is_inside


def _normed_for_adapters(model: Model, cut: Cut, op: Op) -> Num:
    """What a norm makes again for shared experts that do too, whose adapters keep what tp gathers of it."""
    modules = set(cut.recompute_modules)
    is_made = {"layernorm", "shared_experts"} <= modules and "moe" not in modules
    if not (is_made and cut.lora_rank and (op.module, op.name) == ("moe", "norm2")):
        return 0.0
    return cut.sequence_parallel * (cut.tp > 1) * cut.split_tokens * model.hidden * cut.precision.act_bytes


def _of_norms(model: Model, cut: Cut, op: Op, is_moe: bool) -> tuple[Num, bool]:
    """The same of norms that are kernels of their own; PyTorch keeps what was gathered of their results."""
    place, everything = (op.module, op.name.removesuffix("_lora_a")), op.saved_bytes
    norms = (("attention", "norm1"),) * bool(model.mla) + (("moe", "norm2"),) * is_moe
    readers = (("attention", "q_down"), ("attention", "kv_down")) * bool(model.mla)
    readers += (("moe", "router"),) * is_moe
    of_all = (("attention", "q"),) * bool(model.mla)
    of_all += (("shared_expert", "fc1"), ("shared_expert", "gate"), ("shared_expert", "up")) * is_moe
    statistics = everything - math.prod(op.shape) * cut.precision.act_bytes if place in norms else 0.0
    is_gathered = (cut.implementation == "fsdp2") * cut.sequence_parallel * (cut.tp > 1) * 1.0
    dropped = everything * ((place in readers) + (place in of_all) * (1.0 - is_gathered))
    return statistics + dropped, place in norms


def _of_up_projections(cut: Cut, op: Op, mla: MLA) -> tuple[Num, bool]:
    """What making queries, keys and values of latents again drops of an op, and whether it runs the op."""
    layer, _, adapter = op.name.partition("_lora_")
    again = op.module == "attention" and layer in ("q", "q_up", "kv_up", "rotary", "ulysses_qkv")
    if op.kind == "attention":
        return _queries_keys_values(cut, op), False
    if op.module == "attention" and op.name in ("logits", "attend"):
        return op.saved_bytes - op.recomputed_bytes, False
    if IMPLEMENTATIONS[cut.implementation].fuses_norms:  # what norms read stays, which is part of the latents
        return 0.0, again
    if op.name == "rotary":
        return -cut.tokens * mla.qk_rope_head_dim * cut.precision.act_bytes, again
    is_gathered = cut.sequence_parallel * (cut.tp > 1) * 1.0
    if op.name in ("q_norm", "kv_norm"):
        return -math.prod(op.shape) * cut.precision.act_bytes * is_gathered, False
    return op.saved_bytes * (1.0 if adapter == "b" else is_gathered) * again, again


def _first_adapter(model: Model) -> str:
    """The op of an MLP's adapters that keeps what all of them read."""
    return ("gate" if model.gated else "up") + "_lora_a"


def _outermost(cut: Cut) -> set[str]:
    """The modules that are recomputed in none of the others."""
    inside = {"moe_act", "shared_experts"} if "moe" in cut.recompute_modules else set()
    return set(cut.recompute_modules) - inside


def _queries_keys_values(cut: Cut, op: Op) -> Num:
    """Bytes of the inputs of fused attention."""
    batch, heads, kv_heads, seq_q, _, qk_dim, v_dim = op.shape
    return batch * seq_q * (heads * qk_dim + kv_heads * (qk_dim + v_dim)) * cut.precision.act_bytes


def _results(cut: Cut, op: Op) -> Num:
    """Bytes of what fused attention makes: its output, and a number for each query and head."""
    batch, heads, _, seq_q, _, _, v_dim = op.shape
    return batch * heads * seq_q * (v_dim * cut.precision.act_bytes + cut.precision.stat_bytes)


def _per_op(model: Model, cut: Cut, ops: list[Op]) -> Iterator[Op]:
    stays, number = {}, 0
    for op in _matmuls_in_turn(cut, ops):
        columns = op.shape[2]
        made = [columns] if cut.implementation == "fsdp2" else widths(model, cut, op.name, columns)
        stays[id(op)] = sum(width for i, width in enumerate(made, number) if i % 2 == 0)
        number += len(made)
    for op in ops:
        kept: Num = 0.0
        again: Num = 1.0
        if op.phase == "backward":
            yield op
            continue
        if op.name == "norm1":
            kept = cut.split_tokens * model.hidden * cut.precision.act_bytes
        elif op.kind == "attention":
            kept, again = op.count * _results(cut, op), 0.0
        elif op.collective in ("reduce_scatter", "all_to_all") and not op.name.startswith("ulysses"):
            parts = op.group_size if op.collective == "reduce_scatter" else 1.0
            kept, again = op.count * op.payload_bytes / parts * (np.asarray(op.group_size) > 1), 0.0
            if op.collective == "all_to_all":  # counted by the busier way; arrivals, or the rank's own tokens
                most, least = np.maximum(cut.imbalance, 1.0), np.minimum(cut.imbalance, 1.0)
                kept = np.rint(kept / most if op.name == "combine" else kept * least)
        elif id(op) in stays:
            _, rows, columns, _ = op.shape
            kept, again = rows * stays[id(op)] * cut.precision.act_bytes, 1.0 - stays[id(op)] / columns
        yield structs.replace(op, recomputed_bytes=op.saved_bytes - kept, redone_frac=again)


def _matmuls_in_turn(cut: Cut, ops: list[Op]) -> Iterator[Op]:
    """The matmuls of weights that count; PyTorch runs adapters right behind the layer that they adapt."""
    layers: deque[Op] = deque()
    for op in ops:
        is_forward = op.phase == "forward" and op.kind == "matmul"
        if not is_forward or op.name in CORE or op.name.startswith(("expert_", "router")):
            continue
        if cut.lora_rank and cut.implementation == "fsdp2":
            if "_lora_" not in op.name:
                layers.append(op)
                continue
            if op.name.endswith("_lora_a"):
                yield layers.popleft()
        yield op

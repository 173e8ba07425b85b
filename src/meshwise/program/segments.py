"""Segments of selective recomputation: ops that the backward runs again together, and what of them is kept.

A plan names modules as Megatron-LM does (`--recompute-modules`; megatron/core/transformer, d98e8a6). Each is
a segment of ops (`program.walk`); those that *drop* their results have them made again where they are read:

    core_attn       the attention itself
    mlp             a dense MLP; its norm is part of it where both are one kernel
    moe             router, exchange and experts
    shared_experts  the MLP that all tokens visit
    layernorm       norms that are kernels of their own, before latent attention and before experts; drops
    moe_act         the activation function of experts; drops
    mla_up_proj     queries, keys and values of latent attention, from the latents to the exchange; drops
    per_op          torchtitan's selective checkpointing (distributed/activation_checkpoint.py, b5bcd76): all
                    of a block; the results of fused attention, of reduce-scatters, of all-to-alls and of
                    every other matmul, the first one included, stay; those of fp4 are not in its list.
                    Compiled, the block's last does not either, which no backward reads (`train` is not)
"""

from collections.abc import Iterator

from msgspec import structs

from meshwise.core.numbers import added
from meshwise.core.units import Num
from meshwise.model.architecture import Model
from meshwise.plan.implementation import IMPLEMENTATIONS
from meshwise.program.context import CORE, SIDE_BY_SIDE
from meshwise.program.cut import Cut
from meshwise.program.op import Op, Tensor

AROUND = ("norm", "post_norm", "dropout", "residual")
"""How the names of ops begin that lie around a module."""
MODULES = {"mlp": ("mlp",), "moe": ("moe", "shared_expert"), "shared_experts": ("shared_expert",)}
"""The modules of ops that a recomputed module is made of."""
UP_PROJECTIONS = ("q", "q_up", "kv_up", "rotary", "ulysses_qkv")
"""From latents to heads; norms of latents too, where they are one kernel with the matmul behind them."""


def with_recompute(model: Model, cut: Cut, ops: list[Op]) -> Iterator[Op]:
    """The ops of a block with the segments that selective recomputation runs again."""
    if "per_op" in cut.recompute_modules:
        yield from _per_op(cut, ops)
        return
    is_moe = any(op.module == "moe" for op in ops)
    dropped: dict[int, str] = {}  # results of segments that drop them, and their narrow copies
    for op in ops:
        segment = _segment(model, cut, op, is_moe) if op.phase == "forward" else ""
        drops = segment.partition(".")[0] in ("layernorm", "moe_act", "mla_up_proj")
        if op.name.endswith("_cast") and op.reads:
            origin = op.reads[0]
            while id(origin) not in dropped and origin.storage is not None:
                origin = origin.storage
            if id(origin) in dropped:
                segment, drops = dropped[id(origin)], True
        if drops:
            dropped |= {id(one): segment for one in op.makes}
        yield structs.replace(op, segment=segment, drops=drops, redone_frac=1.0) if segment else op


def _segment(model: Model, cut: Cut, op: Op, is_moe: bool) -> str:
    """The segment of an op of the forward: the outermost of the recomputed modules that it is in."""
    chosen = cut.recompute_modules
    for module in ("mlp", "moe", "shared_experts"):
        is_norm = module == "mlp" and op.name == "norm2" and IMPLEMENTATIONS[cut.implementation].fuses_norms
        if module in chosen and op.module in MODULES[module] and (is_norm or not op.name.startswith(AROUND)):
            return module
    if "core_attn" in chosen and op.name in CORE:
        return "core_attn"
    if "moe_act" in chosen and (op.module, op.name) == ("moe", "expert_act"):
        return "moe_act"
    norms = [("attention", "norm1")] * bool(model.mla) + [("moe", "norm2")] * is_moe
    if "layernorm" in chosen and (op.module, op.name) in norms:
        return f"layernorm.{op.name}"
    layer = op.name.removesuffix("_cast").partition("_lora_")[0]
    projections = UP_PROJECTIONS + ("q_norm", "kv_norm") * IMPLEMENTATIONS[cut.implementation].fuses_norms
    if "mla_up_proj" in chosen and model.mla and op.module == "attention" and layer in projections:
        return "mla_up_proj"
    return ""


def _is_saved(op: Op) -> bool:
    """Whether a matmul is one of those of which every other one stays."""
    return op.dtype != "fp4" and op.name not in CORE and not op.name.startswith(("expert_", "router"))


def _per_op(cut: Cut, ops: list[Op]) -> Iterator[Op]:
    number, is_compiled = 0, not (cut.is_eager or IMPLEMENTATIONS[cut.implementation].shards_each_weight)
    for op in ops:
        if op.phase == "backward":
            yield op
            continue
        stays: tuple[Tensor, ...] = ()
        again: Num = 1.0
        is_exchange = op.collective in ("reduce_scatter", "all_to_all") and not op.name.startswith("ulysses")
        if op.kind == "attention" or is_exchange:
            stays, again = op.makes, 0.0
        elif op.kind == "matmul" and _is_saved(op):
            layers = [(one,) for one in op.makes] if op.name in SIDE_BY_SIDE else [op.makes]
            stays = tuple(one for i, layer in enumerate(layers, number) if i % 2 == 0 for one in layer)
            number += len(layers)
            again = 1.0 - added(one.shape[-1] for one in stays) / op.shape[2]
            stays = () if is_compiled and op.name == "fc2" else stays  # no backward reads it
        yield structs.replace(op, segment="block", stays=stays, redone_frac=again)

"""Whose software does the ops of a layout, and what that changes (`plan.implementation` has the facts).

A layout states its ops as Megatron-LM does them, which is the default: element-wise kernels are fused,
gradients are reduced every time they are computed, weights are in the plan's dtype beside fp32 master copies.

`fsdp2` is PyTorch alone: tensor and context parallelism by DTensor, torch.distributed.pipelining, FSDP2 with
mixed precision (`program.torch_ops`, `program.fsdp2`). It is the program `train`, which `meshwise compare
train` runs.

`huggingface` does the modules of the library `transformers` op by op, which moves and keeps more
(`cost.op.EAGER_KERNELS`): to the byte what Llama, Mistral, Qwen2, Qwen3, OLMo, OPT, Bloom, MPT and StarCoder2
keep there on a GPU, and Phi-3, Mixtral and Qwen3-MoE. Blocks of which it keeps other tensors than are known
here are refused (`plan.rules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import structs

from meshwise.core.units import Num
from meshwise.cost.op import EAGER_KERNELS, KERNELS
from meshwise.machine.overheads import SOFTWARE
from meshwise.model.architecture import Model, MoE
from meshwise.plan.implementation import IMPLEMENTATIONS
from meshwise.plan.plan import Plan
from meshwise.program.context import MODULE as ATTENTION
from meshwise.program.cut import Cut
from meshwise.program.loss import LOSSES, Loss
from meshwise.program.op import Op, precision
from meshwise.program.tensor import made
from meshwise.program.tensor_1d import WIDENING
from meshwise.program.torch_ops import torch_ops, weighed_after, with_repeated_keys


def loss_fusion(plan: Plan) -> str:
    """What of the loss is fused: as `plan` says, or as its software does."""
    return plan.loss_fusion or ("none" if plan.done_by.losses else SOFTWARE[plan.software].loss_fusion)


def loss_of(plan: Plan) -> Loss:
    """The loss of a plan."""
    library = plan.done_by.losses or SOFTWARE[plan.software].losses
    return LOSSES[library][loss_fusion(plan)]


def shards_each_weight(cut: Cut) -> bool:
    """Whether weights are held and exchanged one by one, as FSDP2 does."""
    return IMPLEMENTATIONS[cut.implementation].shards_each_weight


def as_done_by(model: Model, cut: Cut, ops: list[Op]) -> list[Op]:
    """The ops of one part as the implementation of `cut` does them."""
    change = _PARTS.get(IMPLEMENTATIONS[cut.implementation].parts)
    return ops if change is None else list(change(model, cut, ops))


def _eager(model: Model, cut: Cut, ops: Iterable[Op]) -> Iterable[Op]:
    """Element-wise kernels are not fused; nor does attention repeat keys for query heads on the fly.

    Matmuls with weights that are widened before them keep their input, though the weights are frozen
    (bitsandbytes, autograd/_functions.py: MatMul4Bit).
    """
    ops = list(ops)
    widened = {(op.module, op.name.removesuffix(WIDENING)) for op in ops if op.name.endswith(WIDENING)}
    for op in ops:
        if op.kind == "matmul" and op.phase == "forward" and (op.module, op.name) in widened:
            op = structs.replace(op, keeps=(*op.keeps, op.reads[0]))
        if model.moe is not None and op.name == "router_softmax" and op.phase == "forward":
            yield _with_routes(_eager_kernel(op), model.moe, cut)
        elif model.fused_qkv and op.kind == "attention" and op.phase == "forward":
            widths = (2.0 * model.num_heads + model.num_kv_heads) * model.head_dim / cut.tp
            yield _keeping(op, "copies", (cut.tokens, widths), cut.precision.act_dtype)
        elif op.kernel in EAGER_KERNELS and not (op.kernel == "layernorm" and model.norm_weight):
            yield _eager_kernel(op)
        elif op.kernel == "sum_copies":
            yield weighed_after(op, cut.precision)
        elif (
            op.phase == "forward"
            and op.kind == "matmul"
            and op.module == ATTENTION
            and op.name in ("logits", "attend")
        ):
            yield with_repeated_keys(op)
        else:
            yield op


def _with_routes(op: Op, moe: MoE, cut: Cut) -> Op:
    """The router's softmax, with what routing keeps: in fp32 the probabilities, the best of each token and
    their sum; of each copy of a token its expert, three indices and its weight; where each expert's begin.
    """
    tokens, experts = op.shape
    weight_bytes = cut.precision.act_bytes if moe.narrow_weights else 4.0
    of_copies = tokens * moe.top_k * (4.0 + 4.0 * 8.0 + weight_bytes)
    kept = 4.0 * tokens * (experts + 1.0) + of_copies + 4.0 * experts
    return _keeping(structs.replace(op, keeps=()), "routes", (kept,), "uint8")


def _eager_kernel(op: Op) -> Op:
    rows, width = op.shape
    size = {"elem_bytes": precision(op.dtype).act_bytes}
    fused, eager = KERNELS[op.kernel], EAGER_KERNELS[op.kernel]
    if op.phase == "backward":
        return structs.replace(op, cost=eager.backward(rows, width, **size))
    more = eager.saved_bytes(rows, width, **size) - fused.saved_bytes(rows, width, **size)
    done = structs.replace(op, cost=eager.forward(rows, width, **size))
    wide = precision(op.dtype)
    return _keeping(done, "more", (more / wide.act_bytes,), wide.act_dtype)


def _keeping(op: Op, name: str, shape: tuple[Num, ...], dtype: str) -> Op:
    """`op` with another tensor that it makes and keeps."""
    more = made(op.module, f"{op.name}_{name}", shape, dtype)
    return structs.replace(op, makes=(*op.makes, more), keeps=(*op.keeps, more))


_PARTS: dict[str, Callable[[Model, Cut, list[Op]], Iterable[Op]]] = {
    "torch": torch_ops,
    "transformers": _eager,
}
"""What changes the ops of a layout, by whose modules do them."""

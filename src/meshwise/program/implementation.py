"""Whose software does the ops of a layout, and what that changes (`plan.implementation` has the facts).

A layout states its ops as Megatron-LM does them, which is the default: element-wise kernels are fused,
gradients are reduced every time they are computed, weights are in the plan's dtype beside fp32 master copies.

`fsdp2` is PyTorch alone: tensor and context parallelism by DTensor, torch.distributed.pipelining, FSDP2 with
mixed precision (`program.fsdp2`). It is the program `train`, which `meshwise compare
train` runs.

`huggingface` does the modules of the library `transformers` op by op, which moves and keeps more
(`cost.op.EAGER_KERNELS`): to the byte what Llama, Mistral, Qwen2, Qwen3, OLMo, OPT, Bloom, MPT and StarCoder2
keep there on a GPU, and Phi-3, Mixtral and Qwen3-MoE. Blocks of which it keeps other tensors than are known
here are refused (`plan.rules`).

**PyTorch's own parts.** What it does otherwise than a layout states:

- q, k and v are three matmuls, gate and up two; the gradient of a weight is [d_out, d_in] as the weight is,
  the layout's [d_in, d_out] (stacks of experts are stored that way, so theirs is the same);
- DTensor keeps the gathered input of a pair of matmuls, so the backward gathers nothing again;
- the loss is computed, and its three numbers a token exchanged, in fp32 (fp64 under fp64); it keeps what its
  tokens weigh together; the numbers of the tokens are inputs of the program, not kept by it;
- under fp8 and fp4 linear layers of blocks cast both operands of each matmul (compiled, what several of them
  read is cast once), and keep and send what they do in bf16 (torchao's Float8Linear); experts, routers and
  adapters stay in bf16, and the head unless stated;
- a router computes in the type of the rest, its probabilities are fp32 (fp64), and the answers of experts
  are weighed by a number for each copy of a token, which is kept.

Ring attention. Every rank holds the s = S / cp tokens of an early and a late part of the sequence. Round 0 is
causal attention of its own; in round i it sees the keys of the rank i before it: of a rank in front of it
only the early half concerns it (s queries, s/2 keys), of a rank behind it only its own late half is concerned
(s/2 queries, s keys). So all rounds have the same FLOP. Keys and values come round in one buffer: a hop at a
time (an all-to-all in which each rank sends all of it to the next; cp - 1 hops) or in one all-gather. In the
backward they come round once more, and their gradients after them, in fp32 (fp64): cp hops.

PyTorch's formulas make tensors on the way, beside what an op reads, makes and keeps (`Op.workspace_bytes`):

    SwiGLU            silu(gate)
    loss in chunks    the backward of a chunk runs in its forward, beside the gradient of the matrix so far
    ring attention    gradients of queries, keys and values in fp32, and keys and values on their way
    fp8 matmuls       the largest operand in fp32, and scaled

Source: torch.distributed.tensor.parallel, torch.distributed.tensor.experimental._attention; dry runs of
`meshwise train` on torch 2.13.
"""

from collections.abc import Callable, Iterable, Iterator
from math import prod

import numpy as np
from msgspec import structs

from meshwise.core.units import Num
from meshwise.cost.op import EAGER_KERNELS, KERNELS, flash_attention, flash_attention_backward, matmul
from meshwise.machine.overheads import SOFTWARE
from meshwise.model.architecture import Model, MoE
from meshwise.plan.implementation import IMPLEMENTATIONS
from meshwise.plan.plan import Plan
from meshwise.program.context import CORE, MODULE as ATTENTION, SIDE_BY_SIDE
from meshwise.program.cut import Cut
from meshwise.program.loss import KERNEL as LOSS_KERNEL, LOSSES, Loss
from meshwise.program.op import Op, Precision, Tensor, cast, collective, exchanged, kernel, made, precision
from meshwise.program.tensor_1d import WIDENING


def loss_fusion(plan: Plan) -> str:
    """What of the loss is fused: as `plan` says, or as its software does."""
    return plan.loss_fusion or ("none" if plan.done_by.losses else SOFTWARE[plan.software].loss_fusion)


def loss_of(plan: Plan) -> Loss:
    """The loss of a plan."""
    return LOSSES[plan.done_by.losses or SOFTWARE[plan.software].losses][loss_fusion(plan)]


def stops_early(plan: Plan) -> bool:
    """Whether recomputation that is not compiled ends with the last tensor kept, as the software has it.

    Products in fp8 are autograd Functions, which keep their operands when they are through: the last one
    is run again.
    """
    return SOFTWARE[plan.software].stops_early and plan.dtype != "fp8"


def shards_each_weight(cut: Cut) -> bool:
    """Whether weights are held and exchanged one by one, as FSDP2 does."""
    return IMPLEMENTATIONS[cut.implementation].shards_each_weight


def as_done_by(model: Model, cut: Cut, ops: list[Op]) -> list[Op]:
    """The ops of one part as the implementation of `cut` does them."""
    parts = IMPLEMENTATIONS[cut.implementation].parts
    if cut.is_eager or parts == "transformers":
        ops = [_eager_kernel(op) if _is_eager(model, cut, op) else op for op in ops]
    change = _PARTS.get(parts)
    return ops if change is None else list(change(model, cut, ops))


# --- PyTorch's own parts -----------------------------------------------------------------------


def torch_ops(model: Model, cut: Cut, ops: Iterable[Op]) -> Iterator[Op]:
    """The ops of one part as PyTorch does them."""
    ops = list(ops)
    results = {(op.module, op.name): op.makes for op in ops if op.phase == "forward" and op.kind == "matmul"}
    for op in ops:
        gathers_again = op.collective == "all_gather" and op.hides_behind == op.name  # its layer's own input
        if (gathers_again and op.phase == "backward") or op.name in ("keys_values", "merge_rounds"):
            continue
        made_by = results.get((op.module, op.name))
        if op.kind == "matmul" and made_by and not (op.module == "attention" and op.name in CORE):
            yield from _matmuls(cut, op, made_by)
        elif op.kind == "attention":
            yield from _ring_attention(cut, op)
        else:
            done = _in_torch_types(model, cut, op)
            yield structs.replace(done, workspace_bytes=kernel_workspace(model, cut, done))


# --- their matmuls -----------------------------------------------------------------------------


def _matmuls(cut: Cut, op: Op, results: tuple[Tensor, ...]) -> Iterator[Op]:
    """One matmul of a layout as those of its layers, which make the `results`."""
    batch, rows, columns, depth = op.shape
    widths = [one.shape[-1] for one in results]
    if op.name not in SIDE_BY_SIDE:
        widths = [columns if op.phase == "forward" or op.is_weight_grad else depth]
    if op.phase == "forward" or (op.is_weight_grad and op.is_expert):
        shapes = [(batch, rows, part, depth) for part in widths]
    elif op.is_weight_grad:
        shapes = [(batch, part, rows, depth) for part in widths]
    else:
        shapes = [(batch, rows, columns, part) for part in widths]
    prec = cut.precision
    is_narrow = bool(cut.narrow_matmuls) and _is_narrow(cut, op)
    done_in = precision("fp8" if op.module == "head" else cut.narrow_matmuls) if is_narrow else prec
    shared = 1 if op.is_weight_grad else 0 if op.phase == "forward" else None  # operand of all these layers
    for number, (_, m, n, k) in enumerate(shapes):
        done = structs.replace(
            op, shape=(batch, m, n, k), dtype=done_in.dtype,
            cost=matmul(m, n, k, elem_bytes=done_in.operand_bytes, out_bytes=prec.act_bytes, batch=batch),
        )  # fmt: skip
        if is_narrow:
            to_cast = m * n * (op.phase == "backward")  # the gradient of the result, too
            done = structs.replace(done, workspace_bytes=8.0 * np.maximum(np.maximum(m * k, n * k), to_cast))
            for operand, rows_of in enumerate((m, n)):
                if number == 0 or cut.is_eager or operand != shared:
                    yield cast(op.module, op.name, op.phase, rows_of, k, done_in, copies=1.0)
        if op.phase == "forward" and len(shapes) > 1:
            weight = structs.replace(op.reads[1], shape=(batch, k, n))
            done = structs.replace(done, reads=(op.reads[0], weight), makes=results[number : number + 1])
        yield done if number == 0 else structs.replace(done, num_params=0.0, num_frozen=0.0, weights=())


def _is_narrow(cut: Cut, op: Op) -> bool:
    """Whether fp8 is for a matmul: of linear layers of blocks, and where the plan says so of the head."""
    if op.module == "head":
        return cut.head_dtype == "fp8"
    return op.module != "mtp" and not op.name.startswith(("router", "expert_")) and "_lora_" not in op.name


# --- their attention ---------------------------------------------------------------------------


def _ring_attention(cut: Cut, op: Op) -> Iterator[Op]:
    """The rounds of one attention, and what travels between them; all is redone where the core is."""
    batch, heads, kv_heads, seq, _, qk_dim, v_dim = op.shape
    work = flash_attention if op.phase == "forward" else flash_attention_backward
    half = seq / 2.0 if op.causal else seq
    behind = cut.ring - 1.0 - cut.ring_rank
    queries, keys = batch * heads * seq * qk_dim, batch * kv_heads * seq * (qk_dim + v_dim)
    kept_type, wide_type = cut.precision.act_bytes, cut.precision.stat_bytes
    under_way = (cut.ring > 1) * (wide_type * (queries + 3.0 * keys) + 3.0 * kept_type * keys)
    workspace = under_way * (op.phase == "backward")
    done_in = (seq, seq, 1.0), (seq, half, cut.ring_rank), (half, seq, behind)
    for number, (seq_q, seq_k, count) in enumerate(done_in):
        sizes = (heads, kv_heads, seq_q, seq_k, qk_dim, v_dim)
        moved = work(0.0, *sizes, batch=batch, elem_bytes=cut.precision.act_bytes)
        done = structs.replace(
            op, shape=(batch, *sizes), count=count, workspace_bytes=workspace,
            cost=structs.replace(moved, flop=op.count * op.cost.flop / cut.ring),
        )  # fmt: skip
        rows = count * batch * seq_q  # each round has results of its own
        rounds = tuple(Tensor(f"{one.name}.{number}", (rows, *one.shape[1:]), one.dtype) for one in op.makes)
        later = {"reads": (), "makes": rounds, "keeps": (), "causal": False}
        yield done if number == 0 else structs.replace(done, **later)
    if np.any(cut.gather_keys):
        yield _on_ring(cut, op, "all_gather", cut.ring * keys * kept_type, 1.0 * cut.gather_keys)
    if not np.all(cut.gather_keys):
        hops = (1.0 - cut.gather_keys) * (cut.ring - 1.0)
        yield _on_ring(cut, op, "all_to_all", keys * kept_type, hops)
    if op.phase == "backward":
        yield _on_ring(cut, op, "all_to_all", keys * wide_type, cut.ring)


def _on_ring(cut: Cut, op: Op, kind: str, payload_bytes: Num, count: Num) -> Op:
    return collective(
        op.module, op.name, op.phase, kind, "cp", payload_bytes, cut.ring,
        stride=cut.cp_stride * cut.ulysses, count=count,
        hides_behind=op.name if kind == "all_to_all" else "",
        makes=(Tensor(f"{op.name}.keys_{op.phase}", (count * payload_bytes,), "uint8"),),
    )  # fmt: skip


def weighed_after(op: Op, prec: Precision) -> Op:
    """Answers of experts that are weighed when they are back, not with the activations; both are kept."""
    rows, width = op.shape
    weighed = kernel(op.module, op.name, "scale_by_gate", rows, width, prec, phase=op.phase)
    return structs.replace(weighed, reads=op.reads, makes=op.makes, keeps=op.reads)


def with_repeated_keys(op: Op) -> Op:
    """A product of scores, or of their mix, that keeps as many keys (values) as queries."""
    batch, _, n, k = op.shape
    rows = {"logits": (batch * n, k), "attend": (batch * k, n)}[op.name]
    repeated = made(op.module, f"{op.name}_repeated", rows, op.keeps[1].dtype)
    return structs.replace(op, keeps=(op.keeps[0], repeated))


# --- types -------------------------------------------------------------------------------------


def _in_torch_types(model: Model, cut: Cut, op: Op) -> Op:
    """A kernel or collective with what it keeps or sends in PyTorch's types; what is gathered is kept."""
    prec = cut.precision
    if op.kind == "collective":
        wider = prec.stat_bytes / 4.0 if op.name.endswith("cross_entropy") else 1.0
        return structs.replace(op, remade=False, payload_bytes=op.payload_bytes * wider)
    if op.kernel == "sum_copies" and model.moe is not None:  # of the rank's own tokens
        own = cut.tokens / cut.tp * model.moe.top_k
        op = weighed_after(structs.replace(op, shape=(own, op.shape[1])), prec)
        if op.phase == "backward":
            return op
        answers = exchanged(op.reads[0], f"{op.module}.own_answers", op.shape, cut.ep)
        return structs.replace(op, keeps=(answers, made(op.module, "gates", (own,), prec.act_dtype)))
    if op.kernel == LOSS_KERNEL and op.keeps:
        total = made(op.module, "number_of_tokens", (op.count,), prec.stat_dtype)
        return structs.replace(op, keeps=(*op.keeps, total))
    return structs.replace(op, keeps=()) if op.name == "tokens" else op


# --- workspace ---------------------------------------------------------------------------------


def kernel_workspace(model: Model, cut: Cut, op: Op) -> Num:
    """Of an element-wise kernel, in the phase of `op` [bytes]."""
    act = cut.precision.act_bytes
    if op.kind != "kernel":
        return 0.0
    if op.kernel in ("swiglu", "geglu", "reglu"):
        return prod(op.shape) * act
    if cut.loss_chunks > 1 and op.phase == "forward" and op.name.endswith("_gradients"):
        logits = cut.tokens / cut.loss_chunks * model.vocab / cut.tp
        return act * (logits + model.vocab / cut.tp * model.hidden * (not cut.lora_rank))
    return 0.0


# --- the library transformers ------------------------------------------------------------------


def _transformers_ops(model: Model, cut: Cut, ops: Iterable[Op]) -> Iterable[Op]:
    """Attention does not repeat keys for query heads on the fly; a router keeps its routes.

    Matmuls with weights that are widened before them keep their input, though the weights are frozen
    (bitsandbytes, autograd/_functions.py: MatMul4Bit).
    """
    ops = list(ops)
    widened = {(op.module, op.name.removesuffix(WIDENING)) for op in ops if op.name.endswith(WIDENING)}
    for op in ops:
        multiplies = op.kind == "matmul" and op.phase == "forward"
        if multiplies and (op.module, op.name) in widened:
            op = structs.replace(op, keeps=(*op.keeps, op.reads[0]))
        if model.moe is not None and op.name == "router_softmax" and op.phase == "forward":
            yield _with_routes(op, model.moe, cut)
        elif model.fused_qkv and op.kind == "attention" and op.phase == "forward":
            widths = (2.0 * model.num_heads + model.num_kv_heads) * model.head_dim / cut.tp
            yield _keeping(op, "copies", (cut.tokens, widths), cut.precision.act_dtype)
        elif op.kernel == "sum_copies":
            yield weighed_after(op, cut.precision)
        elif multiplies and op.module == ATTENTION and op.name in ("logits", "attend"):
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


def _is_eager(model: Model, cut: Cut, op: Op) -> bool:
    """Whether there is no kernel for it: PyTorch has one for LayerNorm with weights, a library its own."""
    has_kernel = op.kernel in cut.fused_kernels or (op.kernel == "layernorm" and model.norm_weight)
    return op.kernel in EAGER_KERNELS and not has_kernel


def _eager_kernel(op: Op) -> Op:
    rows, width = op.shape
    size = {"elem_bytes": precision(op.dtype).act_bytes}
    fused, eager = KERNELS[op.kernel], EAGER_KERNELS[op.kernel]
    if op.phase == "backward":
        return structs.replace(op, cost=eager.backward(rows, width, **size), launches=eager.backward_launches)
    done = structs.replace(op, cost=eager.forward(rows, width, **size), launches=eager.launches)
    more = eager.saved_bytes(rows, width, **size) - fused.saved_bytes(rows, width, **size)
    return _keeping(done, "more", (more / size["elem_bytes"],), precision(op.dtype).act_dtype)


def _keeping(op: Op, name: str, shape: tuple[Num, ...], dtype: str) -> Op:
    """`op` with another tensor that it makes and keeps."""
    more = made(op.module, f"{op.name}_{name}", shape, dtype)
    return structs.replace(op, makes=(*op.makes, more), keeps=(*op.keeps, more))


_PARTS: dict[str, Callable[[Model, Cut, list[Op]], Iterable[Op]]] = {
    "torch": torch_ops,
    "transformers": _transformers_ops,
}
"""What changes the ops of a layout, by whose modules do them."""

"""The parts that one rank's model is made of: embedding, one block of each kind of layer, head.

Each part is a list of ops, forward and backward, for one microbatch. How often a rank runs each part is its
pipeline stage's affair (`meshwise.estimate.stage`).
"""

from meshwise.core.numbers import larger
from meshwise.core.units import DTYPE_BYTES, Num
from meshwise.machine.overheads import SOFTWARE
from meshwise.model.architecture import Model, layer_kinds
from meshwise.plan.mesh import SERVING, Mesh
from meshwise.plan.plan import DISPATCH, NARROW_DTYPES, PLAN_LISTS
from meshwise.program.block import block
from meshwise.program.cut import Cut
from meshwise.program.encoder import source_cut
from meshwise.program.implementation import loss_fusion, loss_of
from meshwise.program.op import Op, precision
from meshwise.program.serving import as_kept, serving_block, serving_embed, serving_head
from meshwise.program.vocabulary import embed, head

EMBEDDING, HEAD = "embedding", "head"
MIXERS = {
    "attention": "",
    "alone": "attention_",
    "recurrence": "recurrent_",
    "beside": "attention_and_recurrent_",
    "cross": "cross_attention_",
    "none": "mlp_",
}
"""How the name of a block begins, by what it has in place of attention; `alone`: attention without an MLP."""
FP8_TILE = 128
"""Elements of a token in fp8 that share an fp32 scale (DeepSeek-V3, arXiv 2412.19437)."""
FP8_TOKEN_BYTES = 1.0 + 4.0 / FP8_TILE
"""Bytes of an element of a token in fp8."""


OF_MESH = ("kind", "microbatch", "tp", "ulysses", "ring", "ring_rank", "ep", "etp", "imbalance", "grid")
OF_PLAN: list[str] = PLAN_LISTS["of_cut"]
"""What a cut has of its mesh and of its plan as it is there."""


def layer_names(model: Model) -> tuple[str, ...]:
    """Names of the parts that are blocks: one for each kind of layer, in the order of `layer_kinds`."""
    kinds = layer_kinds(model)
    windows = len({kind.window for kind in kinds}) > 1
    names = [
        (f"{kind.side}_" if kind.side not in ("", "decoder") else "")
        + MIXERS[kind.mixer if kind.mlp or kind.mixer != "attention" else "alone"]
        + ("moe_layer" if kind.moe else "layer")
        + (f"_window{kind.window}" if windows and kind.window else "")
        + (f"_{kind.keys}_keys" if kind.keys else "")
        + ("_shared" if kind.shares else "")
        + (f"_keys_of_{kind.sparse.ratio}" if kind.sparse and kind.sparse.ratio > 1 else "")
        for kind in kinds
    ]
    alike = ((name, names[:i].count(name)) for i, name in enumerate(names))
    return tuple(f"{name}_{1 + before}" if before else name for name, before in alike)


def parts(model: Model, cut: Cut) -> dict[str, list[Op]]:
    """The ops of every part, by name, as training software or a serving engine runs them."""
    serves = cut.kind in SERVING
    first, middle, last = (serving_embed, serving_block, serving_head) if serves else (embed, block, head)
    kinds = zip(layer_names(model), layer_kinds(model), strict=True)
    blocks = {name: as_kept(middle(model, cut, kind), cut) for name, kind in kinds}
    return {EMBEDDING: first(model, cut), **blocks, HEAD: last(model, cut)}


def cut_of(mesh: Mesh) -> Cut:
    """How the plans of `mesh` cut one microbatch of a block."""
    plan = mesh.plan
    decodes = mesh.kind == "decode"
    is_narrow = plan.done_by.shards_each_weight and plan.dtype in NARROW_DTYPES
    types = "bf16" if is_narrow else plan.dtype, plan.weight_dtype, plan.expert_dtype
    on_grid = plan.layout not in ("1d", "2d-cp")  # each rank has its own part of the activations
    same = {name: getattr(mesh, name) for name in OF_MESH} | {name: getattr(plan, name) for name in OF_PLAN}
    return Cut(
        **same,
        seq=1.0 if decodes else mesh.seq,
        past=mesh.seq if decodes else 0.0,
        kv_bytes=DTYPE_BYTES[plan.kv_dtype],
        tp_stride=mesh.stride("tp"),
        cp_stride=mesh.stride("cp"),
        ep_stride=mesh.etp * mesh.stride("tp"),
        dispatch_per_rank=mesh.dispatch == DISPATCH.index("per_rank"),
        dispatch_bytes=FP8_TOKEN_BYTES if plan.dispatch_dtype == "fp8" else precision(plan.dtype).act_bytes,
        recompute_modules=plan.selective_modules,
        loss=loss_of(plan),
        is_eager=SOFTWARE[plan.software].is_eager,
        fused_kernels=tuple(plan.done_by.fuses_with_loss) if loss_fusion(plan) == "kernels" else (),
        weighs_last=SOFTWARE[plan.software].weighs_last,
        narrow_act_input=plan.act_input_dtype == "fp8",
        sequence_parallel=plan.sequence_parallel or plan.sp is None or on_grid,
        gather_keys=mesh.gathers_keys,
        panels=float(plan.panels),
        flash=plan.attention == "flash",
        frozen_bytes=None if plan.frozen_dtype is None else DTYPE_BYTES[plan.frozen_dtype],
        narrow_matmuls=plan.dtype if is_narrow else "",
        precision=precision(*types, casts_weights=mesh.trains and SOFTWARE[plan.software].casts_weights),
    )


def block_input_bytes(model: Model, cut: Cut) -> Num:
    """The input of a block as a rank keeps it: its part of the tokens, of the longer side of two."""
    streams = model.streams.number if model.streams else 1
    longer = source_cut(model, cut).split_tokens if model.encoder else 0.0
    return larger(cut.split_tokens, longer) * streams * model.hidden * cut.precision.act_bytes

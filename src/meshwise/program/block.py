"""One transformer block as the list of everything that one rank does for one microbatch."""

from types import ModuleType

from msgspec import structs

from meshwise.core.units import Num
from meshwise.model.architecture import Layer, Model, across, layer_kind, layer_kinds, of_layer
from meshwise.model.weights import block_weights, head_weights, modulated, mtp_weights
from meshwise.program import additions, grid, tensor_1d, tensor_2d_cp
from meshwise.program.cut import Cut
from meshwise.program.diffusion import modulation, two_streams
from meshwise.program.encoder import cross_attention, source_cut
from meshwise.program.implementation import as_done_by
from meshwise.program.moe import moe_mlp
from meshwise.program.op import Op, Stated, Tensor, backward_last, collected
from meshwise.program.recurrence import beside_attention, recurrence
from meshwise.program.segments import with_recompute
from meshwise.program.weights_of_ops import hold

LAYOUTS: dict[str, ModuleType] = {
    "1d": tensor_1d,
    "2d-cp": tensor_2d_cp,
    **dict.fromkeys(("2d", "2.5d", "3d"), grid),
}
"""The module that states the block of each tensor layout."""


def block_input(model: Model, cut: Cut) -> Tensor:
    """The residual stream that enters a block: the rank's tokens, on a grid its part of their width."""
    rows: Num = cut.split_tokens
    width: Num = float(model.hidden)
    if LAYOUTS[cut.layout] is grid:
        rows, width = grid.tokens(cut), model.hidden / cut.grid[0]
    return Tensor("block.input", (rows, width), cut.precision.act_dtype)


def block(model: Model, cut: Cut, layer: Layer = Layer()) -> list[Op]:  # noqa: B008
    """The ops of one block of the kind `layer`, forward then backward, in the order in which they run."""
    cut = source_cut(model, cut) if layer.side == "encoder" else cut
    ops, _ = block_ops(model, cut, layer, block_input(model, cut))
    if layer.mixer == "cross" and not across(model):  # text alone: its weights are held, and nothing is done
        ops = [structs.replace(op, count=0.0, keeps=()) for op in ops]
    return backward_last(ops)


def block_ops(model: Model, cut: Cut, layer: Layer, x: Tensor) -> tuple[list[Op], Tensor]:
    """The ops of one block, the backward ops of each beside its forward, and the stream that leaves it."""
    own, layout = of_layer(model, layer), LAYOUTS[cut.layout]
    ops: list[Op] = []
    x = collected(_stated(own, cut, layer, x), ops)
    ops = hold(ops, block_weights(model, layer, cut.lora_rank, cut.lora_targets), cut, layout.shards)
    ops = [_with_narrow_input(own, cut, op) for op in as_done_by(own, cut, ops)]
    return list(with_recompute(own, cut, ops)), x


def _stated(model: Model, cut: Cut, layer: Layer, x: Tensor) -> Stated:
    layout = LAYOUTS[cut.layout]
    if model.streams and not model.streams.laurel_rank:
        x = yield from additions.hyper_connections(model, model.streams, cut, x)
    elif model.streams:
        x = yield from additions.predicted(model, model.streams, cut, x)
    yield from additions.side_ops(model, cut, layer.sides)
    if model.distances:
        x = yield from additions.distance_scores(model, model.distances, cut, x)
    if model.diffusion and layer.side in ("double", "last"):
        return (yield from two_streams(model, model.diffusion, cut, layer, x))
    if model.diffusion:
        yield from modulation(model, model.diffusion, cut, "modulation", modulated(layer))
    beside: tuple[Tensor, ...] = ()
    if layer.mixer == "recurrence":
        x = yield from recurrence(model, cut, x)
    elif layer.mixer not in ("none", "cross"):
        mixed = yield from layout.attention(model, cut, x)
        if layer.mixer == "beside":
            mixed = yield from beside_attention(model, cut, mixed)
        is_parallel = model.parallel_block and cut.layout in ("1d", "2d-cp")
        x, beside = (x, (mixed,)) if is_parallel else (mixed, ())
    has_source = layer.side == "decoder" or layer.mixer == "cross"
    if has_source or (model.diffusion and model.diffusion.text == "cross"):
        x = yield from cross_attention(model, cut, x)
    if layer.mlp and layer.moe:
        x = yield from moe_mlp(model, cut, x)
    elif layer.mlp:
        x = yield from layout.mlp(model, cut, x, *beside)
    if model.streams and model.streams.laurel_rank:
        x = yield from additions.corrected(model, model.streams, cut, x)
    if model.per_layer:
        x = yield from additions.per_layer(model, model.per_layer, cut, x)
    return x


def _with_narrow_input(model: Model, cut: Cut, op: Op) -> Op:
    """An activation function that keeps its input in one byte an element, where the plan says so."""
    if not cut.narrow_act_input or op.kernel != model.activation or not op.keeps:
        return op
    narrow = tuple(Tensor(f"{one.name}.narrow", one.shape, "fp8") for one in op.keeps)
    return structs.replace(op, reads=narrow, keeps=narrow)


def shared_gradients(model: Model, cut: Cut) -> list[list[Op]]:
    """What the tensor-parallel ranks exchange once a step: gradients that they share.

    Of one block of each kind, then of the head with multi-token prediction.
    """
    kinds, num = layer_kinds(model), model.mtp_layers
    blocks = [block_weights(model, kind, cut.lora_rank, cut.lora_targets) for kind in kinds]
    ends = () if cut.lora_rank else (*head_weights(model), *num * mtp_weights(model))
    head = (*ends, *num * blocks[kinds.index(layer_kind(model, model.num_layers - 1))])
    return [list(LAYOUTS[cut.layout].shared_gradients(weights, cut)) for weights in (*blocks, head)]

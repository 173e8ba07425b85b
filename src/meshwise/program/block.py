"""One transformer block as the list of everything that one rank does for one microbatch."""

from __future__ import annotations

from types import ModuleType

from msgspec import structs

from meshwise.model.architecture import Layer, Model, of_layer
from meshwise.model.weights import block_weights
from meshwise.program import tensor_1d, tensor_2d, tensor_2d_cp, tensor_3d
from meshwise.program.cut import Cut
from meshwise.program.distances import distance_scores
from meshwise.program.encoder import cross_attention, source_cut
from meshwise.program.held import hold
from meshwise.program.implementation import as_done_by
from meshwise.program.moe import moe_mlp
from meshwise.program.op import Op, backward_last
from meshwise.program.per_layer import per_layer
from meshwise.program.recompute import with_recompute
from meshwise.program.recurrence import behind_norm, recurrence
from meshwise.program.streams import corrected, predicted

LAYOUTS: dict[str, ModuleType] = {
    "1d": tensor_1d,
    "2d": tensor_2d,
    "2d-cp": tensor_2d_cp,
    "2.5d": tensor_2d,
    "3d": tensor_3d,
}
"""The module that states the block of each tensor layout."""


def block(model: Model, cut: Cut, layer: Layer = Layer()) -> list[Op]:  # noqa: B008
    """The ops of one block of the kind `layer`, forward then backward, in the order in which they run."""
    return backward_last(block_ops(model, cut, layer))


def block_ops(model: Model, cut: Cut, layer: Layer) -> list[Op]:
    """The ops of one block, the backward ops of each beside its forward."""
    layout, own = LAYOUTS[cut.layout], of_layer(model, layer)
    cut = source_cut(model, cut) if layer.side == "encoder" else cut
    mixers = {
        "attention": (layout.attention,),
        "recurrence": (recurrence,),
        "beside": (layout.attention, behind_norm),
        "none": (),
    }[layer.mixer]
    if layer.side == "decoder":
        mixers = (*mixers, cross_attention)
    if model.distances:
        mixers = (distance_scores, *mixers)
    feed_forward = (moe_mlp if layer.moe else layout.mlp) if layer.mlp else _nothing
    if model.streams:
        mixers = (predicted, *mixers)
    ends = (corrected,) * bool(model.streams) + (per_layer,) * bool(model.per_layer)
    ops = [op for part in (*mixers, feed_forward, *ends) for op in part(own, cut)]
    ops = hold(ops, block_weights(model, layer, cut.lora_rank), cut, layout.shards)
    ops = [_with_narrow_input(own, cut, op) for op in as_done_by(own, cut, ops)]
    return list(with_recompute(own, cut, ops))


def _nothing(_model: Model, _cut: Cut) -> tuple[Op, ...]:
    """What a block does that has no MLP."""
    return ()


def _with_narrow_input(model: Model, cut: Cut, op: Op) -> Op:
    """An activation function that keeps its input in one byte an element, where the plan says so."""
    if not cut.narrow_act_input or op.kernel != model.activation:
        return op
    return structs.replace(op, saved_bytes=op.saved_bytes / cut.precision.act_bytes)


def shared_gradients(model: Model, cut: Cut, layer: Layer = Layer()) -> list[Op]:  # noqa: B008
    """What the tensor-parallel ranks exchange once a step for one block: gradients that they share."""
    weights = block_weights(model, layer, cut.lora_rank)
    return list(LAYOUTS[cut.layout].shared_gradients(weights, cut))

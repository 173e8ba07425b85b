"""One transformer block as the list of everything that one rank does for one microbatch."""

from __future__ import annotations

from types import ModuleType

from meshwise.model.architecture import Layer, Model
from meshwise.program import tensor_1d, tensor_2d, tensor_2d_cp, tensor_3d, tensor_25d
from meshwise.program.cut import Cut
from meshwise.program.moe import moe_mlp
from meshwise.program.op import Op, backward_last

LAYOUTS: dict[str, ModuleType] = {
    "1d": tensor_1d,
    "2d": tensor_2d,
    "2d-cp": tensor_2d_cp,
    "2.5d": tensor_25d,
    "3d": tensor_3d,
}
"""The module that states the block of each tensor layout."""


def block(model: Model, cut: Cut, layer: Layer = Layer()) -> list[Op]:  # noqa: B008
    """The ops of one block of the kind `layer`, forward then backward, in the order in which they run."""
    layout = LAYOUTS[cut.layout]
    feed_forward = moe_mlp if layer.moe else layout.mlp
    return backward_last([*layout.attention(model, cut), *feed_forward(model, cut)])


def shared_gradients(model: Model, cut: Cut) -> list[Op]:
    """What the tensor-parallel ranks exchange once a step: gradients of weights that several of them hold."""
    return list(LAYOUTS[cut.layout].shared_gradients(model, cut))

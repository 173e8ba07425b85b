"""One transformer block as the list of everything that one rank does for one microbatch."""

from __future__ import annotations

from meshwise.layout.cut import Cut
from meshwise.layout.moe import moe_mlp
from meshwise.layout.op import Op, backward_last
from meshwise.layout.tensor_1d import attention, mlp
from meshwise.model import Model


def block(model: Model, cut: Cut, *, moe: bool = False) -> list[Op]:
    """The ops of one block, forward then backward, in the order in which they run.

    `moe`: the block's MLP is a mixture of experts.
    """
    return backward_last([*attention(model, cut), *(moe_mlp(model, cut) if moe else mlp(model, cut))])

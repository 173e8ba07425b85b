"""What a rank holds of a model's weights, and which op brings each of them.

A layout says over how many ranks it cuts a weight (`shards`); a weight is then part of the op that it names,
in that op's forward row. Every weight finds its op: over all ranks, each weight counted once, the ops of a
program hold the parameters of the model.
"""

from collections.abc import Callable, Iterable

from msgspec import structs

from meshwise.core.numbers import added
from meshwise.core.units import Num
from meshwise.model.weights import Weight, Weights, has_adapters
from meshwise.program.cut import Cut
from meshwise.program.op import BroughtWeight, Op

ENDS = "embedding", "head", "mtp"
"""Modules of a model that are no block."""
Shards = Callable[[Weight, Cut], Num]


def hold(ops: Iterable[Op], weights: Weights, cut: Cut, shards: Shards) -> list[Op]:
    """`ops`, of which the first forward op of its name brings each weight."""
    core = "flash" if cut.flash else "softmax"
    brought: dict[tuple[str, str], list[BroughtWeight]] = {}
    for weight in weights:
        op_name = core if weight.op == "core" else weight.op
        ways = shards(weight, cut)
        held = BroughtWeight(weight, ways, weight.size / ways)
        brought.setdefault((weight.module, op_name), []).append(held)
    holding = []
    for op in ops:
        if op.phase == "forward" and op.kind != "collective":
            mine = brought.pop((op.module, op.name), None)
            op = op if mine is None else _with_weights(op, tuple(mine), cut)
        holding.append(op)
    assert not brought, f"no op brings the weights {sorted(brought)}"
    return holding


def _with_weights(op: Op, weights: tuple[BroughtWeight, ...], cut: Cut) -> Op:
    num_params = added([held.num_params for held in weights])
    frozen = [held for held in weights if not held.weight.trains]
    if not frozen:
        return structs.replace(op, weights=weights, num_params=num_params)
    return structs.replace(
        op,
        weights=weights,
        num_params=num_params,
        num_frozen=added(held.num_params for held in frozen),
        num_quantized=added(
            held.num_params for held in frozen if cut.lora_rank and is_quantized(held.weight)
        ),
    )


def is_quantized(weight: Weight) -> bool:
    """Whether QLoRA keeps a frozen weight in few bits: the matrices of blocks, experts too, but no router."""
    if weight.module in ENDS:
        return False
    return has_adapters(weight) or (weight.is_expert and weight.is_matrix)


def num_held(weights: Weights, cut: Cut, shards: Shards) -> Num:
    """Parameters of `weights` that one rank holds."""
    return added(weight.size / shards(weight, cut) for weight in weights)

"""What a rank holds of a model's weights, and which op brings each of them.

A layout says over how many ranks it cuts a weight (`shards`); a weight is then part of the op that it names,
in that op's forward row. Every weight finds its op: over all ranks, each weight counted once, the ops of a
program hold the parameters of the model.
"""

from collections.abc import Callable, Iterable

from msgspec import structs

from meshwise.core.numbers import added, larger, smaller
from meshwise.core.units import Num
from meshwise.model.weights import COLUMNS, WHOLE, Weight, Weights, has_adapters
from meshwise.program.cut import Cut
from meshwise.program.exchange import Held
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
            op = op if mine is None else _with_weights(op, tuple(mine))
        holding.append(op)
    assert not brought, f"no op brings the weights {sorted(brought)}"
    return holding


def _with_weights(op: Op, weights: tuple[BroughtWeight, ...]) -> Op:
    num_params = added(held.num_params for held in weights)
    num_frozen = added(held.num_params for held in weights if not held.weight.trains)
    return structs.replace(op, weights=weights, num_params=num_params, num_frozen=num_frozen)


def is_quantized(weight: Weight) -> bool:
    """Whether QLoRA keeps a frozen weight in few bits: the matrices of blocks, experts too, but no router."""
    if weight.module in ENDS:
        return False
    return has_adapters(weight) or (weight.is_expert and weight.is_matrix)


def held_of(brought: BroughtWeight) -> Held:
    """What a weight counts for, its matrices with the FLOP of Muon's five Newton-Schulz iterations.

    One on X [m, n], m the narrower side, multiplies X by its transpose, the product by itself, and X by their
    sum: 4 n m^2 + 2 m^3. Each projection is taken by itself, of a cut one the rank's block; experts as whole.
    Sources: arXiv 2502.16982; Megatron-LM's `muon_tp_mode="blockwise"`, `muon_split_qkv`.
    """
    weight, shards, number = brought
    if not weight.trains:
        return Held(number, quantized=number * is_quantized(weight))
    if not weight.is_matrix or weight.module in ENDS:
        return Held(number, number)
    uncut, cut = weight.shape[-2:] if weight.cut == COLUMNS else weight.shape[-2:][::-1]
    block = cut / (1.0 if weight.is_expert or weight.cut == WHOLE else shards)
    narrow, wide = smaller(uncut, block), larger(uncut, block)
    return Held(number, number, 0.0, number, 5.0 * number * (4.0 * narrow + 2.0 * narrow * narrow / wide))


def num_held(weights: Weights, cut: Cut, shards: Shards) -> Num:
    """Parameters of `weights` that one rank holds."""
    return added(weight.size / shards(weight, cut) for weight in weights)

"""A transformer block under tensor parallelism in 1, 2, 2.5 or 3 dimensions: forward, backward, one step.

Every layout computes the same block and is written on plain collectives: 1d (column and row matmuls), 2d
(SUMMA), 2d-cp (columns x sequence), 2.5d (depths of SUMMA grids) and 3d (a cube). Attention is fused, its
heads are split, and nothing is dropped; what plans choose beside that (`attention=unfused|grid`, `sp=0`,
`panels`, dropout), the closed forms price.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshwise.core import refusals
from meshwise.core.errors import PlanError
from meshwise.model.architecture import Model, checked_model
from meshwise.model.find import find_model
from meshwise.plan.layouts import block_rules, default_grid
from meshwise.plan.plan import refuse
from meshwise.program.block import block as block_ops, shared_gradients
from meshwise.program.cut import Cut
from meshwise.program.op import op_row, precision
from meshwise.program.tape import Tape
from meshwise.program.walk import with_saved_bytes
from meshwise.runtime.programs import program_options

if TYPE_CHECKING:
    import torch

    from meshwise.runtime.programs.context import Context
    from meshwise.runtime.programs.tensor_parallel.layouts import TensorLayout


STATES = "work"


Options = program_options(__name__, "tensor-parallel")


def check(options: Any, ranks: int) -> None:
    """PlanError for a grid or a size that does not divide."""
    checked_model(model_of(options), "tensor-parallel")
    refusals.refuse("program tensor-parallel", PlanError, "tensor-parallel: ", of=options)
    cut = cut_of(options, ranks)
    refuse(block_rules(model_of(options), cut.layout, tuple(map(int, cut.grid)), ranks, options.seq))


def model_of(options: Any) -> Model:
    """A model of one block."""
    return replace(
        find_model("gpt3-175b" if options.style == "gpt" else "llama2-7b"),
        name="tensor-parallel",
        num_layers=1,
        hidden=options.hidden,
        ffn_hidden=options.ffn_hidden or 4 * options.hidden,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads or options.heads,
        head_dim=options.hidden // options.heads,
        vocab=1,
        max_seq=options.seq,
        positions="none",
        tied_embedding=True,
        causal=options.causal,
        dropout_frac=0.0,
    )


def cut_of(options: Any, ranks: int) -> Cut:
    """How `ranks` ranks cut the block; PlanError for a grid that is not one."""
    grid = default_grid(options.layout, ranks)
    if options.grid and options.layout != "1d":
        try:
            grid = tuple(int(size) for size in options.grid.split("x"))
        except ValueError:
            text = f"tensor-parallel: --grid {options.grid} is not a grid; write numbers as 4x2"
            raise PlanError(text) from None
    return Cut(
        microbatch=float(options.microbatch),
        seq=float(options.seq),
        tp=float(ranks),
        layout=options.layout,
        grid=tuple(float(size) for size in grid),
        sequence_parallel=True,
        precision=precision(options.dtype),
    )


def estimate(options: Any, tape: Tape) -> None:
    """Write the closed form of `main` on `tape`: each op of the layout, as often as it occurs."""
    model, cut = model_of(options), cut_of(options, tape.world_size)
    for op in [*with_saved_bytes(block_ops(model, cut)), *shared_gradients(model, cut)[0]]:
        if op.kind == "collective" and op.group_size == 1:
            continue
        row = op_row(op) | {"dtype": options.dtype}
        if op.kind == "kernel":
            row["flop"] = 0.0  # a recorder counts FLOP of matmuls and attention alone
        tape.op(is_matmul=op.kind == "matmul", **row)


def main(options: Any, context: Context) -> dict[str, Any]:
    """Forward, backward, and the sum of shared gradients."""
    from meshwise.runtime.programs.tensor_parallel.block import block
    from meshwise.runtime.programs.tensor_parallel.layouts import new_layout, sum_shared_gradients

    recorder = context.recorder
    cut = cut_of(options, context.world_size)
    on = new_layout(context, model_of(options), cut)
    with recorder.setup():
        x, gradient, weights = make_inputs(options, on, context)
    recorder.weights(*weights.values())
    context.step("inputs", {"x [tokens, columns]": x})
    y = block(on.parts, x, weights)
    context.step("forward", {"y [tokens, columns]": y})
    y.backward(gradient)
    sum_shared_gradients(on, weights)
    assert x.grad is not None
    context.step("backward", {"dx [tokens, columns]": x.grad})
    return {"grid": [int(size) for size in cut.grid]}


def make_inputs(
    options: Any, on: TensorLayout, context: Context
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """This rank's part of x and of the gradient of the output, and of each weight."""
    dtype, seed = context.dtype(options.dtype), options.seed
    x, gradient = (
        context.normal(*on.between, dtype=dtype, key=(seed, place, context.rank)) for place in (0, 1)
    )
    weights = {
        name: context.normal(*shape, dtype=dtype, key=(seed, 2, place), std=shape[0] ** -0.5)
        for place, (name, shape) in enumerate(on.shapes.items())
    }
    for leaf in (x, *weights.values()):
        leaf.requires_grad_()
    return x, gradient, weights

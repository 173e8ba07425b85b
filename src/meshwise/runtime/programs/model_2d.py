"""A 2D-parallel MLP of L layers: tensor parallelism inside, data parallelism outside.

Every rank holds N/P tokens of the sequence and a share of the weights, W1 [d, f/TP] and W2 [f/TP, d] of
each layer. A layer gathers the tokens of its TP ranks, multiplies by W1 and W2, and scatters the sum of
the ranks' results back: x + relu(x W1) W2. The gradients of the weights are summed over the DP ranks.

By default it follows Ulysses attention over the same ranks, whose output it takes: attention, then MLP,
as in a transformer.

In closed form, for N tokens, width d, inner width f, L layers; TP x DP = P ranks. A rank holds n = N/P tokens
between layers and M = N/DP inside one, with f' = f/TP columns of W1 and rows of W2.

    per layer and rank      forward                                 backward
    all-gather over TP      1, of M d elements                      1
    matmuls                 2, of 2 M d f' FLOP each                4
    reduce-scatter over TP  1, of M d elements                      1
    kept                    M d + M f' elements
    once, over DP                                                   2 all-reduces of L d f' elements

Source: Megatron-LM, arXiv 1909.08053, with sequence parallelism, arXiv 2205.05198.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwise.core.errors import PlanError
from meshwise.core.refusals import refuse
from meshwise.program.lifetime import Script, play
from meshwise.program.op import Tensor
from meshwise.program.tape import Tape
from meshwise.runtime.programs import program_options, ulysses

if TYPE_CHECKING:
    import torch

    from meshwise.runtime.programs.context import Context
    from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis


Options = program_options(__name__, "model-2d")


def check(options: Any, ranks: int) -> None:
    """PlanError for what does not divide."""
    tp, dp = degrees(options, ranks)
    named = {"tp": tp, "dp": dp, "product": tp * dp, "inner": inner_width(options)}
    refuse("program model-2d", PlanError, "model-2d: ", of=options, ranks=ranks, **named)
    if options.after_ulysses:
        ulysses.check(attention_options(options, ranks), ranks)


def degrees(options: Any, ranks: int) -> tuple[int, int]:
    """(tp, dp); where both are left out, all ranks are tensor-parallel."""
    tp = options.tp or max(1, ranks // (options.dp or 1))
    return tp, options.dp or max(1, ranks // tp)


def inner_width(options: Any) -> int:
    """f, the width between W1 and W2."""
    return options.ffn_hidden or 4 * options.hidden


def attention_options(options: Any, ranks: int) -> ulysses.Options:
    """The Ulysses attention that goes before."""
    heads = options.heads or max(1, options.hidden // 128)
    if not options.heads and heads % ranks:
        heads = ranks
    same = {name: getattr(options, name) for name in ("seq", "hidden", "dtype", "seed")}
    return ulysses.Options(heads=heads, **same)


# --- closed form -------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """A layer's weights, their gradients, and what its backward needs, as views and tensors."""

    weights: list[Tensor]
    grads: list[Tensor]
    gathered: Tensor
    inter: Tensor


def estimate(options: Any, tape: Tape) -> None:
    """Write the closed form of `main` on `tape`: attention before it, forward, backward if it has one."""
    (tp, dp), tokens = degrees(options, tape.world_size), options.seq // tape.world_size
    full, inner = (options.seq // dp, options.hidden), (options.seq // dp, inner_width(options) // tp)
    s = Script(module="model-2d", dtype=options.dtype, has_backward=options.backward)
    if options.after_ulysses:
        attention = attention_options(options, tape.world_size)
        before = ulysses.ClosedForm(attention, tape.world_size, has_backward=False)
        start = before.forward()
        s.events += before.script.events
        s.returns(before.x, *before.weights)
    else:
        start = s.new("start", tokens, options.hidden)
    shapes = (options.layers, full[1], inner[1]), (options.layers, inner[1], full[1])
    weights = [s.new(f"W{i}", *shape, is_weight=True) for i, shape in enumerate(shapes, start=1)]
    grads = [s.new(f"dW{i}", *shape) for i, shape in enumerate(shapes, start=1) if options.backward]
    layers, x = [], start
    for _ in range(options.layers):
        mine, sums = ([each.view(each.name, *each.shape[1:]) for each in of] for of in (weights, grads))
        gathered = s.collective("input", "all_gather", full, "tp", tp, x, "input_")
        inter = s.matmul("inter", (1, *inner, full[1]), (gathered, mine[0]), saves=(gathered,))
        s.op("inter", "kernel", inner, reads=(inter,), writes=(inter,), saves=(inter,))
        partial = s.matmul("output", (1, *full, inner[1]), (inter, mine[1]), "partial")
        summed = s.collective("output", "reduce_scatter", full, "tp", tp, partial, "summed")
        result = s.kernel("residual", (tokens, full[1]), (x, summed), "x")
        s.returns(gathered, inter, partial, summed, x)
        layers.append(_Layer(mine, sums, gathered, inter))
        x = result
    left = _backward(replace(s, phase="backward"), layers, grads, tokens, tp, dp) if options.backward else []
    s.returns(start, x, *weights, *grads, *left)
    play(s.events, tape)


def _backward(
    s: Script, layers: list[_Layer], grads: list[Tensor], tokens: int, tp: int, dp: int
) -> list[Tensor]:
    """From a gradient of the output, last layer first; weights' gradients add up in their buffers."""
    full = rows, hidden = layers[0].gathered.shape
    inner = _, part = layers[0].inter.shape[1:]
    first = grad = s.new("d output", tokens, hidden)

    def add_to(name: str, total: Tensor, grad: Tensor) -> None:
        s.op(name, "kernel", total.shape, reads=(total, grad), writes=(total,))

    for layer in reversed(layers):
        partial = s.collective("output", "all_gather", full, "tp", tp, grad, "d partial")
        d_weight = s.matmul("output", (1, part, hidden, rows), (layer.inter, partial), "dW")
        d_relu = s.matmul("output", (1, rows, part, hidden), (partial, layer.weights[1]), "d relu")
        add_to("output", layer.grads[1], d_weight)
        d_inter = s.kernel("inter", inner, (d_relu, layer.inter), "d inter")
        d_weight = s.matmul("inter", (1, hidden, part, rows), (layer.gathered, d_inter), "dW")
        d_gathered = s.matmul("inter", (1, rows, hidden, part), (d_inter, layer.weights[0]), "d input_")
        s.returns(layer.gathered)
        add_to("inter", layer.grads[0], d_weight)
        summed = s.collective("input", "reduce_scatter", full, "tp", tp, d_gathered, "d summed")
        grad = s.kernel("input", (tokens, hidden), (summed, grad), "dx")
    for name, each in zip(("W1", "W2"), grads, strict=True):
        s.collective(name, "all_reduce", each.shape, "dp", dp, each)
    return [first, grad]


# --- run ---------------------------------------------------------------------------------------


def main(options: Any, context: Context) -> None:
    """Forward, and backward if asked."""
    import torch

    from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis

    tp, dp = degrees(options, context.world_size)
    start = _start(options, context)
    mesh = context.mesh(dp=dp, tp=tp)
    along = MeshAxis(mesh.get_group("tp"), tp, mesh.get_local_rank("tp"))
    with context.recorder.setup():
        start.requires_grad_(options.backward)
        weights = local_weights(options, context, along)
        context.recorder.weights(*weights.values())
        for weight in weights.values() if options.backward else ():
            weight.grad = torch.zeros_like(weight)
        layers = list(zip(*map(_leaves, weights.values()), strict=True))
    with context.recorder.section("model-2d"), torch.set_grad_enabled(options.backward):
        output = forward(context, start, layers, along, weights)
    if options.backward:
        shown = {"dW1 [L, d, d'/TP]": "W1", "dW2 [L, d'/TP, d]": "W2"}
        about = "model-2d", output, (options.seed, 13), weights, weights, shown
        ulysses.backward(context, *about, mesh.get_group("dp"))


def _start(options: Any, context: Context) -> torch.Tensor:
    """This rank's N/P tokens: what attention leaves, or made up."""
    import torch

    if not options.after_ulysses:
        with context.recorder.setup():
            tokens, key = options.seq // context.world_size, (options.seed, 0, context.rank)
            return context.normal(tokens, options.hidden, dtype=context.dtype(options.dtype), key=key)
    attention = attention_options(options, context.world_size)
    with context.recorder.section("ulysses"), torch.no_grad():
        return ulysses.forward(attention, context, ulysses.make_inputs(attention, context))


def local_weights(options: Any, context: Context, tp: MeshAxis) -> dict[str, Any]:
    """This rank's W1 [L, d, f/TP] and W2 [L, f/TP, d]."""
    hidden, inner = options.hidden, inner_width(options) // tp.size

    def weight(number: int, *shape: int, fan_in: int) -> torch.Tensor:
        dtype, key = context.dtype(options.dtype), (options.seed, number, tp.index)
        return context.normal(options.layers, *shape, dtype=dtype, key=key, std=fan_in**-0.5)

    first = weight(11, hidden, inner, fan_in=hidden)
    return {"W1": first, "W2": weight(12, inner, hidden, fan_in=inner * tp.size)}


def _leaves(weight: torch.Tensor) -> list[torch.Tensor]:
    """One leaf per layer in the storage of `weight`; gradients add up in that of its gradient."""
    layers = [layer.detach() for layer in weight]
    for layer, grad in zip(layers, weight.grad, strict=True) if weight.grad is not None else ():
        layer.requires_grad_().grad = grad
    return layers


def forward(
    context: Context, x: torch.Tensor, layers: list[tuple[torch.Tensor, torch.Tensor]], tp: MeshAxis,
    shown: dict[str, torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """All layers x + relu(x W1) W2 of x [N/P, d], over the ranks of `tp`.

    The steps are those of the first, and the end.
    """
    import torch

    from meshwise.runtime.programs.tensor_parallel.exchange import gather_parts, scatter_sums

    op = context.recorder.op
    for number, (weight_in, weight_out) in enumerate(layers):
        with op("input"):
            gathered = gather_parts(x, tp)
        if number == 0:
            weights = {"W1 [L, d, d'/TP]": shown["W1"], "W2 [L, d'/TP, d]": shown["W2"]}
            context.step("2D model parallel", {"input_ [N/DP, d]": gathered, **weights})
        with op("inter"):
            inter = torch.mm(gathered, weight_in).relu_()
        if number == 0:
            context.step("inter = input x W1", {"inter [N/DP, d'/TP]": inter})
        with op("output"):
            partial = torch.mm(inter, weight_out)
            summed = scatter_sums(partial, tp)
        with op("residual"):
            x = x + summed
        del gathered, inter, partial, summed
    context.step("output = all layers", {"output [N/P, d]": x})
    return x

"""Ulysses attention: the sequence is spread over all ranks, but while attention runs it is the heads.

Every rank holds N/P tokens and all weights. It projects its tokens to q, k, v of all h heads; an
all-to-all turns that into all tokens of h/P heads; attention runs there; a second all-to-all turns the
result back, and the output projection follows. (Inside a ring, the program `train` runs it.)

Source: DeepSpeed-Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwise.program.lifetime import play
from meshwise.program.tape import Tape
from meshwise.program.ulysses import Ulysses, ulysses_program
from meshwise.runtime.programs import check_divides, program_options

if TYPE_CHECKING:
    import torch

    from meshwise.runtime.programs.context import Context


Options = program_options(__name__, "ulysses")


def check(options: Any, ranks: int) -> None:
    """PlanError for what does not divide or does not go together."""
    check_divides("ulysses: --seq", options.seq, ranks, f"{ranks} ranks")
    check_divides("ulysses: --heads", options.heads, ranks, f"the {ranks} ranks that exchange heads")
    check_divides("ulysses: --hidden", options.hidden, options.heads, f"--heads {options.heads}")


def sizes(options: Any, ranks: int) -> Ulysses:
    """The numbers that the closed form takes."""
    return Ulysses(
        ranks=ranks,
        seq=options.seq,
        hidden=options.hidden,
        heads=options.heads,
        dtype=options.dtype,
        is_flash=options.attention == "flash",
        is_causal=options.causal,
        has_backward=options.backward,
    )


def estimate(options: Any, tape: Tape) -> None:
    """Write the closed form of `main` on `tape`."""
    play(ulysses_program(sizes(options, tape.world_size), tape.rank), tape)


def main(options: Any, context: Context) -> dict[str, Any] | None:
    """Forward, and backward if asked; with `--check`, the largest difference to a single process."""
    import torch

    recorder = context.recorder
    inputs = make_inputs(options, context)
    with recorder.section("ulysses"), torch.set_grad_enabled(options.backward):
        output = forward(options, context, inputs)
    if options.backward:
        backward(options, context, inputs, output)
    if not options.check or context.is_fake:
        return None
    from meshwise.runtime.programs.reference import ulysses_difference

    with recorder.setup():
        ranks = range(context.world_size)
        shape = inputs["input"].shape
        tokens = [_tokens(options, context, shape, _INPUT, rank) for rank in ranks]
        grads = [_tokens(options, context, shape, _GRADIENT, rank) for rank in ranks if options.backward]
        found = ulysses_difference(inputs, tokens, grads, output, is_causal=options.causal)
        return {"max_abs_diff": found}


_INPUT, _GRADIENT = 0, 5
"""Keys of the random numbers of tokens; those of the weights lie between."""


def _tokens(options: Any, context: Context, shape: tuple[int, ...], key: int, rank: int) -> torch.Tensor:
    """The made-up tokens, or their gradient, of `rank`."""
    return context.normal(*shape, dtype=context.dtype(options.dtype), key=(options.seed, key, rank))


def make_inputs(options: Any, context: Context) -> dict[str, torch.Tensor]:
    """This rank's tokens, and the four weights that every rank holds."""
    tokens, width = options.seq // context.world_size, options.hidden // options.heads
    dtype, std = context.dtype(options.dtype), options.hidden**-0.5
    with context.recorder.setup():
        x = _tokens(options, context, (tokens, options.hidden), _INPUT, context.rank)
        shapes = dict.fromkeys("QKV", (options.hidden, width)) | {"O": (width, options.hidden)}  # of a head
        weights = {
            name: context.normal(options.heads, *shape, dtype=dtype, key=(options.seed, place), std=std)
            for place, (name, shape) in enumerate(shapes.items(), start=1)
        }
        for leaf in (x, *weights.values()):
            leaf.requires_grad_(options.backward)
    context.recorder.weights(*weights.values())
    return {"input": x, **weights}


def forward(options: Any, context: Context, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The steps of the program; nothing that it names is freed before it returns."""
    import torch
    from torch import bmm

    from meshwise.runtime.programs.attention_kernels import Attend, SoftmaxInPlace
    from meshwise.runtime.programs.functions import Project
    from meshwise.runtime.programs.tensor_parallel.exchange import swap_parts

    op, step, num = context.recorder.op, context.step, context.world_size
    exchange = context.mesh(ulysses=num).get_group("ulysses")
    x, weight_q, weight_k, weight_v, weight_o = inputs.values()
    tokens, width = x.shape[0], options.hidden // options.heads
    local_heads, seq = options.heads // num, tokens * num
    spread, gathered = "[P, h/P, N/P, d/h]", "[h/P, N, d/h]"

    def dealt(tensor: torch.Tensor) -> torch.Tensor:
        return swap_parts(tensor, exchange)

    def to_heads(name: str, tensor: torch.Tensor) -> torch.Tensor:
        with op(name):
            return dealt(tensor.view(num, local_heads, tokens, width))

    def join_tokens(name: str, tensor: torch.Tensor) -> torch.Tensor:
        with op(f"{name} transpose"):
            return tensor.transpose(0, 1).contiguous().view(local_heads, seq, width)

    symbols = ("input [N/P, d]", "Q [h, d, d/h]", "K [h, d, d/h]", "V [h, d, d/h]", "O [h, d/h, d]")
    step("inputs", dict(zip(symbols, inputs.values(), strict=True)))
    projected = []
    for name, weight in zip("qkv", (weight_q, weight_k, weight_v), strict=True):
        with op(name):
            projected.append(Project.apply(x, weight))

    def shown(symbols: str, tensors: list[torch.Tensor], mark: str = "") -> dict[str, torch.Tensor]:
        return {f"{name}{mark} {symbols}": tensor for name, tensor in zip("qkv", tensors, strict=True)}

    note = "q = input x Q, k = input x K, v = input x V"
    step("compute q, k, v", shown("[h, N/P, d/h]", projected), note)
    sent = [to_heads(name, tensor) for name, tensor in zip("qkv", projected, strict=True)]
    step("all-to-all q, k, v", shown(spread, sent, "_"))
    # what was sent is let go of one by one, as it is laid out anew
    q_, k_, v_ = joined = [join_tokens(name, sent.pop(0)) for name in "qkv"]
    note = "transpose(0, 1) q_, k_, v_ & reshape"
    step("transpose and reshape q_, k_, v_", shown(gathered, joined, "_"), note)

    if options.attention == "scores":
        with op("A"):
            scores = SoftmaxInPlace.apply(bmm(q_, k_.transpose(1, 2)), width**-0.5, options.causal)
        step("A = q_ x k_t", {"A [h/P, N, N]": scores})
        with op("c"):
            c = bmm(scores, v_)
        step("c = A x v_", {f"c {gathered}": c})
    else:
        batched = [tensor.unsqueeze(0) for tensor in (q_, k_, v_)]
        with op("attention"):
            c = Attend.apply(*batched, options.causal)
        c = c.transpose(1, 2).squeeze(0)
        step("c = attention of q_, k_, v_", {f"c {gathered}": c})

    with op("c transpose"):
        c = c.transpose(0, 1).contiguous()
    step("transpose c", {"c [N, h/P, d/h]": c}, "transpose(0, 1) c")
    with op("c"):
        c_ = dealt(c.view(num, tokens, local_heads, width))
    step("all-to-all c", {"c_ [P, N/P, h/P, d/h]": c_}, "c_ = all-to-all c")
    with op("c_ transpose"):
        c_ = c_.transpose(0, 1).contiguous().view(tokens, options.hidden)
    weight_o = weight_o.view(options.hidden, options.hidden)
    step("transpose and reshape c_, reshape O", {"c_ [N/P, d]": c_, "O [d, d]": weight_o})
    with op("output"):
        output = torch.mm(c_, weight_o)
    step("output = c x O", {"output [N/P, d]": output})
    return output


def backward(options: Any, context: Context, inputs: Mapping[str, Any], output: torch.Tensor) -> None:
    """Gradients of the inputs for a made-up gradient of the output; weights' are summed over all ranks."""
    import torch.distributed as dist

    recorder = context.recorder
    with recorder.setup():
        gradient = _tokens(options, context, output.shape, _GRADIENT, context.rank)
    output.backward(gradient)
    x, *weights = inputs.values()
    with recorder.section("ulysses"), recorder.phase("backward"):
        for name, weight in list(inputs.items())[1:]:
            with recorder.op(name):
                dist.all_reduce(weight.grad)
    shown = {"d input [N/P, d]": x.grad, "dQ [h, d, d/h]": weights[0].grad, "dO [h, d/h, d]": weights[3].grad}
    context.step("backward", {name: grad for name, grad in shown.items() if grad is not None})

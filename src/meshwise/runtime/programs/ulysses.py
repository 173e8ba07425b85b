"""Ulysses attention: the sequence is spread over all ranks, but while attention runs it is the heads.

Every rank holds N/P tokens and all weights. It projects its tokens to q, k, v of all h heads; an
all-to-all turns that into all tokens of h/P heads; attention runs there; a second all-to-all turns the
result back, and the output projection follows. (Inside a ring, the program `train` runs it.)

In closed form, for N tokens, width d, h heads of size e = d/h, P ranks; each holds n = N/P tokens of all
heads, or all tokens of h/P heads:

    per rank            forward                                     backward
    q, k, v             3 matmuls of 2 n d^2 FLOP                   twice that
    exchange            3 all-to-alls of n d elements               3
    scores              2 matmuls of 2 (h/P) N^2 e                  4
    flash               4 (h/P) N^2 e                               2.5 times that
    exchange            1 all-to-all of n d elements                1
    output              1 matmul of 2 n d^2                         2
    weights' gradients                                              4 all-reduces of d^2 elements

A transpose copies only where both swapped dims are longer than one.

Source: DeepSpeed-Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshwise.core.errors import PlanError
from meshwise.core.refusals import refuse
from meshwise.cost.op import Cost, attended_pairs, flash_attention, flash_attention_backward
from meshwise.program.lifetime import Script, play
from meshwise.program.op import Tensor
from meshwise.program.tape import Tape
from meshwise.runtime.programs import program_options

if TYPE_CHECKING:
    import torch

    from meshwise.runtime.programs.context import Context


Options = program_options(__name__, "ulysses")


def check(options: Any, ranks: int) -> None:
    """PlanError for what does not divide or does not go together."""
    refuse("program ulysses", PlanError, "ulysses: ", of=options, ranks=ranks)


# --- closed form -------------------------------------------------------------------------------


def estimate(options: Any, tape: Tape) -> None:
    """Write the closed form of `main` on `tape`: inputs, forward, backward if it has one."""
    form = ClosedForm(options, tape.world_size, has_backward=options.backward)
    output = form.forward()
    grads = form.backward() if options.backward else []
    form.script.returns(form.x, *form.weights, output, *grads)
    play(form.script.events, tape)


class ClosedForm:
    """Every op, collective and tensor of one rank, in order, on a `script`; it keeps what the backward needs.

    Of attention that are its scores, or its output and log-sum-exp.
    """

    def __init__(self, options: Any, ranks: int, *, has_backward: bool) -> None:
        self.script = Script(module="ulysses", dtype=options.dtype, has_backward=has_backward)
        self.ranks, self.seq, self.hidden, self.heads = ranks, options.seq, options.hidden, options.heads
        self.is_flash, self.is_causal = options.attention == "flash", options.causal
        self.tokens, self.width = options.seq // ranks, options.hidden // options.heads
        self.local_heads = options.heads // ranks
        self.matrix = self.local_heads, self.seq, self.seq
        self.thin = self.local_heads, self.seq, self.width, self.seq  # scores times queries, keys or values

    def forward(self) -> Tensor:
        """From inputs to the output."""
        s, n, d, e = self.script, self.tokens, self.hidden, self.width
        grid, heads = (self.ranks, self.local_heads, n, e), (self.local_heads, self.seq, e)
        self.x = x = s.new("input", n, d)
        self.shapes = [(self.heads, *((e, d) if name == "O" else (d, e))) for name in "QKVO"]
        named = zip("QKVO", self.shapes, strict=True)
        self.weights = [s.new(name, *shape, is_weight=True) for name, shape in named]
        qkv = [
            s.matmul(name, (self.heads, n, e, d), (x, weight), saves=(x,) if name == "q" else ())
            for name, weight in zip("qkv", self.weights, strict=False)
        ]
        sent = [
            s.collective(name, "all_to_all", grid, "ulysses", self.ranks, each, f"{name}_")
            for name, each in zip("qkv", qkv, strict=True)
        ]
        swapped = [
            _swap(s, f"{name} transpose", each, (self.local_heads, self.ranks, n, e))
            for name, each in zip("qkv", sent, strict=True)
        ]
        self.qkv = [each.view(f"{name}_", *heads) for name, each in zip("qkv", swapped, strict=True)]
        c, self.saved = self._flash() if self.is_flash else self._scores()
        c = _swap(s, "c transpose", c, (self.seq, self.local_heads, e))
        shape = self.ranks, n, self.local_heads, e
        back = s.collective("c", "all_to_all", shape, "ulysses", self.ranks, c, "c_")
        self.c_ = _swap(s, "c_ transpose", back, (n, self.ranks, self.local_heads, e))
        output = s.matmul("output", (1, n, d, d), (self.c_, self.weights[3]), saves=(self.c_,))
        s.returns(*qkv, c, *self.qkv, self.c_, *(() if self.is_flash else self.saved))
        return output

    def backward(self) -> list[Tensor]:
        """From a gradient of the output to those of the inputs, in the order of autograd."""
        self.script = s = replace(self.script, phase="backward")
        n, d, e = self.tokens, self.hidden, self.width
        grad = s.new("d output", n, d)
        d_out = s.matmul("output", (1, d, d, n), (self.c_, grad), "dO")
        dc_ = s.matmul("output", (1, n, d, d), (grad, self.weights[3]), "dc_")
        s.returns(self.c_)
        dc = self._sent_back("c", dc_, (self.ranks, n, self.local_heads, e))
        dq_, dk_, dv_ = self._flash_backward(dc) if self.is_flash else self._scores_backward(dc)
        shape = self.ranks, self.local_heads, n, e
        grads = [self._sent_back(name, each, shape) for name, each in (("v", dv_), ("k", dk_), ("q", dq_))]
        total: Tensor | None = None
        d_weights = [d_out]
        for name, each, weight in zip("vkq", grads, self.weights[2::-1], strict=True):
            d_weight, total = self._project_back(name, each, weight, total)
            d_weights.insert(0, d_weight)
        assert total is not None
        for name, whole, d_weight in zip("QKVO", self.shapes, d_weights, strict=True):
            s.collective(name, "all_reduce", whole, "world", self.ranks, d_weight)
        return [grad, total, *d_weights]

    def _sent_back(self, name: str, grad: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The gradient `grad` undergoes transpose and all-to-all in reverse.

        That of the keys of scores in memory comes with its last two dims swapped, which the copy undoes.
        """
        s = self.script
        is_swapped = name == "k" and not self.is_flash and min(self.seq, self.width) > 1
        sent = s.kernel(name, shape, (grad,)) if is_swapped else _swap(s, name, grad, shape)
        arrived = s.collective(name, "all_to_all", shape, "ulysses", self.ranks, sent, f"{name} all-to-all")
        s.returns(sent, grad)
        return arrived

    def _project_back(
        self, name: str, grad: Tensor, weight: Tensor, total: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Backward of x W: dW, and dx as one matmul over all heads, added to `total`."""
        s, n, d, e = self.script, self.tokens, self.hidden, self.width
        d_weight = s.matmul(name, (self.heads, d, e, n), (self.x, grad), f"d{name.upper()}")
        rows = _swap(s, name, grad, (n, self.heads, e))
        columns = _swap(s, name, weight, (self.heads, e, d), at=1)
        dx = s.matmul(name, (1, n, d, d), (rows, columns), "dx")
        s.returns(rows, grad, columns)
        return d_weight, dx if total is None else s.kernel(name, (n, d), (total, dx), "dx")

    def _scores(self) -> tuple[Tensor, Sequence[Tensor]]:
        """The mixed values, and the scores, which the backward needs; their softmax is made in place."""
        s, (q, k, v) = self.script, self.qkv
        scores = s.matmul("A", (*self.matrix, self.width), (q, k), saves=(q, k))
        s.op("A", "kernel", self.matrix, reads=(scores,), writes=(scores,), saves=(scores,))
        return s.matmul("c", self.thin, (scores, v), saves=(v,)), (scores,)

    def _scores_backward(self, grad: Tensor) -> list[Tensor]:
        """Gradients of queries, keys and values; that of the scores is made in place."""
        s, (q, k, v), (scores,) = self.script, self.qkv, self.saved
        dv = s.matmul("c", self.thin, (scores, grad), "dv_")
        d_scores = s.matmul("c", (*self.matrix, self.width), (grad, v), "dA")
        s.op("A", "kernel", self.matrix, reads=(d_scores, scores), writes=(d_scores,))
        s.returns(scores)
        dk = s.matmul("A", (self.local_heads, self.width, self.seq, self.seq), (q, d_scores), "dk_")
        dq = s.matmul("A", self.thin, (d_scores, k), "dq_")
        s.returns(d_scores, q, k)
        return [dq, dk, dv]

    def _flash(self) -> tuple[Tensor, Sequence[Tensor]]:
        """The mixed values, which the backward needs too, with the log-sum-exp."""
        dtype = self.script.dtype
        block = 1, self.local_heads, self.seq, self.width
        made = Tensor("c", block, dtype), Tensor("lse", block[:3], "fp64" if dtype == "fp64" else "fp32")
        self._fused(flash_attention, self.qkv, made, (*self.qkv, *made))
        return made[0], made

    def _flash_backward(self, grad: Tensor) -> list[Tensor]:
        """Gradients of queries, keys and values."""
        block = 1, self.local_heads, self.seq, self.width
        made = [Tensor(name, block, self.script.dtype) for name in ("dq", "dk", "dv")]
        self._fused(flash_attention_backward, (grad, *self.qkv, *self.saved), made)
        self.script.returns(grad, *self.qkv, *self.saved)
        return made

    def _fused(
        self, cost: Callable[..., Cost], reads: Sequence[Tensor], makes: Sequence[Tensor],
        saves: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """One fused kernel over all tokens."""
        shape = (self.local_heads, self.local_heads, self.seq, self.seq, self.width, self.width)
        pairs = float(attended_pairs(self.seq, self.seq, causal=self.is_causal))
        flop = cost(pairs, *shape, batch=1, elem_bytes=1.0).flop
        self.script.op(
            "attention", "attention", (1, *shape), reads=reads, makes=makes, saves=saves, flop=flop
        )


def _swap(s: Script, op: str, tensor: Tensor, shape: tuple[int, ...], *, at: int = 0) -> Tensor:
    """`tensor` with dims `at` and `at + 1` swapped to `shape`: copied, unless one of them is 1."""
    return s.kernel(op, shape, (tensor,)) if min(shape[at : at + 2]) > 1 else tensor


# --- run ---------------------------------------------------------------------------------------


def main(options: Any, context: Context) -> None:
    """Forward, and backward if asked."""
    import torch

    recorder = context.recorder
    inputs = make_inputs(options, context)
    with recorder.section("ulysses"), torch.set_grad_enabled(options.backward):
        output = forward(options, context, inputs)
    if options.backward:
        shown = {"d input [N/P, d]": "input", "dQ [h, d, d/h]": "Q", "dO [h, d/h, d]": "O"}
        backward(context, "ulysses", output, (options.seed, 5), inputs, "QKVO", shown)


def make_inputs(options: Any, context: Context) -> dict[str, Any]:
    """This rank's tokens, and the four weights that every rank holds."""
    tokens, width = options.seq // context.world_size, options.hidden // options.heads
    dtype, std = context.dtype(options.dtype), options.hidden**-0.5
    with context.recorder.setup():
        x = context.normal(tokens, options.hidden, dtype=dtype, key=(options.seed, 0, context.rank))
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
    from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis, swap_parts

    op, step, num = context.recorder.op, context.step, context.world_size
    exchange = MeshAxis(context.mesh(ulysses=num).get_group("ulysses"), num, context.rank)
    x, weight_q, weight_k, weight_v, weight_o = inputs.values()
    tokens, width = x.shape[0], options.hidden // options.heads
    local_heads, seq = options.heads // num, tokens * num
    spread, gathered = "[P, h/P, N/P, d/h]", "[h/P, N, d/h]"

    def to_heads(name: str, tensor: torch.Tensor) -> torch.Tensor:
        with op(name):
            return swap_parts(tensor.view(num, local_heads, tokens, width), exchange)

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
        c_ = swap_parts(c.view(num, tokens, local_heads, width), exchange)
    step("all-to-all c", {"c_ [P, N/P, h/P, d/h]": c_}, "c_ = all-to-all c")
    with op("c_ transpose"):
        c_ = c_.transpose(0, 1).contiguous().view(tokens, options.hidden)
    weight_o = weight_o.view(options.hidden, options.hidden)
    step("transpose and reshape c_, reshape O", {"c_ [N/P, d]": c_, "O [d, d]": weight_o})
    with op("output"):
        output = torch.mm(c_, weight_o)
    step("output = c x O", {"output [N/P, d]": output})
    return output


def backward(
    context: Context, program: str, output: torch.Tensor, key: tuple[int, int], leaves: Mapping[str, Any],
    weights: Iterable[str], shown: Mapping[str, str], group: Any = None,
) -> None:  # fmt: skip
    """Gradients of `leaves` for a made-up gradient of the output, and the step that shows some of them.

    Those of the `weights` among them are summed over the ranks of a group [all].
    """
    import torch.distributed as dist

    recorder = context.recorder
    with recorder.setup():
        gradient = context.normal(*output.shape, dtype=output.dtype, key=(*key, context.rank))
    output.backward(gradient)
    with recorder.section(program), recorder.phase("backward"):
        for name in weights:
            with recorder.op(name):
                dist.all_reduce(leaves[name].grad, group=group)
    context.step("backward", {symbols: leaves[name].grad for symbols, name in shown.items()})

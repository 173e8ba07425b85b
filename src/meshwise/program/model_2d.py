"""The 2D-parallel MLP in closed form: every op, collective and tensor of one rank, in order.

N tokens, width d, inner width f, L layers; TP x DP = P ranks. A rank holds n = N/P tokens between layers
and M = N/DP inside one, with f' = f/TP columns of W1 and rows of W2.

    per layer and rank      forward                                 backward
    all-gather over TP      1, of M d elements                      1
    matmuls                 2, of 2 M d f' FLOP each                4
    reduce-scatter over TP  1, of M d elements                      1
    kept                    M d + M f' elements
    once, over DP                                                   2 all-reduces of L d f' elements
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.program.tape import Tape
from meshwise.program.ulysses import WEIGHTS, Ulysses, write_ulysses
from meshwise.program.writer import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Model2D:
    """The numbers of a program; see the top of the file. `before` is the attention that it follows."""

    tp: int
    dp: int
    seq: int
    hidden: int
    inner: int
    layers: int
    dtype: str
    elem_bytes: int
    has_backward: bool
    before: Ulysses | None


def write_model_2d(m: Model2D, tape: Tape) -> None:
    """The whole program: attention before it, forward, backward if it has one."""
    write = Writer(tape=tape, module="model-2d", dtype=m.dtype, elem_bytes=m.elem_bytes)
    tokens, part = m.seq // (m.tp * m.dp), m.inner // m.tp
    if m.before is None:
        write.new("start", tokens, m.hidden)
    else:
        write_ulysses(m.before, tape)
        write.free("input", *WEIGHTS)
        write.rename("output", "start")
    for name in ("W1", "W2", *(("dW1", "dW2") if m.has_backward else ())):
        write.new(name, m.layers, m.hidden, part)
    x = "start"
    for layer in range(m.layers):
        x = _layer(m, write, layer, x)
    write.step("output = all layers", ("output", "[N/P, d]", (tokens, m.hidden)))
    if m.has_backward:
        _backward(m, write.in_phase("backward"))


def _layer(m: Model2D, write: Writer, layer: int, x: str) -> str:
    """x + relu(x W1) W2; returns the name of the result. `start` outlives the layers."""
    part, tokens, gathered = m.inner // m.tp, m.seq // (m.tp * m.dp), m.seq // m.dp
    full, inner, weight = gathered * m.hidden, gathered * part, m.hidden * part
    names = [f"{name} {layer}" for name in ("input_", "inter", "partial", "summed")]
    saves = float(m.has_backward)
    write.collective("input", "all_gather", (gathered, m.hidden), "tp", m.tp, out=names[0])
    if layer == 0:
        first = "W1", "[L, d, d'/TP]", (m.layers, m.hidden, part)
        second = "W2", "[L, d'/TP, d]", (m.layers, part, m.hidden)
        write.step("2D model parallel", ("input_", "[N/DP, d]", (gathered, m.hidden)), first, second)
    shape = 1, gathered, part, m.hidden
    write.matmul("inter", shape, names[1], read=full + weight, weight=weight, saved=saves * full)
    kept_bytes = saves * inner * m.elem_bytes
    write.kernel("inter", (gathered, part), read=inner, written=inner, saved_bytes=kept_bytes)
    if layer == 0:
        write.step("inter = input x W1", ("inter", "[N/DP, d'/TP]", (gathered, part)))
    shape = 1, gathered, m.hidden, part
    write.matmul("output", shape, names[2], read=inner + weight, weight=weight)
    write.collective("output", "reduce_scatter", (gathered, m.hidden), "tp", m.tp, out=names[3])
    result, size = f"x {layer}", tokens * m.hidden
    write.kernel("residual", (tokens, m.hidden), out=result, read=2 * size, written=size)
    write.free(*(names[2:] if m.has_backward else names))
    if x != "start":
        write.free(x)
    return result


def _backward(m: Model2D, write: Writer) -> None:
    """From a gradient of the output, last layer first; weights' gradients add up in their buffers."""
    part, tokens, gathered = m.inner // m.tp, m.seq // (m.tp * m.dp), m.seq // m.dp
    full, inner, weight, size = gathered * m.hidden, gathered * part, m.hidden * part, tokens * m.hidden
    write.new("d output", tokens, m.hidden)
    grad = "d output"
    for layer in reversed(range(m.layers)):
        write.collective("output", "all_gather", (gathered, m.hidden), "tp", m.tp, out="d partial")
        write.matmul("output", (1, part, m.hidden, gathered), "dW", read=inner + full)
        shape = 1, gathered, part, m.hidden
        write.matmul("output", shape, "d relu", read=full + weight, weight=weight)
        write.free("d partial")
        write.kernel("output", (part, m.hidden), read=2 * weight, written=weight)
        write.free("dW")
        write.kernel("inter", (gathered, part), out="d inter", read=2 * inner, written=inner)
        write.free("d relu", f"inter {layer}")
        write.matmul("inter", (1, m.hidden, part, gathered), "dW", read=inner + full)
        shape = 1, gathered, m.hidden, part
        write.matmul("inter", shape, "d input_", read=inner + weight, weight=weight)
        write.free("d inter", f"input_ {layer}")
        write.kernel("inter", (m.hidden, part), read=2 * weight, written=weight)
        write.free("dW")
        write.collective("input", "reduce_scatter", (gathered, m.hidden), "tp", m.tp, out="d summed")
        write.free("d input_")
        total = f"dx {layer}"
        write.kernel("input", (tokens, m.hidden), out=total, read=2 * size, written=size)
        write.free("d summed", *([] if grad == "d output" else [grad]))
        grad = total
    shapes = {"W1": (m.layers, m.hidden, part), "W2": (m.layers, part, m.hidden)}
    for name, weights in shapes.items():
        write.collective(name, "all_reduce", weights, "dp", m.dp)
    symbols = ("dW1", "[L, d, d'/TP]", shapes["W1"]), ("dW2", "[L, d'/TP, d]", shapes["W2"])
    write.step("backward", *symbols)

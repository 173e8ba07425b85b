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

from dataclasses import dataclass, replace

from meshwise.program.lifetime import Script
from meshwise.program.op import Op
from meshwise.program.tensor import Tensor
from meshwise.program.ulysses import Ulysses, ulysses_forward


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
    has_backward: bool
    before: Ulysses | None

    @property
    def tokens(self) -> int:
        """n, tokens that a rank holds between layers."""
        return self.seq // (self.tp * self.dp)

    @property
    def gathered(self) -> int:
        """M, tokens that a rank holds inside a layer."""
        return self.seq // self.dp

    @property
    def part(self) -> int:
        """f', columns of W1 and rows of W2."""
        return self.inner // self.tp


@dataclass(slots=True, eq=False)
class _Layer:
    """A layer's weights, their gradients, and what its backward needs, as views and tensors."""

    weights: list[Tensor]
    grads: list[Tensor]
    gathered: Tensor
    inter: Tensor


def model_2d_program(m: Model2D, rank: int) -> list[Op]:
    """The whole program: attention before it, forward, backward if it has one."""
    s = Script(module="model-2d", rank=rank, dtype=m.dtype, has_backward=m.has_backward)
    if m.before is None:
        start = s.new("start", m.tokens, m.hidden)
    else:
        start, kept = ulysses_forward(m.before, replace(s, module="ulysses", has_backward=False))
        s.returns(kept.x, *kept.weights)
    shapes = (m.layers, m.hidden, m.part), (m.layers, m.part, m.hidden)
    weights = [s.new(f"W{i}", *shape, is_weight=True) for i, shape in enumerate(shapes, start=1)]
    grads = [s.new(f"dW{i}", *shape) for i, shape in enumerate(shapes, start=1) if m.has_backward]
    layers, x = [], start
    for number in range(m.layers):
        layer, x = _layer(m, s, x, weights, grads, number)
        layers.append(layer)
    left = _backward(m, replace(s, phase="backward"), layers, grads) if m.has_backward else []
    s.returns(start, x, *weights, *grads, *left)
    return s.events


def _layer(
    m: Model2D, s: Script, x: Tensor, weights: list[Tensor], grads: list[Tensor], number: int
) -> tuple[_Layer, Tensor]:
    """x + relu(x W1) W2."""
    mine = [weight.view(weight.name, *weight.shape[1:]) for weight in weights]
    full, inner = (m.gathered, m.hidden), (m.gathered, m.part)
    gathered = s.collective("input", "all_gather", full, "tp", m.tp, x, "input_")
    inter = s.matmul("inter", (1, *inner, m.hidden), (gathered, mine[0]), saves=(gathered,))
    s.op("inter", "kernel", inner, reads=(inter,), writes=(inter,), saves=(inter,))
    partial = s.matmul("output", (1, *full, m.part), (inter, mine[1]), "partial")
    summed = s.collective("output", "reduce_scatter", full, "tp", m.tp, partial, "summed")
    result = s.kernel("residual", (m.tokens, m.hidden), (x, summed), "x")
    s.returns(gathered, inter, partial, summed, x)
    return _Layer(mine, [grad.view(grad.name, *grad.shape[1:]) for grad in grads], gathered, inter), result


def _backward(m: Model2D, s: Script, layers: list[_Layer], grads: list[Tensor]) -> list[Tensor]:
    """From a gradient of the output, last layer first; weights' gradients add up in their buffers."""
    full, inner = (m.gathered, m.hidden), (m.gathered, m.part)
    first = grad = s.new("d output", m.tokens, m.hidden)
    for layer in reversed(layers):
        partial = s.collective("output", "all_gather", full, "tp", m.tp, grad, "d partial")
        d_weight = s.matmul("output", (1, m.part, m.hidden, m.gathered), (layer.inter, partial), "dW")
        d_relu = s.matmul("output", (1, *inner, m.hidden), (partial, layer.weights[1]), "d relu")
        _add_to(s, "output", layer.grads[1], d_weight)
        d_inter = s.kernel("inter", inner, (d_relu, layer.inter), "d inter")
        d_weight = s.matmul("inter", (1, m.hidden, m.part, m.gathered), (layer.gathered, d_inter), "dW")
        d_gathered = s.matmul("inter", (1, *full, m.part), (d_inter, layer.weights[0]), "d input_")
        s.returns(layer.gathered)
        _add_to(s, "inter", layer.grads[0], d_weight)
        summed = s.collective("input", "reduce_scatter", full, "tp", m.tp, d_gathered, "d summed")
        grad = s.kernel("input", (m.tokens, m.hidden), (summed, grad), "dx")
    for name, each in zip(("W1", "W2"), grads, strict=True):
        s.collective(name, "all_reduce", each.shape, "dp", m.dp, each)
    return [first, grad]


def _add_to(s: Script, name: str, total: Tensor, grad: Tensor) -> None:
    """A layer's gradient is added to its place in the buffer of all layers."""
    s.op(name, "kernel", total.shape, reads=(total, grad), writes=(total,))

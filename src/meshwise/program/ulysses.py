"""Ulysses attention in closed form: every op, collective and tensor of one rank, in order.

N tokens, width d, h heads of size e = d/h; P ranks. Each holds n = N/P tokens of all heads, or all tokens of
h/P heads.

    per rank            forward                                     backward
    q, k, v             3 matmuls of 2 n d^2 FLOP                   twice that
    exchange            3 all-to-alls of n d elements               3
    scores              2 matmuls of 2 (h/P) N^2 e                  4
    flash               4 (h/P) N^2 e                               2.5 times that
    exchange            1 all-to-all of n d elements                1
    output              1 matmul of 2 n d^2                         2
    weights' gradients                                              4 all-reduces of d^2 elements

A transpose copies only where both swapped dims are longer than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwise.cost.op import Cost, attended_pairs, flash_attention, flash_attention_backward
from meshwise.program.lifetime import Script
from meshwise.program.op import Op
from meshwise.program.tensor import Tensor

WEIGHTS = ("Q", "K", "V", "O")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ulysses:
    """The numbers of a program; see the top of the file."""

    ranks: int
    seq: int
    hidden: int
    heads: int
    dtype: str
    is_flash: bool
    is_causal: bool
    has_backward: bool

    @property
    def tokens(self) -> int:
        """n, tokens that a rank holds."""
        return self.seq // self.ranks

    @property
    def width(self) -> int:
        """e, the size of a head."""
        return self.hidden // self.heads

    @property
    def local_heads(self) -> int:
        """h/P, heads that a rank attends to."""
        return self.heads // self.ranks


@dataclass(slots=True, eq=False)
class KeptByUlysses:
    """What the backward needs of the forward; of attention its scores, or its output and log-sum-exp."""

    x: Tensor
    weights: list[Tensor]
    qkv: list[Tensor]
    c_: Tensor
    saved: tuple[Tensor, ...]


def ulysses_program(u: Ulysses, rank: int) -> list[Op]:
    """The whole program: inputs, forward, backward if it has one."""
    script = Script(module="ulysses", rank=rank, dtype=u.dtype, has_backward=u.has_backward)
    output, kept = ulysses_forward(u, script)
    grads = _backward(u, replace(script, phase="backward"), kept) if u.has_backward else []
    script.returns(kept.x, *kept.weights, output, *grads)
    return script.events


def ulysses_forward(u: Ulysses, s: Script) -> tuple[Tensor, KeptByUlysses]:
    """From inputs to `output`, and what a backward needs; the inputs are among it."""
    n, d, e = u.tokens, u.hidden, u.width
    grid, heads = (u.ranks, u.local_heads, n, e), (u.local_heads, u.seq, e)
    x = s.new("input", n, d)
    weights = [s.new(name, u.heads, *((e, d) if name == "O" else (d, e)), is_weight=True) for name in WEIGHTS]
    qkv = [
        s.matmul(name, (u.heads, n, e, d), (x, weight), saves=(x,) if name == "q" else ())
        for name, weight in zip("qkv", weights, strict=False)
    ]
    sent = [
        s.collective(name, "all_to_all", grid, "ulysses", u.ranks, each, f"{name}_")
        for name, each in zip("qkv", qkv, strict=True)
    ]
    swapped = [
        _swap(s, f"{name} transpose", each, (u.local_heads, u.ranks, n, e))
        for name, each in zip("qkv", sent, strict=True)
    ]
    q_, k_, v_ = (each.view(f"{name}_", *heads) for name, each in zip("qkv", swapped, strict=True))
    attend = _flash_forward if u.is_flash else _scores_forward
    c, saved = attend(u, s, q_, k_, v_)
    c = _swap(s, "c transpose", c, (u.seq, u.local_heads, e))
    back = s.collective("c", "all_to_all", (u.ranks, n, u.local_heads, e), "ulysses", u.ranks, c, "c_")
    c_ = _swap(s, "c_ transpose", back, (n, u.ranks, u.local_heads, e))
    output = s.matmul("output", (1, n, d, d), (c_, weights[3]), saves=(c_,))
    s.returns(*qkv, c, q_, k_, v_, c_, *(() if u.is_flash else saved))
    return output, KeptByUlysses(x, weights, [q_, k_, v_], c_, saved)


def _backward(u: Ulysses, s: Script, kept: KeptByUlysses) -> list[Tensor]:
    """From a gradient of `output` to those of the inputs, in the order in which autograd takes the nodes."""
    n, d, e = u.tokens, u.hidden, u.width
    grad = s.new("d output", n, d)
    d_out = s.matmul("output", (1, d, d, n), (kept.c_, grad), "dO")
    dc_ = s.matmul("output", (1, n, d, d), (grad, kept.weights[3]), "dc_")
    s.returns(kept.c_)
    dc = _exchange_back(u, s, "c", dc_, (u.ranks, n, u.local_heads, e))
    attend_back = _flash_backward if u.is_flash else _scores_backward
    dq_, dk_, dv_ = attend_back(u, s, dc, kept)
    shape = (u.ranks, u.local_heads, n, e)
    grads = [_exchange_back(u, s, name, each, shape) for name, each in (("v", dv_), ("k", dk_), ("q", dq_))]
    total: Tensor | None = None
    d_weights = [d_out]
    for name, each, weight in zip("vkq", grads, kept.weights[2::-1], strict=True):
        d_weight, total = _project_back(u, s, name, each, kept.x, weight, total)
        d_weights.insert(0, d_weight)
    assert total is not None
    shapes = [(u.heads, *((e, d) if name == "O" else (d, e))) for name in WEIGHTS]
    for name, whole, d_weight in zip(WEIGHTS, shapes, d_weights, strict=True):
        s.collective(name, "all_reduce", whole, "world", u.ranks, d_weight)
    return [grad, total, *d_weights]


def _exchange_back(u: Ulysses, s: Script, name: str, grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The gradient `grad` undergoes transpose and all-to-all in reverse.

    That of the keys of scores in memory comes with its last two dims swapped, which the copy undoes.
    """
    is_swapped = name == "k" and not u.is_flash and min(u.seq, u.width) > 1
    sent = s.kernel(name, shape, (grad,)) if is_swapped else _swap(s, name, grad, shape)
    arrived = s.collective(name, "all_to_all", shape, "ulysses", u.ranks, sent, f"{name} all-to-all")
    s.returns(sent, grad)
    return arrived


def _project_back(
    u: Ulysses, s: Script, name: str, grad: Tensor, x: Tensor, weight: Tensor, total: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Backward of x W: dW, and dx as one matmul over all heads, added to `total`."""
    n, d, e = u.tokens, u.hidden, u.width
    d_weight = s.matmul(name, (u.heads, d, e, n), (x, grad), f"d{name.upper()}")
    rows = _swap(s, name, grad, (n, u.heads, e))
    columns = _swap(s, name, weight, (u.heads, e, d), at=1)
    dx = s.matmul(name, (1, n, d, d), (rows, columns), "dx")
    s.returns(rows, grad, columns)
    return d_weight, dx if total is None else s.kernel(name, (n, d), (total, dx), "dx")


# --- attention ---------------------------------------------------------------------------------


def _scores_forward(
    u: Ulysses, s: Script, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mixed values, and the scores, which the backward needs; their softmax is made in place."""
    matrix = (u.local_heads, u.seq, u.seq)
    scores = s.matmul("A", (*matrix, u.width), (q, k), saves=(q, k))
    s.op("A", "kernel", matrix, reads=(scores,), writes=(scores,), saves=(scores,))
    return s.matmul("c", _thin(u), (scores, v), saves=(v,)), (scores,)


def _scores_backward(u: Ulysses, s: Script, grad: Tensor, kept: KeptByUlysses) -> list[Tensor]:
    """Gradients of queries, keys and values; that of the scores is made in place."""
    (q, k, v), (scores,) = kept.qkv, kept.saved
    matrix = (u.local_heads, u.seq, u.seq)
    dv = s.matmul("c", _thin(u), (scores, grad), "dv_")
    d_scores = s.matmul("c", (*matrix, u.width), (grad, v), "dA")
    s.op("A", "kernel", matrix, reads=(d_scores, scores), writes=(d_scores,))
    s.returns(scores)
    dk = s.matmul("A", (u.local_heads, u.width, u.seq, u.seq), (q, d_scores), "dk_")
    dq = s.matmul("A", _thin(u), (d_scores, k), "dq_")
    s.returns(d_scores, q, k)
    return [dq, dk, dv]


def _thin(u: Ulysses) -> tuple[int, int, int, int]:
    """The product of a matrix of scores with queries, keys or values."""
    return u.local_heads, u.seq, u.width, u.seq


def _flash_forward(
    u: Ulysses, s: Script, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mixed values, which the backward needs too, with the log-sum-exp."""
    block = 1, u.local_heads, u.seq, u.width
    made = (Tensor("c", block, u.dtype), Tensor("lse", block[:3], "fp64" if u.dtype == "fp64" else "fp32"))
    _fused(u, s, flash_attention, (q, k, v), made, (q, k, v, *made))
    return made[0], made


def _flash_backward(u: Ulysses, s: Script, grad: Tensor, kept: KeptByUlysses) -> list[Tensor]:
    """Gradients of queries, keys and values."""
    made = [Tensor(name, (1, u.local_heads, u.seq, u.width), u.dtype) for name in ("dq", "dk", "dv")]
    _fused(u, s, flash_attention_backward, (grad, *kept.qkv, *kept.saved), made)
    s.returns(grad, *kept.qkv, *kept.saved)
    return made


def _fused(
    u: Ulysses, s: Script, cost: Callable[..., Cost], reads: Sequence[Tensor], makes: Sequence[Tensor],
    saves: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    """One fused kernel over all tokens."""
    shape = (u.local_heads, u.local_heads, u.seq, u.seq, u.width, u.width)
    pairs = float(attended_pairs(u.seq, u.seq, causal=u.is_causal))
    flop = cost(pairs, *shape, batch=1, elem_bytes=1.0).flop
    s.op("attention", "attention", (1, *shape), reads=reads, makes=makes, saves=saves, flop=flop)


# --- transposes ----------------------------------------------------------------------------------


def _swap(s: Script, op: str, tensor: Tensor, shape: tuple[int, ...], *, at: int = 0) -> Tensor:
    """`tensor` with dims `at` and `at + 1` swapped to `shape`: copied, unless one of them is 1."""
    return s.kernel(op, shape, (tensor,)) if min(shape[at : at + 2]) > 1 else tensor

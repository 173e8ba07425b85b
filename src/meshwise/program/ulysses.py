"""Ulysses attention in closed form: every op, collective and tensor of one rank, in order.

N tokens, width d, h heads of size e = d/h; P ranks, of which U = P/R exchange heads and R form a ring.
Each rank holds n = N/P tokens of all heads, or U n tokens of h/U heads.

    per rank            forward                                     backward
    q, k, v             3 matmuls of 2 n d^2 FLOP                   twice that
    exchange            3 all-to-alls of n d elements               3
    scores              2 matmuls of 2 (h/U) (Un)^2 e               4
    flash               4 (h/U) (Un)^2 e per block of the ring      2.5 times that
    exchange            1 all-to-all of n d elements                1
    output              1 matmul of 2 n d^2                         2
    weights' gradients                                              4 all-reduces of d^2 elements

A transpose copies only where both swapped dims are longer than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwise.cost.op import attended_pairs, flash_attention, flash_attention_backward
from meshwise.program.lifetime import Event, Script, Tensor

WEIGHTS = ("Q", "K", "V", "O")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ulysses:
    """The numbers of a program; see the top of the file."""

    ranks: int
    ring: int
    seq: int
    hidden: int
    heads: int
    dtype: str
    is_flash: bool
    is_causal: bool
    has_backward: bool

    @property
    def exchange(self) -> int:
        """U, ranks that exchange heads."""
        return self.ranks // self.ring

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
        """h/U, heads that a rank attends to."""
        return self.heads // self.exchange

    @property
    def local_seq(self) -> int:
        """U n, tokens that a rank attends to at once."""
        return self.tokens * self.exchange

    @property
    def stat_dtype(self) -> str:
        """The type of a log-sum-exp, and of what blocks of a ring are merged in."""
        return "fp64" if self.dtype == "fp64" else "fp32"

    @property
    def block(self) -> tuple[int, int, int, int]:
        """Shape of queries, keys or values in attention: one sequence."""
        return 1, self.local_heads, self.local_seq, self.width


@dataclass(slots=True, eq=False)
class Kept:
    """What the backward needs of the forward; of attention its scores, or its output and log-sum-exp."""

    x: Tensor
    weights: list[Tensor]
    qkv: list[Tensor]
    c_: Tensor
    saved: tuple[Tensor, ...]


def ulysses_program(u: Ulysses, rank: int) -> list[Event]:
    """The whole program: inputs, forward, backward if it has one."""
    script = Script(module="ulysses", rank=rank, dtype=u.dtype, has_backward=u.has_backward)
    output, kept = ulysses_forward(u, script)
    grads = _backward(u, replace(script, phase="backward"), kept) if u.has_backward else []
    script.returns(kept.x, *kept.weights, output, *grads)
    return script.events


def ulysses_forward(u: Ulysses, s: Script) -> tuple[Tensor, Kept]:
    """From inputs to `output`, and what a backward needs; the inputs are among it."""
    n, d, e = u.tokens, u.hidden, u.width
    p, long = ("P", "N") if u.ring == 1 else ("U", "N/R")
    gathered = f"[h/{p}, {long}, d/h]"
    grid, heads = (u.exchange, u.local_heads, n, e), (u.local_heads, u.local_seq, e)

    x = s.new("input", n, d)
    weights = [s.new(name, u.heads, *((e, d) if name == "O" else (d, e)), is_weight=True) for name in WEIGHTS]
    symbols = ["[h, d, d/h]"] * 3 + ["[h, d/h, d]"]
    s.step("inputs", ("[N/P, d]", x), *zip(symbols, weights, strict=True))
    qkv = [
        s.matmul(name, (u.heads, n, e, d), (x, weight), saves=(x,) if name == "q" else ())
        for name, weight in zip("qkv", weights, strict=False)
    ]
    s.step("compute q, k, v", *(("[h, N/P, d/h]", each) for each in qkv))
    sent = [
        s.collective(name, "all_to_all", grid, "ulysses", u.exchange, each, f"{name}_")
        for name, each in zip("qkv", qkv, strict=True)
    ]
    s.step("all-to-all q, k, v", *((f"[{p}, h/{p}, N/P, d/h]", each) for each in sent))
    swapped = [
        _swap(s, f"{name} transpose", each, (u.local_heads, u.exchange, n, e))
        for name, each in zip("qkv", sent, strict=True)
    ]
    q_, k_, v_ = (each.view(f"{name}_", *heads) for name, each in zip("qkv", swapped, strict=True))
    s.step("transpose and reshape q_, k_, v_", *((gathered, each) for each in (q_, k_, v_)))
    attend = _flash_forward if u.is_flash else _scores_forward
    c, saved = attend(u, s, q_, k_, v_)
    s.step("c = attention of q_, k_, v_" if u.is_flash else "c = A x v_", (gathered, c.view("c", *heads)))
    c = _swap(s, "c transpose", c, (u.local_seq, u.local_heads, e))
    s.step("transpose c", (f"[{long}, h/{p}, d/h]", c.view("c", u.local_seq, u.local_heads, e)))
    blocks = (u.exchange, n, u.local_heads, e)
    back = s.collective("c", "all_to_all", blocks, "ulysses", u.exchange, c, "c_")
    s.step("all-to-all c", (f"[{p}, N/P, h/{p}, d/h]", back))
    c_ = _swap(s, "c_ transpose", back, (n, u.exchange, u.local_heads, e))
    shown = c_.view("c_", n, d), weights[3].view("O", d, d)
    s.step("transpose and reshape c_, reshape O", ("[N/P, d]", shown[0]), ("[d, d]", shown[1]))
    output = s.matmul("output", (1, n, d, d), (c_, weights[3]), saves=(c_,))
    s.step("output = c x O", ("[N/P, d]", output.view("output", n, d)))
    s.returns(*qkv, c, q_, k_, v_, c_, *(() if u.is_flash else saved))
    return output, Kept(x, weights, [q_, k_, v_], c_, saved)


def _backward(u: Ulysses, s: Script, kept: Kept) -> list[Tensor]:
    """From a gradient of `output` to those of the inputs, in the order in which autograd takes the nodes."""
    n, d, e = u.tokens, u.hidden, u.width
    grad = s.new("d output", n, d)
    d_out = s.matmul("output", (1, d, d, n), (kept.c_, grad), "dO")
    dc_ = s.matmul("output", (1, n, d, d), (grad, kept.weights[3]), "dc_")
    s.returns(kept.c_)
    dc = _exchange_back(u, s, "c", dc_, (u.exchange, n, u.local_heads, e))
    attend_back = _flash_backward if u.is_flash else _scores_backward
    dq_, dk_, dv_ = attend_back(u, s, dc, kept)
    shape = (u.exchange, u.local_heads, n, e)
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
    shown = d_weights[0].view("dQ", *shapes[0]), d_weights[3].view("dO", *shapes[3])
    s.step("backward", ("[N/P, d]", total.view("d input", n, d)), ("[h, d, d/h]", shown[0]),
           ("[h, d/h, d]", shown[1]))  # fmt: skip
    return [grad, total, *d_weights]


def _exchange_back(u: Ulysses, s: Script, name: str, grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The gradient `grad` undergoes transpose and all-to-all in reverse."""
    sent = _swap(s, name, grad, shape)
    arrived = s.collective(name, "all_to_all", shape, "ulysses", u.exchange, sent, f"{name} all-to-all")
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


# --- attention with the scores in memory ---------------------------------------------------------


def _scores_forward(
    u: Ulysses, s: Script, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mixed values, and the scores, which the backward needs."""
    matrix = (u.local_heads, u.local_seq, u.local_seq)
    scores = s.matmul("A", (*matrix, u.width), (q, k), saves=(q, k), saves_result=True)
    s.op("A", "kernel", matrix, reads=(scores,), writes=(scores,))
    p = "P" if u.ring == 1 else "U"
    s.step("A = q_ x k_t", (f"[h/{p}, N, N]", scores))
    return s.matmul("c", _thin(u), (scores, v), saves=(v,)), (scores,)


def _scores_backward(u: Ulysses, s: Script, grad: Tensor, kept: Kept) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; that of the scores is made in place."""
    (q, k, v), (scores,) = kept.qkv, kept.saved
    matrix = (u.local_heads, u.local_seq, u.local_seq)
    dv = s.matmul("c", _thin(u), (scores, grad), "dv_")
    d_scores = s.matmul("c", (*matrix, u.width), (grad, v), "dA")
    s.op("A", "kernel", matrix, reads=(d_scores, scores), writes=(d_scores,))
    dq = s.matmul("A", _thin(u), (d_scores, k), "dq_")
    dk = s.matmul("A", _thin(u), (d_scores, q), "dk_")
    s.returns(d_scores, q, k, scores)
    return dq, dk, dv


def _thin(u: Ulysses) -> tuple[int, int, int, int]:
    """The product of a matrix of scores with queries, keys or values."""
    return u.local_heads, u.local_seq, u.width, u.local_seq


# --- fused attention, alone or over a ring ------------------------------------------------------


def _flash_forward(
    u: Ulysses, s: Script, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The mixed values, which the backward needs too, with the log-sum-exp."""
    out, lse = _flash_block(u, s, q, k, v, is_own=True)
    is_widened = u.ring > 1 and u.stat_dtype != u.dtype
    total = s.kernel("attention", u.block, (out,), "total", dtype=u.stat_dtype) if is_widened else out
    for hop in range(1, u.ring):
        k, v = _pass_on(u, s, (k, v))
        if _sees(u, s.rank, hop):
            block, block_lse = _flash_block(u, s, q, k, v)
            reads, writes = (total, lse, block, block_lse), (total, lse)
            s.op("attention", "kernel", u.block, reads=reads, writes=writes, dtype=u.stat_dtype)
    s.returns(k, v)
    c = s.kernel("attention", u.block, (total,), "c") if is_widened else out
    s.returns(total, lse)
    return c, (c, lse)


def _flash_backward(u: Ulysses, s: Script, grad: Tensor, kept: Kept) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; those of the latter two travel with them around the ring."""
    q, k, v = kept.qkv
    dq, dk, dv = _flash_block_backward(u, s, (grad, q, k, v, *kept.saved), is_own=True)
    for hop in range(1, u.ring):
        k, v, dk, dv = _pass_on(u, s, (k, v, dk, dv))
        if _sees(u, s.rank, hop):
            parts = _flash_block_backward(u, s, (grad, q, k, v, *kept.saved))
            for total, part in zip((dq, dk, dv), parts, strict=True):
                s.op("attention", "kernel", u.block, reads=(total, part), writes=(total,))
            s.returns(*parts)
    if u.ring > 1:
        dk, dv = _pass_on(u, s, (dk, dv))
    s.returns(k, v, grad, *kept.qkv, *kept.saved)
    return dq, dk, dv


def _flash_block(
    u: Ulysses, s: Script, q: Tensor, k: Tensor, v: Tensor, *, is_own: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention of the own queries to one block of keys, of which the own block is saved."""
    out = Tensor("out", u.block, u.dtype)
    lse = Tensor("lse", u.block[:3], u.stat_dtype)
    shape, made = _block_shape(u), (out, lse)
    cost = flash_attention(_pairs(u, is_own), *shape[1:], batch=1, elem_bytes=1.0)
    saves = (q, k, v, *made) if is_own else ()
    s.op("attention", "attention", shape, reads=(q, k, v), makes=made, saves=saves, flop=cost.flop)
    return made


def _flash_block_backward(
    u: Ulysses, s: Script, reads: Sequence[Tensor], *, is_own: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    shape = _block_shape(u)
    cost = flash_attention_backward(_pairs(u, is_own), *shape[1:], batch=1, elem_bytes=1.0)
    dq, dk, dv = (Tensor(name, u.block, u.dtype) for name in ("dq", "dk", "dv"))
    s.op("attention", "attention", shape, reads=reads, makes=(dq, dk, dv), flop=cost.flop)
    return dq, dk, dv


def _block_shape(u: Ulysses) -> tuple[int, ...]:
    return (1, u.local_heads, u.local_heads, u.local_seq, u.local_seq, u.width, u.width)


def _pairs(u: Ulysses, is_own: bool) -> float:
    return float(attended_pairs(u.local_seq, u.local_seq, causal=u.is_causal and is_own))


def _sees(u: Ulysses, rank: int, hop: int) -> bool:
    """Whether a rank attends to the keys that come `hop` ranks from before it in the ring."""
    return not u.is_causal or hop <= rank // u.exchange


def _pass_on(u: Ulysses, s: Script, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors move one rank on: those of the rank before arrive in new memory, then the old ones go."""
    arrived = [s.new(tensor.name, *u.block) for tensor in tensors]
    for tensor in tensors:
        s.collective("attention", "send", u.block, "ring", u.ring, tensor)
    for tensor in arrived:
        s.collective("attention", "recv", u.block, "ring", u.ring, tensor)
    s.returns(*tensors)
    return arrived


# --- transposes ----------------------------------------------------------------------------------


def _swap(s: Script, op: str, tensor: Tensor, shape: tuple[int, ...], *, at: int = 0) -> Tensor:
    """`tensor` with dims `at` and `at + 1` swapped to `shape`: copied, unless one of them is 1."""
    return s.kernel(op, shape, (tensor,)) if min(shape[at : at + 2]) > 1 else tensor

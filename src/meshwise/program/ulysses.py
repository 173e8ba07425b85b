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

from collections.abc import Iterable
from dataclasses import dataclass

from meshwise.cost.op import attended_pairs, flash_attention, flash_attention_backward
from meshwise.program.tape import Tape
from meshwise.program.writer import Writer

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
    elem_bytes: int
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
    def stat_bytes(self) -> int:
        """Bytes of one log-sum-exp, and of an element while blocks of a ring are merged."""
        return max(4, self.elem_bytes)

    @property
    def is_widened(self) -> bool:
        """Whether merging a ring's blocks takes a wider type."""
        return self.stat_bytes > self.elem_bytes


def write_ulysses(u: Ulysses, tape: Tape) -> None:
    """The whole program: inputs, forward, backward if it has one."""
    write = Writer(tape=tape, module="ulysses", dtype=u.dtype, elem_bytes=u.elem_bytes)
    write.new("input", u.tokens, u.hidden)
    for name in WEIGHTS:
        write.new(name, u.hidden, u.hidden)
    _forward(u, write)
    if u.has_backward:
        _backward(u, write.in_phase("backward"))


def _forward(u: Ulysses, write: Writer) -> None:
    """From the inputs to `output`. What the program names lives until it returns."""
    n, d, e = u.tokens, u.hidden, u.width
    tokens, square, saves = n * d, d * d, float(u.has_backward)
    p, long = ("P", "N") if u.ring == 1 else ("U", "N/R")
    gathered = f"[h/{p}, {long}, d/h]"
    grid, heads = (u.exchange, u.local_heads, n, e), (u.local_heads, u.local_seq, e)

    projections = [(name, "[h, d, d/h]", (u.heads, d, e)) for name in "QKV"]
    write.step("inputs", ("input", "[N/P, d]", (n, d)), *projections, ("O", "[h, d/h, d]", (u.heads, e, d)))
    for name in "qkv":
        kept = saves * tokens if name == "q" else 0.0
        write.matmul(name, (u.heads, n, e, d), name, read=tokens + square, weight=square, saved=kept)
    write.step("compute q, k, v", *((name, "[h, N/P, d/h]", (u.heads, n, e)) for name in "qkv"))
    for name in "qkv":
        write.collective(name, "all_to_all", grid, "ulysses", u.exchange, out=f"{name}_")
    write.step("all-to-all q, k, v", *((f"{name}_", f"[{p}, h/{p}, N/P, d/h]", grid) for name in "qkv"))
    attended = [
        _swap(write, f"{name} transpose", f"{name}_", (u.local_heads, u.exchange, n, e)) for name in "qkv"
    ]
    write.step("transpose and reshape q_, k_, v_", *((f"{name}_", gathered, heads) for name in "qkv"))
    if u.is_flash:
        _flash_forward(u, write)
        write.step("c = attention of q_, k_, v_", ("c", gathered, heads))
    else:
        matrix = (u.local_heads, u.local_seq, u.local_seq)
        size = u.local_heads * u.local_seq**2
        write.matmul("A", (*matrix, e), "A", read=2 * tokens, saved=saves * (2 * tokens + size))
        write.kernel("A", matrix, read=size, written=size)
        write.step("A = q_ x k_t", ("A", f"[h/{p}, N, N]", matrix))
        shape = u.local_heads, u.local_seq, e, u.local_seq
        write.matmul("c", shape, "c", read=size + tokens, saved=saves * tokens)
        write.step("c = A x v_", ("c", gathered, heads))
    is_kept = u.is_flash and u.has_backward  # the fused backward needs its output
    c = _swap(write, "c transpose", "c", (u.local_seq, u.local_heads, e), keep=is_kept)
    write.step("transpose c", ("c", f"[{long}, h/{p}, d/h]", (u.local_seq, u.local_heads, e)))
    blocks = (u.exchange, n, u.local_heads, e)
    write.collective("c", "all_to_all", blocks, "ulysses", u.exchange, out="c_")
    write.step("all-to-all c", ("c_", f"[{p}, N/P, h/{p}, d/h]", blocks))
    c_ = _swap(write, "c_ transpose", "c_", (n, u.exchange, u.local_heads, e))
    write.step("transpose and reshape c_, reshape O", ("c_", "[N/P, d]", (n, d)), ("O", "[d, d]", (d, d)))
    write.matmul("output", (1, n, d, d), "output", read=tokens + square, weight=square, saved=saves * tokens)
    write.step("output = c x O", ("output", "[N/P, d]", (n, d)))

    write.free("q", "k", "v", *([] if is_kept and c == "c" else [c]))
    if not u.has_backward:
        write.free(*attended, c_, *([] if u.is_flash else ["A"]))


def _backward(u: Ulysses, write: Writer) -> None:
    """From a gradient of `output` to those of the inputs, in the order in which autograd takes the nodes."""
    n, d, e = u.tokens, u.hidden, u.width
    tokens, square = n * d, d * d
    names = [_swapped(f"{name}_", u.exchange, u.local_heads) for name in "qkv"]
    c_ = _swapped("c_", n, u.exchange)
    write.new("d output", n, d)
    write.matmul("output", (1, d, d, n), "dO", read=2 * tokens)
    write.matmul("output", (1, n, d, d), "dc_", read=tokens + square, weight=square)
    write.free(c_)
    _exchange_back(u, write, "c", "dc_", (u.exchange, n, u.local_heads, e))
    if u.is_flash:
        _flash_backward(u, write)
        write.free("c all-to-all", *names, "c", "lse")
    else:
        matrix = (u.local_heads, u.local_seq, u.local_seq)
        size = u.local_heads * u.local_seq**2
        thin = (u.local_heads, u.local_seq, e, u.local_seq)
        write.matmul("c", thin, "dv_", read=size + tokens)
        write.matmul("c", (*matrix, e), "dA", read=2 * tokens)
        write.free("c all-to-all", names[2])
        write.kernel("A", matrix, read=2 * size, written=size)
        write.matmul("A", thin, "dq_", read=size + tokens)
        write.matmul("A", thin, "dk_", read=size + tokens)
        write.free("dA", names[0], names[1], "A")
    for name in "vkq":
        _exchange_back(u, write, name, f"d{name}_", (u.exchange, u.local_heads, n, e))
    total = ""
    for name in "vkq":
        total = _project_back(u, write, name, total)
    for name in WEIGHTS:
        shape = (u.heads, e, d) if name == "O" else (u.heads, d, e)
        write.collective(name, "all_reduce", shape, "world", u.ranks)
    grads = ("dQ", "[h, d, d/h]", (u.heads, d, e)), ("dO", "[h, d/h, d]", (u.heads, e, d))
    write.step("backward", ("d input", "[N/P, d]", (n, d)), *grads)


def _exchange_back(u: Ulysses, write: Writer, name: str, grad: str, shape: tuple[int, int, int, int]) -> None:
    """The gradient `grad` undergoes transpose and all-to-all in reverse and becomes `<name> all-to-all`."""
    sent = _swap(write, name, grad, shape, keep=True)
    write.collective(name, "all_to_all", shape, "ulysses", u.exchange, out=f"{name} all-to-all")
    write.free(*{sent, grad})


def _project_back(u: Ulysses, write: Writer, name: str, total: str) -> str:
    """Backward of x W: dW, and dx as one matmul over all heads; dx is added to `total`."""
    n, d, e = u.tokens, u.hidden, u.width
    grad, dx = f"{name} all-to-all", f"dx {name}"
    write.matmul(name, (u.heads, d, e, n), f"d{name.upper()}", read=2 * n * d)
    rows = _swap(write, name, grad, (n, u.heads, e), keep=True)
    columns = _swap(write, name, name.upper(), (u.heads, e, d), keep=True, at=1, weight=True)
    in_place = columns == name.upper()
    write.matmul(name, (1, n, d, d), dx, read=n * d + d * d, weight=d * d * in_place)
    write.free(*{rows, grad}, *([] if in_place else [columns]))
    if not total:
        return dx
    summed = f"{total} + {dx}"
    write.kernel(name, (n, d), out=summed, read=2 * n * d, written=n * d)
    write.free(total, dx)
    return summed


# --- fused attention, alone or over a ring ------------------------------------------------------


def _flash_forward(u: Ulysses, write: Writer) -> None:
    """Makes `c`, and `lse` where a backward follows."""
    block = (1, u.local_heads, u.local_seq, u.width)
    size = u.local_heads * u.local_seq * u.width
    wide = u.stat_bytes / u.elem_bytes  # elements of the wider type
    stats = u.local_heads * u.local_seq * wide
    wide_dtype = "fp64" if u.stat_bytes == 8 else "fp32"
    saved = (4 * size + stats) * u.elem_bytes if u.has_backward else 0.0
    out = "c block" if u.ring > 1 and u.is_widened else "c"
    _flash_block(u, write, out, "lse", is_own=True, saved_bytes=saved)
    total = out
    if out != "c":
        total = "c total"
        write.tape.allocate(total, size * u.stat_bytes)
        write.kernel("attention", block, read=size, written=size * wide, dtype=wide_dtype)
        write.free(out)
    for hop in range(1, u.ring):
        _pass_on(u, write, hop, "kv")
        if _sees(u, write.tape.rank, hop):
            _flash_block(u, write, "block", "block lse")
            merged = size * wide + stats
            write.kernel("attention", block, read=merged + size + stats, written=merged, dtype=wide_dtype)
            write.free("block", "block lse")
    if u.ring > 1:
        write.free(*(f"{name} hop {u.ring - 1}" for name in "kv"))
    if total != "c":
        write.kernel("attention", block, out="c", read=size * wide, written=size)
        write.free(total)
    if not u.has_backward:
        write.free("lse")


def _flash_backward(u: Ulysses, write: Writer) -> None:
    """Makes `dq_`, `dk_`, `dv_`; those of keys and values travel with them around the ring."""
    block = (1, u.local_heads, u.local_seq, u.width)
    size = u.local_heads * u.local_seq * u.width
    grads = ("dq_", "dk_", "dv_") if u.ring == 1 else ("dq_", "dk hop 0", "dv hop 0")
    _flash_block_backward(u, write, grads, is_own=True)
    for hop in range(1, u.ring):
        _pass_on(u, write, hop, ("k", "v", "dk", "dv"))
        if _sees(u, write.tape.rank, hop):
            parts = ("part q", "part k", "part v")
            _flash_block_backward(u, write, parts)
            for _ in parts:
                write.kernel("attention", block, read=2 * size, written=size)
            write.free(*parts)
    if u.ring > 1:
        last = u.ring - 1
        _pass_on(u, write, u.ring, ("dk", "dv"))
        write.free(*(f"{name} hop {last}" for name in "kv"))
        for name in ("dk", "dv"):
            write.rename(f"{name} hop {u.ring}", f"{name}_")


def _flash_block(
    u: Ulysses, write: Writer, out: str, lse: str, *, is_own: bool = False, saved_bytes: float = 0.0
) -> None:
    shape, pairs = _block_shape(u), _pairs(u, is_own)
    size = u.local_heads * u.local_seq * u.width
    stats = u.local_heads * u.local_seq * u.stat_bytes / u.elem_bytes
    cost = flash_attention(pairs, *shape[1:], batch=1, elem_bytes=u.elem_bytes)
    write.new(out, size)
    write.tape.allocate(lse, stats * u.elem_bytes)
    flop = float(cost.flop)
    write.kernel("attention", shape, read=3 * size, written=size + stats, flop=flop, saved_bytes=saved_bytes)


def _flash_block_backward(
    u: Ulysses, write: Writer, grads: tuple[str, str, str], *, is_own: bool = False
) -> None:
    shape, pairs = _block_shape(u), _pairs(u, is_own)
    size = u.local_heads * u.local_seq * u.width
    stats = u.local_heads * u.local_seq * u.stat_bytes / u.elem_bytes
    cost = flash_attention_backward(pairs, *shape[1:], batch=1, elem_bytes=u.elem_bytes)
    for name in grads:
        write.new(name, size)
    write.kernel("attention", shape, read=5 * size + stats, written=3 * size, flop=float(cost.flop))


def _block_shape(u: Ulysses) -> tuple[int, ...]:
    return (1, u.local_heads, u.local_heads, u.local_seq, u.local_seq, u.width, u.width)


def _pairs(u: Ulysses, is_own: bool) -> float:
    return float(attended_pairs(u.local_seq, u.local_seq, causal=u.is_causal and is_own))


def _sees(u: Ulysses, rank: int, hop: int) -> bool:
    """Whether a rank attends to the keys that come `hop` ranks from before it in the ring."""
    return not u.is_causal or hop <= rank // u.exchange


def _pass_on(u: Ulysses, write: Writer, hop: int, names: Iterable[str]) -> None:
    """Tensors move one rank on: new ones come, then the last hop's go (q_, k_, v_ stay)."""
    names = tuple(names)
    block = (1, u.local_heads, u.local_seq, u.width)
    for name in names:
        write.new(f"{name} hop {hop}", *block)
    for kind in ("send", "recv"):
        for _ in names:
            write.collective("attention", kind, block, "ring", u.ring)
    write.free(*(f"{name} hop {hop - 1}" for name in names if hop > 1 or name.startswith("d")))


# --- transposes ----------------------------------------------------------------------------------


def _swap(
    write: Writer,
    op: str,
    name: str,
    shape: tuple[int, ...],
    *,
    keep: bool = False,
    at: int = 0,
    weight: bool = False,
) -> str:
    """Tensor `name`, dims `at` and `at + 1` swapped to `shape`: copied, unless one of them is 1. Its name."""
    result = _swapped(name, shape[at], shape[at + 1])
    if result != name:
        write.copy(op, shape, result, weight=weight)
        if not keep:
            write.free(name)
    return result


def _swapped(name: str, one: int, other: int) -> str:
    return f"{name} swapped" if one > 1 and other > 1 else name

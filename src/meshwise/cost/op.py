"""What one op of a transformer costs one rank: FLOP, bytes moved, bytes kept for the backward.

A `Cost` is work, not time: it knows no machine. Costs add. Two kinds of op cover a transformer.

*Matmuls*: C[m,n] = A[m,k] B[k,n] is 2mnk FLOP; each operand is read once and C written once. The
backward of a linear layer is two matmuls of the same FLOP: dA = dC B' and dB = A' dC.

*Element-wise kernels* (norms, activations, dropout, softmax, residual adds) are rows of one table
(`catalog/kernels.toml`): FLOP per element, tensors read and written forward and backward, and what they keep.
They are bound by memory on every chip, so their FLOP matter little; the bytes matter.

All arguments may be arrays that broadcast. Bytes are float64, like everything here.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from meshwise.core.files import read_catalog
from meshwise.core.numbers import larger
from meshwise.core.units import Num


class Cost(Struct, frozen=True, eq=False, gc=False):
    """Work one rank does for one op. Costs add; they hold no time and know no machine."""

    flop: Num = 0.0
    read_bytes: Num = 0.0
    write_bytes: Num = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flop + other.flop, self.read_bytes + other.read_bytes, self.write_bytes + other.write_bytes
        )

    def __mul__(self, times: Num) -> Cost:
        return Cost(self.flop * times, self.read_bytes * times, self.write_bytes * times)


def matmul_flop(m: Num, n: Num, k: Num, *, batch: Num = 1.0) -> Num:
    """FLOP of `batch` products C[m,n] = A[m,k] B[k,n]: k multiplications and k additions an element."""
    return 2.0 * batch * m * n * k


def matmul(
    m: Num, n: Num, k: Num, *, elem_bytes: Num, out_bytes: Num | None = None, batch: Num = 1.0
) -> Cost:
    """Cost of `batch` products C[m,n] = A[m,k] B[k,n]: each operand read once, C written once.

    `elem_bytes` is the size of an element of A and B, `out_bytes` of C (None: the same).
    """
    written_bytes = elem_bytes if out_bytes is None else out_bytes
    return Cost(
        matmul_flop(m, n, k, batch=batch),
        batch * elem_bytes * (m * k + k * n),
        batch * written_bytes * (m * n),
    )


def attended_pairs(seq_q: Num, seq_k: Num, *, causal: bool, window: int = 0) -> Num:
    """Query-key pairs that attention computes: all, or under a causal mask those a query may see.

    Kernels skip the masked half in tiles; the pairs inside the diagonal tiles are not counted, so a
    square causal attention costs half. Query i of the last `seq_q` of `seq_k` tokens sees
    seq_k - seq_q + i + 1 keys. With a `window`, a query sees at most so many (counted as if each did), or,
    without a causal mask, so many in both directions.
    """
    pairs = seq_q * (seq_k - 0.5 * seq_q) if causal else seq_q * seq_k
    if not window:
        return pairs
    first, last = larger(seq_k - seq_q - window, 0.0), larger(seq_k - window, 0.0)
    return pairs - (1.0 if causal else 2.0) * (0.5 * (last * last - first * first))


def flash_attention(
    pairs: Num, heads: Num, kv_heads: Num, seq_q: Num, seq_k: Num, qk_dim: Num, v_dim: Num, *, batch: Num,
    elem_bytes: Num,
) -> Cost:  # fmt: skip
    """Forward of fused attention: scores and mix over `pairs` query-key pairs; scores never leave the chip.

    Reads Q, K, V, writes O and one fp32 log-sum-exp per query and head. FLOP are the two matmuls'.
    Source: FlashAttention-2, arXiv 2307.08691.
    """
    read = elem_bytes * batch * (heads * seq_q * qk_dim + kv_heads * seq_k * (qk_dim + v_dim))
    write = batch * heads * seq_q * (elem_bytes * v_dim + 4.0)
    return Cost(2.0 * batch * heads * pairs * (qk_dim + v_dim), read, write)


def flash_attention_backward(
    pairs: Num, heads: Num, kv_heads: Num, seq_q: Num, seq_k: Num, qk_dim: Num, v_dim: Num, *, batch: Num,
    elem_bytes: Num,
) -> Cost:  # fmt: skip
    """Backward of fused attention: five matmuls (scores again, dV, dP, dQ, dK) over `pairs`.

    Reads Q, K, V, O, dO and the log-sum-exp; writes dQ, dK, dV. Source: as the forward.
    """
    queries, keys = heads * seq_q, kv_heads * seq_k
    read = batch * (elem_bytes * (queries * (qk_dim + 2.0 * v_dim) + keys * (qk_dim + v_dim)) + 4.0 * queries)
    write = batch * elem_bytes * (queries * qk_dim + keys * (qk_dim + v_dim))
    return Cost(2.0 * batch * heads * pairs * (3.0 * qk_dim + 2.0 * v_dim), read, write)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """An element-wise kernel, per element of its output: FLOP, and full-size tensors moved and kept.

    It `keeps` its "inputs", its "output" or neither (""); one that is not fused `saved` tensors in all.
    `mask_bytes` are bytes per element that the forward writes and the backward reads beside the
    tensors (dropout's mask); they are kept. `row_bytes` are kept per row: statistics in fp32, or in fp64
    where the elements are. `launches`: kernels of the GPU that it is.
    """

    flop: float
    backward_flop: float
    reads: float = 1.0
    writes: float = 1.0
    backward_reads: float = 1.0
    backward_writes: float = 1.0
    keeps: str = ""
    saved: float = 0.0
    mask_bytes: float = 0.0
    row_bytes: float = 0.0
    launches: float = 1.0
    backward_launches: float = 1.0

    def forward(self, rows: Num, width: Num, *, elem_bytes: float) -> Cost:
        """Cost on `rows` x `width` elements, forward."""
        size = rows * width
        return Cost(
            self.flop * size,
            self.reads * elem_bytes * size,
            (self.writes * elem_bytes + self.mask_bytes) * size + self.statistics_bytes(rows, elem_bytes),
        )

    def backward(self, rows: Num, width: Num, *, elem_bytes: float) -> Cost:
        """Cost on `rows` x `width` elements, backward."""
        size = rows * width
        return Cost(
            self.backward_flop * size,
            (self.backward_reads * elem_bytes + self.mask_bytes) * size
            + self.statistics_bytes(rows, elem_bytes),
            self.backward_writes * elem_bytes * size,
        )

    def saved_bytes(self, rows: Num, width: Num, *, elem_bytes: float) -> Num:
        """Bytes the forward keeps for the backward."""
        saved = {"": self.saved, "inputs": self.reads, "output": self.writes}[self.keeps]
        kept = (saved * elem_bytes + self.mask_bytes) * (rows * width)
        return kept + self.statistics_bytes(rows, elem_bytes)

    def statistics_bytes(self, rows: Num, elem_bytes: float) -> Num:
        """Bytes of the statistics of `rows` rows of elements of `elem_bytes`."""
        return self.row_bytes * rows * max(elem_bytes / 4.0, 1.0)


_KERNELS = read_catalog("kernels.toml")
KERNELS = {name: Kernel(**entry) for name, entry in _KERNELS["fused"].items()}
EAGER_KERNELS = {name: Kernel(**entry) for name, entry in _KERNELS["eager"].items()}
"""Kernels that are not fused: where they differ from `KERNELS`."""


def embedding(rows: Num, width: Num, *, elem_bytes: Num) -> Cost:
    """Look-up of `rows` rows of a table: each read and written once (and the int64 index)."""
    return Cost(0.0, rows * (width * elem_bytes + 8.0), rows * width * elem_bytes)


def embedding_backward(rows: Num, width: Num, *, elem_bytes: Num) -> Cost:
    """Gradient of a look-up: each row of dY added to its row of the table's gradient."""
    return Cost(rows * width, rows * (2.0 * width * elem_bytes + 8.0), rows * width * elem_bytes)

"""The block of the NERSC paper (convention `nersc-2024-10`): ops of its strategies 1d, 2d and 2d-seqp.

One transformer layer on one rank of an m1 x m2 grid, in two tables, `mlp` and `sa` (self attention, with
a layer norm each). Every op states the same six things: FLOP and traffic forward and backward, what it
keeps for the backward, its weights; and what it communicates. The strategies:

- `1d`: columns, then rows of the weights over m1 = tp; norms and dropout on 1/m1 of the sequence.
- `2d-seqp`: the same over m1, on 1/m2 of the sequence; keys and values are gathered over m2.
- `2d`: every linear is a SUMMA product of blocks: m1 cuts columns, m2 the sequence and the rows of the
  weights; the panels of the inputs are broadcast in steps (`panels`). Attention as in `2d-seqp`, or by
  SUMMA too.

The rules of the paper's code, reproduced with their errors: a dot of length k is 2k - 1 FLOP (2k in SUMMA);
biases are ops of their own, qkv has none; what is left over in a division is dropped; the 2d norm is
seq / m1 wide where it should be hidden / m1; the 1d biases behind fc2 and vproj run on all rows; the gradient
of a gather is labelled a reduce-scatter; inputs of fc1 and qkv are kept whole.

Sources: S. Subramanian et al., arXiv 2410.00273; ShashankSubramanian/transformer-perf-estimates at 54278b0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwise.core.ledger import Collective
from meshwise.core.units import Num
from meshwise.cost.op import matmul_flop
from meshwise.published.nersc.tables import NERSC_TABLES

ELEM_BYTES = 2.0
MASK_BYTES = 1.0


def product_flop(m: Num, n: Num, k: Num, batch: Num = 1.0) -> Num:
    """FLOP of a product whose dots of length k take k multiplications and k - 1 additions."""
    return matmul_flop(m, n, k, batch=batch) - batch * m * n


@dataclass(frozen=True, slots=True)
class Comm:
    """A communication over the axis `tp1` (m1 ranks) or `tp2` (m2 ranks); empty: a rank with itself.

    `volume_bytes` is the full tensor, as it counts where the axis has more than one rank.
    """

    kind: Collective
    axis: str
    volume_bytes: Num


Comms = tuple[Comm, ...]
_NOTHING: Comms = (Comm("reduce_scatter", "", 0.0),)


@dataclass(frozen=True, slots=True)
class Direction:
    """What an op does in one direction; `vector_flop` are done by the vector units inside a matmul op."""

    flop: Num
    traffic_bytes: Num
    comms: Comms = ()
    vector_flop: Num = 0.0


@dataclass(frozen=True, slots=True)
class PaperOp:
    """A row of the paper's tables, for one microbatch.

    `panels`: communication in so many steps, overlapped with the compute (SUMMA).
    `recompute`: the backward does the forward again.
    """

    name: str
    forward: Direction
    backward: Direction
    saved_bytes: Num = 0.0
    weight_bytes: Num = 0.0
    matmul: bool = False
    panels: Num | None = None
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCut:
    """Sizes of one layer and one microbatch, and the m1 x m2 grid that cuts them (1d: m2 = 1).

    `strategy`: 1d, 2d or 2d-seqp. `attention`: one `fused` kernel, `separate` ops, or (2d only) separate ops
    by `summa`. `recompute`: separate ops keep no scores and redo them in the backward.
    """

    strategy: str
    microbatch: Num
    seq: Num
    hidden: Num
    ffn: Num
    heads: Num
    m1: Num = 1.0
    m2: Num = 1.0
    panels: Num = 4.0
    attention: str = "fused"
    recompute: bool = False
    elem_bytes: Num = ELEM_BYTES
    mask_bytes: Num = MASK_BYTES

    @property
    def local_seq(self) -> Num:
        """Tokens of a sequence on one rank."""
        return self.seq // self.m2

    @property
    def rows(self) -> Num:
        """Tokens of the microbatch on one rank."""
        return self.microbatch * self.local_seq

    @property
    def shard_rows(self) -> Num:
        """Tokens on one rank where m1 cuts the sequence too (not in 2d, where it cuts the width)."""
        return self.rows if self.strategy == "2d" else self.microbatch * (self.local_seq // self.m1)

    @property
    def shard_width(self) -> Num:
        """Width of an activation between two linear layers on one rank."""
        return self.hidden // self.m1 if self.strategy == "2d" else self.hidden


def layer(cut: PaperCut) -> dict[str, list[PaperOp]]:
    """The tables `mlp` and `sa` of one layer."""
    rows, width = cut.rows, cut.ffn // cut.m1
    fc2_bias_rows = cut.shard_rows if cut.strategy == "2d-seqp" else rows
    vproj_bias_width = cut.hidden if cut.strategy == "1d" else cut.hidden // cut.m1
    return {
        "mlp": [
            _linear("fc1", cut, cut.hidden, cut.ffn),
            _kernel("fc1-bias", "bias", cut, rows, width),
            _kernel("act1", "gelu", cut, rows, width),
            _kernel("dpr1", "dropout", cut, rows, width),
            _linear("fc2", cut, cut.ffn, cut.hidden, by_rows=True),
            _kernel("fc2-bias", "bias", cut, fc2_bias_rows, cut.shard_width),
            _kernel("dpr2", "dropout", cut, cut.shard_rows, cut.shard_width),
            _norm("ln1", cut),
        ],
        "sa": [
            _linear("qkv", cut, cut.hidden, 3.0 * cut.hidden),
            *_attention(cut),
            _linear("vproj", cut, cut.hidden, cut.hidden, by_rows=True),
            _kernel("vproj-bias", "bias", cut, rows, vproj_bias_width),
            _kernel("dpr_v", "dropout", cut, cut.shard_rows, cut.shard_width),
            _norm("ln2", cut),
        ],
    }


# --- Products: C[m,n] = A[m,k] B[k,n] -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Product:
    """`batch` products on one rank."""

    m: Num
    n: Num
    k: Num
    batch: Num = 1.0

    @property
    def sizes(self) -> tuple[Num, Num, Num]:
        """Elements of A, B and C."""
        m, n, k = self.batch * self.m, self.n, self.k
        return m * k, self.batch * k * n, m * n

    @property
    def flop(self) -> Num:
        return product_flop(self.m, self.n, self.k, batch=self.batch)

    @property
    def backward_flop(self) -> Num:
        """FLOP of both products of the backward, dA = dC B' and dB = A' dC."""
        to_a = product_flop(self.m, self.k, self.n, batch=self.batch)
        return to_a + product_flop(self.k, self.n, self.m, batch=self.batch)


def _linear(name: str, cut: PaperCut, d_in: Num, d_out: Num, *, by_rows: bool = False) -> PaperOp:
    """A weight cut in columns (the gradient of the input is summed over m1), or `by_rows` (the output is)."""
    s, m1 = cut.elem_bytes, cut.m1
    if cut.strategy == "2d":
        product = _Product(cut.rows, d_out // m1, d_in)
        x, w, y = (s * size for size in product.sizes)
        flop, weight_bytes = matmul_flop(cut.rows, product.n, d_in), s * (d_in // cut.m2) * product.n
        op = _summa_op(name, cut, product, flop, (x, w, y), _summa_comms(x, w))
        return replace(op, saved_bytes=s * cut.rows * (d_in // m1), weight_bytes=weight_bytes)
    product = _Product(cut.rows, d_out, d_in // m1) if by_rows else _Product(cut.rows, d_out // m1, d_in)
    x, w, y = (s * size for size in product.sizes)
    summed: Comms = (Comm("reduce_scatter", "tp1", s * cut.rows * cut.hidden),)
    forward = Direction(product.flop, x + w + y, summed if by_rows else _NOTHING)
    backward = Direction(product.backward_flop, 2.0 * (x + w + y), _NOTHING if by_rows else summed)
    return PaperOp(name, forward, backward, saved_bytes=x, weight_bytes=w, matmul=True)


def _summa_op(
    name: str, cut: PaperCut, product: _Product, flop: Num, moved: Sequence[Num], comms: tuple[Comms, Comms]
) -> PaperOp:
    """A product in panels: bytes of its blocks A, B, C are `moved`, the last once a panel."""
    traffic = moved[0] + moved[1] + moved[2] * cut.panels
    forward, backward = Direction(flop, traffic, comms[0]), product.backward_flop
    return PaperOp(
        name, forward, Direction(backward, 2.0 * traffic, comms[1]), matmul=True, panels=cut.panels
    )


def _summa_comms(along_rows: Num, along_columns: Num, *, transposed: bool = False) -> tuple[Comms, Comms]:
    """What C = A B sends, forward and backward: A travels in rows of the grid (m1 ranks), B in columns (m2).

    `transposed`: of C = A B', where C is summed in rows.
    """
    send_row, sum_row = Comm("broadcast", "tp1", along_rows), Comm("reduce", "tp1", along_rows)
    send_column, sum_column = Comm("broadcast", "tp2", along_columns), Comm("reduce", "tp2", along_columns)
    if transposed:
        return (send_column, sum_row), (send_row, send_column, send_row, sum_column)
    return (send_row, send_column), (send_column, sum_row, send_row, sum_column)


def _attention(cut: PaperCut) -> list[PaperOp]:
    """From queries, keys and values to their mixture; SUMMA cuts the width of heads by m1, else heads are."""
    summa, head_dim = cut.attention == "summa", cut.hidden // cut.heads
    dim = head_dim // cut.m1 if summa else head_dim
    heads = cut.microbatch * (cut.heads if summa else cut.heads // cut.m1)
    rows = heads * cut.local_seq
    logits = _Product(cut.local_seq, cut.seq, dim, heads)
    attend = _Product(cut.local_seq, dim, cut.seq, heads)
    query, key, score = (cut.elem_bytes * size for size in logits.sizes)
    if cut.attention == "fused":
        return [_fused(cut, logits, attend)]
    if summa:
        attend_flop, moved = matmul_flop(attend.m, attend.n, attend.k, batch=heads), (score, key, query)
        comms = _summa_comms(score, key, transposed=True)
        first = _summa_op("logits", cut, logits, logits.flop, moved, comms)
        last = _summa_op("attend", cut, attend, attend_flop, moved, _summa_comms(score, key))
        softmax_comm: Comms = (Comm("all_reduce", "tp1", cut.elem_bytes * rows),) * 2
        width, redone = cut.seq // cut.m1, False
    else:
        traffic, backward_traffic = query + key + score, 3.0 * query + key + 2.0 * score
        gather, backward_gather = _gather(cut, key)
        first, last = (
            PaperOp(name, Direction(product.flop, traffic, gather), backward, matmul=True)
            for name, product in (("logits", logits), ("attend", attend))
            for backward in (Direction(product.backward_flop, backward_traffic, backward_gather),)
        )
        softmax_comm, width, redone = (), cut.seq, cut.recompute
    kept_scores = 0.0 if redone else cut.elem_bytes * rows * width
    return [
        replace(first, saved_bytes=2.0 * query, recompute=redone),
        _kernel("softmax", "softmax", cut, rows, width, comms=softmax_comm, recompute=cut.recompute),
        _kernel("dpr_at", "dropout", cut, rows, width, recompute=redone),
        replace(last, saved_bytes=kept_scores + query),
    ]


def _fused(cut: PaperCut, logits: _Product, attend: _Product) -> PaperOp:
    """One kernel, whose backward computes the scores again; softmax and dropout run on the vector units."""
    query, key, score = (cut.elem_bytes * size for size in logits.sizes)
    rows, num_scores = logits.batch * logits.m, score / cut.elem_bytes
    gather, backward_gather = _gather(cut, 2.0 * key)
    moved, backward_moved = 2.0 * (query + key), 6.0 * query + 2.0 * key
    row_bytes, flop = cut.elem_bytes * rows, logits.backward_flop + attend.backward_flop + logits.flop
    forward = Direction(logits.flop + attend.flop, moved + row_bytes, gather, 4.0 * num_scores - rows)
    backward_moved = backward_moved + 2.0 * row_bytes
    backward = Direction(flop, backward_moved, backward_gather, 9.0 * num_scores - 2.0 * rows)
    return PaperOp("fusedla", forward, backward, saved_bytes=4.0 * query + 2.0 * row_bytes, matmul=True)


def _gather(cut: PaperCut, volume_bytes: Num) -> tuple[Comms, Comms]:
    """Keys and values are gathered over m2; backward again, and their gradients are scattered."""
    if cut.strategy == "1d":
        return (), ()
    gather = Comm("all_gather", "tp2", volume_bytes)
    return (gather,), (gather, Comm("reduce_scatter", "tp2", volume_bytes))


# --- Element-wise kernels on rows x width elements ----------------------------------------------------


def _kernel(
    name: str, kind: str, cut: PaperCut, rows: Num, width: Num, *, comms: Comms = (), recompute: bool = False
) -> PaperOp:
    """One kernel; `comms`: one forward and one backward. Dropout reads, writes and keeps a mask too."""
    of = NERSC_TABLES["paper"]["kernels"][kind]
    s, mask_bytes = cut.elem_bytes, cut.mask_bytes * rows * width if kind == "dropout" else 0.0

    def total(what: str) -> Num:
        of_elements, of_rows, of_width = of[what]
        return of_elements * rows * width + of_rows * rows + of_width * width

    forward = Direction(total("flop"), s * total("moved") + mask_bytes, comms[:1])
    backward = Direction(total("backward_flop"), s * total("backward_moved") + mask_bytes, comms[1:])
    saved_bytes = 0.0 if recompute else of["kept"] * s * rows * width + mask_bytes
    weight_bytes = of["weights"] * s * width
    return PaperOp(name, forward, backward, saved_bytes, weight_bytes, recompute=recompute)


def _norm(name: str, cut: PaperCut) -> PaperOp:
    """Gathers over m1; in 2d it sums means and deviations there, `seq // m1` wide (the paper's error)."""
    if cut.strategy == "2d":
        sums = 2.0 * cut.hidden // cut.m1 + 2.0 * cut.microbatch * cut.seq // cut.m2
        both: list[tuple[Collective, Num]] = [("all_reduce", 2.0 * cut.rows), ("all_reduce", sums)]
    else:
        size = cut.rows * cut.hidden
        both = [("all_gather", size), ("reduce_scatter", size)]
    comms = tuple(Comm(kind, "tp1", cut.elem_bytes * size) for kind, size in both)
    width = cut.seq // cut.m1 if cut.strategy == "2d" else cut.hidden
    return _kernel(name, "layernorm", cut, cut.shard_rows, width, comms=comms)

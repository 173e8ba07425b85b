"""The block of the NERSC paper (convention `nersc-2024-10`): ops of its strategies 1d, 2d and 2d-seqp.

One transformer layer on one rank of an m1 x m2 grid, in two tables, `mlp` and `sa` (self attention, with
a layer norm each). Every op states the same six things: FLOP and traffic forward and backward, what it
keeps for the backward, its weights; and what it communicates. The strategies:

- `1d`: columns, then rows of the weights over m1 = tp; norms and dropout on 1/m1 of the sequence.
- `2d-seqp`: the same over m1, on 1/m2 of the sequence; keys and values are gathered over m2.
- `2d`: every linear is a SUMMA product of blocks: m1 cuts columns, m2 the sequence and the rows of the
  weights; the panels of the inputs are broadcast in steps (`panels`). Attention as in `2d-seqp`, or by
  SUMMA too.

The paper's rules, kept as they are, right or wrong: a dot of length k is 2k - 1 FLOP (2k in SUMMA);
biases are ops of their own, qkv has none; what is left over in a division is dropped; the 2d norm is
seq / m1 wide where hidden / m1 is meant; the 1d biases behind fc2 and vproj run on all rows; the gradient
of a gather is labelled a reduce-scatter; inputs of fc1 and qkv are kept whole.

Sources: S. Subramanian et al., arXiv 2410.00273; ShashankSubramanian/transformer-perf-estimates at 54278b0.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.core.ledger import Collective
from meshwise.core.units import Num
from meshwise.cost.op import matmul_flop
from meshwise.published.nersc_2024_02_ops import ELEM_BYTES, MASK_BYTES, product_flop

STRATEGIES = ("1d", "2d", "2d-seqp")
ATTENTION = ("fused", "separate", "summa")


@dataclass(frozen=True, slots=True)
class Comm:
    """A communication over the axis `tp1` (m1 ranks) or `tp2` (m2 ranks); empty: a rank with itself.

    `volume_bytes` is the full tensor, as it counts where the axis has more than one rank.
    """

    kind: Collective
    axis: str
    volume_bytes: Num


_NOTHING = Comm("reduce_scatter", "", 0.0)


@dataclass(frozen=True, slots=True)
class Work:
    """What an op does in one direction.

    `vector_flop` are FLOP that the vector units do inside a matmul op.
    """

    flop: Num
    traffic_bytes: Num
    comms: tuple[Comm, ...] = ()
    vector_flop: Num = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperOp:
    """A row of the paper's tables, for one microbatch.

    `panels`: communication in so many steps, overlapped with the compute (SUMMA).
    `recompute`: the backward does the forward again.
    """

    name: str
    forward: Work
    backward: Work
    saved_bytes: Num = 0.0
    weight_bytes: Num = 0.0
    matmul: bool = False
    panels: Num | None = None
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCut:
    """Sizes of one layer and one microbatch, and the m1 x m2 grid that cuts them (1d: m2 = 1).

    `attention`: one fused kernel, separate ops, or (2d only) separate ops by SUMMA. `recompute`: separate
    ops keep no scores and redo them in the backward.
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
        """Tokens on one rank where m1 cuts the sequence too."""
        return self.microbatch * (self.local_seq // self.m1)

    @property
    def head_dim(self) -> Num:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def local_heads(self) -> Num:
        """Heads of the microbatch on one rank."""
        return self.microbatch * (self.heads // self.m1)


def layer(cut: PaperCut) -> dict[str, list[PaperOp]]:
    """The tables `mlp` and `sa` of one layer."""
    if cut.strategy == "2d":
        return {"mlp": _mlp_summa(cut), "sa": _attention_summa(cut)}
    return {"mlp": _mlp_columns(cut), "sa": _attention_columns(cut)}


def _mlp_columns(cut: PaperCut) -> list[PaperOp]:
    width = cut.ffn // cut.m1
    fc2_rows = cut.rows if cut.strategy == "1d" else cut.shard_rows
    return [
        _linear_in("fc1", cut, cut.ffn),
        _bias("fc1-bias", cut, cut.rows, width),
        _gelu("act1", cut, cut.rows * width),
        _dropout("dpr1", cut, cut.rows * width),
        _linear_out("fc2", cut, cut.ffn),
        _bias("fc2-bias", cut, fc2_rows, cut.hidden),
        _dropout("dpr2", cut, cut.shard_rows * cut.hidden),
        _norm_columns("ln1", cut),
    ]


def _attention_columns(cut: PaperCut) -> list[PaperOp]:
    bias_width = cut.hidden if cut.strategy == "1d" else cut.hidden // cut.m1
    return [
        _linear_in("qkv", cut, 3.0 * cut.hidden),
        *_scores(cut),
        _linear_out("vproj", cut, cut.hidden),
        _bias("vproj-bias", cut, cut.rows, bias_width),
        _dropout("dpr_v", cut, cut.shard_rows * cut.hidden),
        _norm_columns("ln2", cut),
    ]


def _mlp_summa(cut: PaperCut) -> list[PaperOp]:
    ffn_width, width = cut.ffn // cut.m1, cut.hidden // cut.m1
    return [
        _summa("fc1", cut, cut.hidden, cut.ffn),
        _bias("fc1-bias", cut, cut.rows, ffn_width),
        _gelu("act1", cut, cut.rows * ffn_width),
        _dropout("dpr1", cut, cut.rows * ffn_width),
        _summa("fc2", cut, cut.ffn, cut.hidden),
        _bias("fc2-bias", cut, cut.rows, width),
        _dropout("dpr2", cut, cut.rows * width),
        _norm_summa("ln1", cut),
    ]


def _attention_summa(cut: PaperCut) -> list[PaperOp]:
    width = cut.hidden // cut.m1
    return [
        _summa("qkv", cut, cut.hidden, 3.0 * cut.hidden),
        *(_scores_summa(cut) if cut.attention == "summa" else _scores(cut)),
        _summa("vproj", cut, cut.hidden, cut.hidden),
        _bias("vproj-bias", cut, cut.rows, width),
        _dropout("dpr_v", cut, cut.rows * width),
        _norm_summa("ln2", cut),
    ]


# --- Linear layers ----------------------------------------------------------------------------------


def _linear_in(name: str, cut: PaperCut, d_out: Num) -> PaperOp:
    """From the hidden width to columns: the gradient of the input is summed over m1."""
    enter = Comm("reduce_scatter", "tp1", cut.elem_bytes * cut.rows * cut.hidden)
    return _linear(name, cut, cut.hidden, d_out // cut.m1, leave=_NOTHING, enter=enter)


def _linear_out(name: str, cut: PaperCut, d_in: Num) -> PaperOp:
    """From rows back to the hidden width: the output is summed over m1."""
    leave = Comm("reduce_scatter", "tp1", cut.elem_bytes * cut.rows * cut.hidden)
    return _linear(name, cut, d_in // cut.m1, cut.hidden, leave=leave, enter=_NOTHING)


def _linear(name: str, cut: PaperCut, d_in: Num, d_out: Num, *, leave: Comm, enter: Comm) -> PaperOp:
    rows = cut.rows
    x, y, w = (cut.elem_bytes * size for size in (rows * d_in, rows * d_out, d_in * d_out))
    grad_flop = product_flop(rows, d_in, d_out) + product_flop(d_in, d_out, rows)
    return PaperOp(
        name=name,
        forward=Work(product_flop(rows, d_out, d_in), x + y + w, (leave,)),
        backward=Work(grad_flop, 2.0 * (x + y + w), (enter,)),
        saved_bytes=x,
        weight_bytes=w,
        matmul=True,
    )


def _summa(name: str, cut: PaperCut, d_in: Num, d_out: Num) -> PaperOp:
    """SUMMA: panels of the input travel along rows (m1 ranks), panels of the weights along columns (m2)."""
    rows, width = cut.rows, d_out // cut.m1
    x, w, y = (cut.elem_bytes * size for size in (rows * d_in, d_in * width, rows * width))
    traffic = x + w + y * cut.panels
    along_rows, along_columns = ("tp1", x), ("tp2", w)
    return PaperOp(
        name=name,
        forward=Work(
            matmul_flop(rows, width, d_in),
            traffic,
            (Comm("broadcast", *along_rows), Comm("broadcast", *along_columns)),
        ),
        backward=Work(
            product_flop(rows, d_in, width) + product_flop(d_in, width, rows),
            2.0 * traffic,
            (
                *(Comm("broadcast", *along_columns), Comm("reduce", *along_rows)),
                *(Comm("broadcast", *along_rows), Comm("reduce", *along_columns)),
            ),
        ),
        saved_bytes=cut.elem_bytes * rows * (d_in // cut.m1),
        weight_bytes=cut.elem_bytes * (d_in // cut.m2) * width,
        matmul=True,
        panels=cut.panels,
    )


# --- Attention --------------------------------------------------------------------------------------


def _scores(cut: PaperCut) -> list[PaperOp]:
    """From queries, keys and values to their mixture, heads over m1; keys and values gathered over m2."""
    heads, seq_q, seq_k, dim = cut.local_heads, cut.local_seq, cut.seq, cut.head_dim
    s, num_scores, rows = cut.elem_bytes, heads * seq_q * seq_k, heads * seq_q
    score, query, key = s * num_scores, s * rows * dim, s * heads * seq_k * dim
    qk = product_flop(seq_q, seq_k, dim, batch=heads)  # also the gradient of the scores
    mix = product_flop(seq_q, dim, seq_k, batch=heads)  # also the gradient of the queries
    to_keys = product_flop(seq_k, dim, seq_q, batch=heads)  # gradient of the keys or of the values
    if cut.attention == "fused":
        return [
            PaperOp(
                name="fusedla",
                forward=Work(
                    qk + mix,
                    2.0 * query + 2.0 * key + s * rows,
                    _gather(cut, 2.0 * key),
                    vector_flop=4.0 * num_scores - rows,
                ),
                backward=Work(
                    mix + 2.0 * to_keys + 2.0 * qk,
                    6.0 * query + 2.0 * key + 2.0 * s * rows,
                    _gather_and_scatter(cut, 2.0 * key),
                    vector_flop=9.0 * num_scores - 2.0 * rows,
                ),
                saved_bytes=4.0 * query + 2.0 * s * rows,
                matmul=True,
            )
        ]
    kept = 0.0 if cut.recompute else 1.0
    return [
        PaperOp(
            name="logits",
            forward=Work(qk, query + key + score, _gather(cut, key)),
            backward=Work(mix + to_keys, 3.0 * query + key + 2.0 * score, _gather_and_scatter(cut, key)),
            saved_bytes=2.0 * query,
            matmul=True,
            recompute=cut.recompute,
        ),
        _softmax(cut, rows, seq_k),
        _dropout("dpr_at", cut, num_scores, recompute=cut.recompute),
        PaperOp(
            name="attend",
            forward=Work(mix, score + key + query, _gather(cut, key)),
            backward=Work(qk + to_keys, 3.0 * query + 2.0 * score + key, _gather_and_scatter(cut, key)),
            saved_bytes=kept * score + query,
            matmul=True,
        ),
    ]


def _gather(cut: PaperCut, volume_bytes: Num) -> tuple[Comm, ...]:
    return () if cut.strategy == "1d" else (Comm("all_gather", "tp2", volume_bytes),)


def _gather_and_scatter(cut: PaperCut, volume_bytes: Num) -> tuple[Comm, ...]:
    scatter = Comm("reduce_scatter", "tp2", volume_bytes)
    return () if cut.strategy == "1d" else (*_gather(cut, volume_bytes), scatter)


def _scores_summa(cut: PaperCut) -> list[PaperOp]:
    """The same with blocks of scores seq/m2 x seq/m1 of every head, multiplied by SUMMA."""
    heads, seq_q, seq_k, dim = cut.microbatch * cut.heads, cut.local_seq, cut.seq, cut.head_dim // cut.m1
    s, rows, local_k = cut.elem_bytes, heads * seq_q, cut.seq // cut.m1
    score, query, key = s * rows * seq_k, s * rows * dim, s * heads * seq_k * dim
    traffic = score + key + query * cut.panels
    to_keys = product_flop(seq_k, dim, seq_q, batch=heads)
    along_rows, along_columns = ("tp1", score), ("tp2", key)
    return [
        PaperOp(
            name="logits",
            forward=Work(
                product_flop(seq_q, seq_k, dim, batch=heads),
                traffic,
                (Comm("broadcast", *along_columns), Comm("reduce", *along_rows)),
            ),
            backward=Work(
                product_flop(seq_q, dim, seq_k, batch=heads) + to_keys,
                2.0 * traffic,
                (
                    *(Comm("broadcast", *along_rows), Comm("broadcast", *along_columns)),
                    *(Comm("broadcast", *along_rows), Comm("reduce", *along_columns)),
                ),
            ),
            saved_bytes=2.0 * query,
            matmul=True,
            panels=cut.panels,
        ),
        _softmax(cut, rows, local_k, comms=(Comm("all_reduce", "tp1", s * rows),)),
        _dropout("dpr_at", cut, rows * local_k),
        PaperOp(
            name="attend",
            forward=Work(
                matmul_flop(seq_q, dim, seq_k, batch=heads),
                traffic,
                (Comm("broadcast", *along_rows), Comm("broadcast", *along_columns)),
            ),
            backward=Work(
                product_flop(seq_q, seq_k, dim, batch=heads) + to_keys,
                2.0 * traffic,
                (
                    *(Comm("broadcast", *along_columns), Comm("reduce", *along_rows)),
                    *(Comm("broadcast", *along_rows), Comm("reduce", *along_columns)),
                ),
            ),
            saved_bytes=s * rows * local_k + query,
            matmul=True,
            panels=cut.panels,
        ),
    ]


# --- Element-wise kernels ---------------------------------------------------------------------------


def _softmax(cut: PaperCut, rows: Num, width: Num, comms: tuple[Comm, ...] = ()) -> PaperOp:
    size = rows * width
    tensor = cut.elem_bytes * size
    return PaperOp(
        name="softmax",
        forward=Work(3.0 * size - rows, 2.0 * tensor, comms),
        backward=Work(4.0 * size - rows, 3.0 * tensor, comms),
        saved_bytes=0.0 if cut.recompute else tensor,
        recompute=cut.recompute,
    )


def _bias(name: str, cut: PaperCut, rows: Num, width: Num) -> PaperOp:
    work = Work(rows * width, cut.elem_bytes * (rows * width + width))
    return PaperOp(name=name, forward=work, backward=work, weight_bytes=cut.elem_bytes * width)


def _gelu(name: str, cut: PaperCut, size: Num) -> PaperOp:
    tensor = cut.elem_bytes * size
    forward, backward = Work(8.0 * size, 2.0 * tensor), Work(13.0 * size, 3.0 * tensor)
    return PaperOp(name=name, forward=forward, backward=backward, saved_bytes=tensor)


def _dropout(name: str, cut: PaperCut, size: Num, *, recompute: bool = False) -> PaperOp:
    mask = cut.mask_bytes * size
    work = Work(size, 2.0 * cut.elem_bytes * size + mask)
    saved = 0.0 if recompute else mask
    return PaperOp(name=name, forward=work, backward=work, saved_bytes=saved, recompute=recompute)


def _norm_columns(name: str, cut: PaperCut) -> PaperOp:
    volume = cut.elem_bytes * cut.rows * cut.hidden
    gather, scatter = Comm("all_gather", "tp1", volume), Comm("reduce_scatter", "tp1", volume)
    return _norm(name, cut, cut.shard_rows, cut.hidden, gather, scatter)


def _norm_summa(name: str, cut: PaperCut) -> PaperOp:
    """Mean and deviation are summed over m1; `seq // m1` is the paper's slip for `hidden // m1`."""
    sums = 2.0 * cut.hidden // cut.m1 + 2.0 * cut.microbatch * cut.seq // cut.m2
    forward = Comm("all_reduce", "tp1", cut.elem_bytes * 2.0 * cut.rows)
    backward = Comm("all_reduce", "tp1", cut.elem_bytes * sums)
    return _norm(name, cut, cut.rows, cut.seq // cut.m1, forward, backward)


def _norm(name: str, cut: PaperCut, rows: Num, width: Num, forward: Comm, backward: Comm) -> PaperOp:
    s, size = cut.elem_bytes, rows * width
    return PaperOp(
        name=name,
        forward=Work(9.0 * size, s * (2.0 * size + 2.0 * rows + 2.0 * width), (forward,)),
        backward=Work(12.0 * size - 4.0 * rows, s * (5.0 * size + 2.0 * width), (backward,)),
        saved_bytes=s * size,
        weight_bytes=2.0 * s * width,
    )

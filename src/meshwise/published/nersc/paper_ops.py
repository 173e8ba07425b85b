"""The block of the NERSC paper (convention `nersc-2024-10`): ops of its strategies 1d, 2d and 2d-seqp.

One transformer layer on one rank of an m1 x m2 grid, in two tables, `mlp` and `sa` (self attention, with
a layer norm each). Every op states the same six things: FLOP and traffic forward and backward, what it
keeps for the backward, its weights; and what it communicates. `catalog/nersc.toml` has them as formulas. The
strategies:

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

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from meshwise.core.expressions import formulas, value_of
from meshwise.core.units import Num
from meshwise.cost.op import matmul_flop
from meshwise.published.nersc.tables import NERSC_TABLES, TABLES

_SHEET = NERSC_TABLES["paper"]


def product_flop(m: Num, n: Num, k: Num, batch: Num = 1.0) -> Num:
    """FLOP of a product whose dots of length k take k multiplications and k - 1 additions."""
    return matmul_flop(m, n, k, batch=batch) - batch * m * n


PaperOp = dict[str, Any]
"""A row of the paper's tables, for one microbatch, by the names of the catalog; `backward_` begins some.

`comms` are (kind, axis, bytes) of the full tensor; the axis is `tp1` (m1 ranks), `tp2` (m2 ranks), or empty:
a rank with itself. `vector_flop` are done by the vector units inside a matmul. `panels`: communication in so
many steps, overlapped with the compute (SUMMA). `recompute`: the backward does the forward again.
"""
_USUAL: PaperOp = {"vector_flop": 0.0, "comms": (), "weight_bytes": 0.0, "matmul": False, "recompute": False}
_USUAL |= {"backward_vector_flop": 0.0, "backward_comms": ()}


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
    elem_bytes: Num = 2.0
    mask_bytes: Num = 1.0


def layer(cut: PaperCut) -> dict[str, list[PaperOp]]:
    """The tables `mlp` and `sa` of one layer."""
    names = asdict(cut) | {"s": cut.elem_bytes, "recomputes": cut.recompute, "kernels": _SHEET["kernels"]}
    del names["recompute"]  # of an op
    names["product"] = product_flop
    names["total"] = lambda of, rows, width: of[0] * rows * width + of[1] * rows + of[2] * width
    names["summa_flop"] = lambda m, n, k, batch=1.0: matmul_flop(m, n, k, batch=batch)
    names |= formulas(_SHEET["sizes"], names)
    return {
        table: [_op(op, names) for op in _SHEET[table] if value_of(op.get("when", "True"), names)]
        for table in TABLES
    }


def _op(stated: Mapping[str, str], names: Mapping[str, Any]) -> PaperOp:
    """An op by its own formulas, and by those of its form."""
    own = formulas({key: text for key, text in stated.items() if key not in ("name", "form", "when")}, names)
    found = formulas(_SHEET["forms"][stated["form"]], {**names, **own})
    return _USUAL | found | own | {"name": stated["name"]}

"""Muon over the shards of FSDP2 (Moonlight, arXiv 2502.16982): what a rank gathers and multiplies in a step.

The replicas gather the momentum of each matrix in bf16, each makes it orthogonal by `ITERATIONS` of Newton
and Schulz, X <- a X + (b G + c G G) X with G = X X^T of the shorter side, and keeps its own part. A matrix is
what a tensor-parallel rank has of one (Megatron-LM's `--muon-tp-mode blockwise`), or each expert of a stack.
Embedding, head and vectors are AdamW's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from meshwise.core.units import Num
from meshwise.cost.op import matmul
from meshwise.model.weights import Weight
from meshwise.plan.mesh import Mesh
from meshwise.program.cut import Cut
from meshwise.program.exchange import Exchange
from meshwise.program.fsdp2 import Unit, by_muon
from meshwise.program.op import Op

ITERATIONS = 5
"""Of Newton and Schulz: what Muon's authors and torch take."""
BYTES = 2.0
"""Of an element of what is gathered and multiplied."""


def gathers(held: Sequence[Unit], mesh: Mesh, cut: Cut) -> Iterator[Exchange]:
    """Momenta of whole matrices, one after the other."""
    for unit in held:
        (_, first), ranks = unit.replicas(mesh), unit.sharing(mesh)
        stride, runs = mesh.replica_runs(first)
        for _, rows, width in _matrices(unit, cut):
            yield Exchange(
                op="momentum", collective="all_gather", behind="optimizer",
                payload_bytes=np.ceil(rows / ranks) * ranks * width * BYTES, group_size=ranks, stride=stride,
                runs=runs, count=unit.count * (ranks > 1),
            )  # fmt: skip


def products(held: Sequence[Unit], cut: Cut) -> Iterator[Op]:
    """The three products of each iteration."""
    for unit in held:
        for weight, rows, width in _matrices(unit, cut):
            batch = weight.shape[0] / cut.ep if weight.is_expert else 1.0
            short, long = np.minimum(rows, width / batch), np.maximum(rows, width / batch)
            for m, n, k in ((short, short, long), (short, short, short), (short, long, short)):
                yield Op(
                    module="step", name="newton_schulz", phase="optimizer", kind="matmul", dtype="bf16",
                    shape=(batch, m, n, k), count=ITERATIONS * unit.count,
                    cost=matmul(m, n, k, elem_bytes=BYTES, out_bytes=BYTES, batch=batch),
                )  # fmt: skip


def _matrices(unit: Unit, cut: Cut) -> Iterator[tuple[Weight, Num, Num]]:
    """Those of a unit, with rows and width as a tensor-parallel rank stores them."""
    for weight, (rows, width) in zip(unit.weights, unit.stored(cut), strict=True):
        if by_muon(weight):
            yield weight, rows, width

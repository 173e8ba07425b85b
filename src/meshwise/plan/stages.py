"""Which layers each pipeline stage holds, for one plan or a grid of them.

The model's layers are dealt in order to pp x vpp *chunks*; a rank holds vpp of them, round and round, or down
and back up under V-shaped schedules. Where the layers do not divide, the lighter chunks lie at the ends,
beside embedding and head: the last, then the first, then the second, and on (Llama 3, arXiv 2407.21783,
leaves one layer out of the first and the last stage); an end chunk may hold no layer at all.

Stages that hold the same are one `Stage` with their number. A grid has a handful of patterns, one for each
(pp, vpp, folding); each is made once and spread over the cells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from meshwise.core.units import Num
from meshwise.cost.schedule import SCHEDULES
from meshwise.model.architecture import Model, layer_kind, layer_kinds
from meshwise.plan.mesh import Mesh

V_SHAPED = ("zb-v", "dualpipe-v")
ROUND, FOLDED, MIRRORED = 0, 1, 2
"""How chunks come to ranks: round and round; down and back up; from both ends, half of the batch each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """What the alike stages of a pipeline hold.

    `index`: the first of them along the pipeline; `num_stages`: how many they are (0: none in this cell).
    `layers`: numbers of blocks, one for each of the model's `layer_kinds`. Under DualPipe a rank holds half
    of what lies at both ends, so numbers may be halves.
    """

    index: Num
    num_stages: Num
    embeddings: Num
    heads: Num
    layers: tuple[Num, ...]

    @property
    def num_layers(self) -> Num:
        """Blocks of all kinds."""
        return sum(self.layers)


def chunk_layers(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Layers of each chunk, as even as they can be; lighter chunks at the ends."""
    least, spare = divmod(num_layers, num_chunks)
    light = [num_chunks - 1, *range(num_chunks - 1)][: num_chunks - spare] if spare else []
    return tuple(least + (spare > 0) - (chunk in light) for chunk in range(num_chunks))


def chunks(model: Model, pp: int, vpp: int, stages: Sequence[int] | None = None) -> list[Stage]:
    """The chunks of one plan in the order of the model, each as a `Stage`."""
    kinds = layer_kinds(model)
    sizes = stages or chunk_layers(model.num_layers, pp * vpp)
    found, first = [], 0
    for i, size in enumerate(sizes):
        held = Counter(layer_kind(model, layer) for layer in range(first, first + size))
        found.append(
            Stage(
                index=float(i),
                num_stages=1.0,
                embeddings=float(i == 0),
                heads=float(i == len(sizes) - 1),
                layers=tuple(float(held[kind]) for kind in kinds),
            )
        )
        first += size
    return found


def rank_of_chunk(chunk: int, pp: int, folding: int) -> int:
    """The stage that holds a chunk."""
    if folding == FOLDED and chunk >= pp:
        return 2 * pp - 1 - chunk
    return chunk % pp


@lru_cache(maxsize=4096)
def chunks_of_rank(
    model: Model, pp: int, vpp: int, schedule: str, stages: tuple[int, ...] | None, rank: int
) -> list[tuple[Stage, range]]:
    """The chunks of pipeline rank `rank` in the order in which it numbers them, and the layers of each."""
    folding = FOLDED if schedule in V_SHAPED and pp > 1 else ROUND
    found, first = [], 0
    for i, chunk in enumerate(chunks(model, pp, vpp, stages)):
        layers = range(first, first + int(chunk.num_layers))
        first = layers.stop
        if rank_of_chunk(i, pp, folding) == rank:
            found.append((chunk, layers))
    return found


def stage_of_rank(model: Model, mesh: Mesh, rank: int) -> Stage:
    """What pipeline rank `rank` of one plan holds, as a stage that counts for none."""
    held = _held(model, int(mesh.pp), int(mesh.vpp), int(_folding(mesh)), mesh.plan.stages)[rank]
    return _stage(held[0], held[1], tuple(held[2:]), float(rank), 0.0)


_Row = tuple[float, float, tuple[float, ...], float, float]  # embeddings, heads, layers, index, num_stages


@lru_cache(maxsize=4096)
def _pattern(
    model: Model, pp: int, vpp: int, folding: int, stages: tuple[int, ...] | None
) -> tuple[_Row, ...]:
    """The distinct stages of one pattern, in the order in which they first appear."""
    rows = _held(model, pp, vpp, folding, stages)
    return tuple(
        (row[0], row[1], row[2:], float(rows.index(row)), float(count))
        for row, count in Counter(rows).items()
    )


def _held(
    model: Model, pp: int, vpp: int, folding: int, stages: Sequence[int] | None
) -> list[tuple[float, ...]]:
    """Embeddings, heads, and layers of each kind that each pipeline rank holds."""
    held = np.zeros((pp, 2 + len(layer_kinds(model))))
    for i, chunk in enumerate(chunks(model, pp, vpp, stages)):
        held[rank_of_chunk(i, pp, folding)] += (chunk.embeddings, chunk.heads, *chunk.layers)
    if folding == MIRRORED:
        held = 0.5 * (held + held[::-1])
    return [tuple(map(float, row)) for row in held]


def stages_of(model: Model, mesh: Mesh) -> list[Stage]:
    """The kinds of stages of `mesh`; in a grid, as many as its richest pattern has."""
    folding = _folding(mesh)
    if not any(isinstance(size, np.ndarray) for size in (mesh.pp, mesh.vpp, folding)):
        rows = _pattern(model, int(mesh.pp), int(mesh.vpp), int(folding), mesh.plan.stages)
        return [_stage(*row) for row in rows]
    sizes = np.stack(np.broadcast_arrays(mesh.pp, mesh.vpp, folding)).astype(np.int64)
    codes = (sizes[0] * (1 + sizes[1].max()) + sizes[1]) * 3 + sizes[2]
    _, first, pattern = np.unique(codes, return_index=True, return_inverse=True)
    flat = sizes.reshape(3, -1)
    patterns = [_pattern(model, *map(int, flat[:, cell]), mesh.plan.stages) for cell in first]
    pattern = pattern.reshape(codes.shape)
    num_kinds = len(layer_kinds(model))
    absent: _Row = (0.0, 0.0, (0.0,) * num_kinds, 0.0, 0.0)
    found = []
    for k in range(max(map(len, patterns))):
        kth = [one[k] if k < len(one) else absent for one in patterns]
        table = np.array([(row[0], row[1], *row[2], row[3], row[4]) for row in kth]).T[:, pattern]
        found.append(_stage(table[0], table[1], tuple(table[2 : 2 + num_kinds]), table[-2], table[-1]))
    return found


def _stage(embeddings: Num, heads: Num, layers: tuple[Num, ...], index: Num, num_stages: Num) -> Stage:
    return Stage(index=index, num_stages=num_stages, embeddings=embeddings, heads=heads, layers=layers)


def _folding(mesh: Mesh) -> Num:
    mirrored = mesh.schedule == SCHEDULES.index("dualpipe")
    folded = sum((mesh.schedule == SCHEDULES.index(name)) * 1 for name in V_SHAPED)
    return (FOLDED * folded + MIRRORED * mirrored) * (mesh.pp > 1) * 1.0

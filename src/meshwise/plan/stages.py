"""Which layers each pipeline stage holds, for one plan or a grid of them.

The model's layers are dealt in order to pp x vpp *chunks*; a rank holds vpp of them, round and round, or down
and back up under V-shaped schedules. Embedding and head may stand for some layers of the first and the last
chunk (`Mesh.ends`; Llama 3, arXiv 2407.21783, has one for each). Where layers do not divide, the lighter
chunks lie at the ends: the last, then the first, then the second, and on. An end chunk may hold no layer.

Stages that hold the same are one `Stage` with their number. A grid has a handful of patterns, one for each
(pp, vpp, folding); each is made once and spread over the cells.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import distinct_columns
from meshwise.core.numbers import anywhere, larger
from meshwise.core.units import Num
from meshwise.cost.schedule import SCHEDULES
from meshwise.model.architecture import Model, layer_kind, layer_kinds
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import EVEN

V_SHAPED = ("zb-v", "dualpipe-v")
ROUND, FOLDED, MIRRORED = 0, 1, 2
"""How chunks come to ranks: round and round; down and back up; from both ends, half of the batch each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """What the alike stages of a pipeline hold.

    `index`: the first of them along the pipeline; `num_stages`: how many they are (0: none in this cell).
    `layers`: numbers of blocks, one for each of the model's `layer_kinds`. Under DualPipe a rank holds two
    stages, one of each direction, and counts the parts of both; `share` of the microbatches (a half) passes
    each of them. Otherwise all microbatches pass all that a rank holds.
    """

    index: Num
    num_stages: Num
    embeddings: Num
    heads: Num
    layers: tuple[Num, ...]
    share: Num = 1.0

    @property
    def num_layers(self) -> Num:
        """Blocks of all kinds that the rank holds."""
        return sum(self.layers)

    @property
    def layers_passed(self) -> Num:
        """Blocks of all kinds that one microbatch passes, the mean of both directions under DualPipe."""
        return self.share * self.num_layers


def holds_table_twice(model: Model, stage: Stage, mesh: Mesh) -> Num:
    """1 on the first and the last stage where each has a copy of the table of tokens, else 0.

    A tied head reads it, or multi-token prediction, which embeds the next tokens (Megatron-Core:
    `gpt_model.py`, `finalize_model_grads.py`); a stage that has both ends of the model needs no copy.
    """
    is_read = model.shares_table if mesh.trains else model.tied_embedding
    return (stage.embeddings != stage.heads) * (mesh.pp > 1) * (1.0 * is_read)


def chunk_layers(num_layers: int, num_chunks: int, ends: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    """Layers of each chunk, as even as they can be with the layers that embedding and head stand for."""
    if num_chunks == 1:
        return (num_layers,)
    least, spare = divmod(num_layers + sum(ends), num_chunks)
    light = {num_chunks - 1, *range(num_chunks - spare - 1)} if spare else set()
    sizes = [least + (spare > 0) - (chunk in light) for chunk in range(num_chunks)]
    sizes[0], sizes[-1] = sizes[0] - ends[0], sizes[-1] - ends[1]
    if sizes[-1] < 0:  # the head stands for more than a chunk
        return (*chunk_layers(num_layers, num_chunks - 1, (ends[0], 0)), 0)
    if sizes[0] < 0:
        return (0, *chunk_layers(num_layers, num_chunks - 1, (0, ends[1])))
    return tuple(sizes)


def layers_of_chunks(model: Model, mesh: Mesh) -> tuple[int, ...]:
    """Layers of each chunk of one plan: those that it states, or as even as its `ends` let them be."""
    first, last = (int(end) for end in mesh.ends)
    return mesh.plan.stages or chunk_layers(model.num_layers, int(mesh.pp * mesh.vpp), (first, last))


def chunks(model: Model, sizes: Sequence[int]) -> list[Stage]:
    """The chunks of one plan in the order of the model, each as a `Stage`; `sizes`: layers of each."""
    return [
        Stage(
            index=float(i),
            num_stages=1.0,
            embeddings=float(i == 0),
            heads=float(i == len(sizes) - 1),
            layers=tuple(layers),
        )
        for i, layers in enumerate(_layers_of(model, sizes).tolist())
    ]


def _layers_of(model: Model, sizes: Sequence[int]) -> NDArray[np.float64]:
    """Layers of each kind in each chunk: [chunks, kinds]."""
    return np.diff(layers_before(model)[[0, *itertools.accumulate(sizes)]], axis=0)


@lru_cache(maxsize=64)
def layers_before(model: Model) -> NDArray[np.float64]:
    """Layers of each kind before each layer of a model, and before its end: [layers + 1, kinds]."""
    kinds = layer_kinds(model)
    each = [[layer_kind(model, layer) == kind for kind in kinds] for layer in range(model.num_layers)]
    return np.cumsum([[0.0] * len(kinds), *each], axis=0)


def rank_of_chunk(chunk: int, pp: int, folding: int) -> int:
    """The stage that holds a chunk; under mirrored ones the first of two."""
    return 2 * pp - 1 - chunk if folding == FOLDED and chunk >= pp else chunk % pp


@lru_cache(maxsize=4096)
def chunks_of_rank(
    model: Model, pp: int, vpp: int, schedule: str, stages: tuple[int, ...] | None, rank: int
) -> list[tuple[Stage, range]]:
    """The chunks of pipeline rank `rank` in the order in which it numbers them, and the layers of each."""
    folding = FOLDED if schedule in V_SHAPED and pp > 1 else ROUND
    found: list[list[tuple[Stage, range]]] = [[] for _ in range(pp)]
    first = 0
    for i, chunk in enumerate(chunks(model, stages or chunk_layers(model.num_layers, pp * vpp))):
        layers = range(first, first + int(chunk.num_layers))
        first = layers.stop
        found[rank_of_chunk(i, pp, folding)].append((chunk, layers))
    return found[rank] + (found[pp - 1 - rank] if schedule == "dualpipe" else [])


def loses_step(model: Model, mesh: Mesh) -> Any:
    """Where the schedule needs chunks that are more alike than the `ends` of `mesh` make them.

    An interleaved one keeps in step only if no chunk but the first and the last is shorter; DualPipe hides
    the exchange of experts of each layer behind a layer of the paired chunk (arXiv 2412.19437).
    """
    num_chunks, layers = mesh.pp * mesh.vpp, model.num_layers + sum(mesh.ends)
    is_shorter_within = (-layers % num_chunks > 2) | (larger(*mesh.ends) > layers // num_chunks)
    is_moved = (mesh.ends[0] != 0) | (mesh.ends[1] != 0)
    return mesh.is_interleaved & is_shorter_within | mesh.is_paired & is_moved


def differ(model: Model, mesh: Mesh) -> Any:
    """Where the stages that the plan states are not those that it would have without stating them."""
    stated = mesh.plan.stages

    def is_other(first: float, last: float) -> bool:
        return chunk_layers(model.num_layers, len(stated or ()), (int(first), int(last))) != stated

    return (np.vectorize(is_other, otypes=[bool])(*mesh.ends) | loses_step(model, mesh))[()]


def num_on_host(share: Num, number: Num) -> Num:
    """Of `number` layers of a chunk (or weights of a rank) how many, the first ones, make up `share`."""
    return np.ceil(share * number - 1e-9)


def stage_of_rank(model: Model, mesh: Mesh, rank: int) -> Stage:
    """What pipeline rank `rank` of one plan holds, as a stage that counts for none."""
    return _stage(mesh, (*held_by_ranks(model, mesh)[rank], float(rank), 0.0))


def held_by_ranks(model: Model, mesh: Mesh) -> list[tuple[float, ...]]:
    """What each pipeline rank of one plan holds: embeddings, heads, and layers of each kind."""
    return _held(model, int(mesh.pp), int(folding(mesh)), layers_of_chunks(model, mesh))


_Row = tuple[float, ...]  # embeddings, heads, layers of each kind, index, num_stages


@lru_cache(maxsize=64)
def _patterns(model: Model, stages: tuple[int, ...] | None) -> Callable[..., tuple[_Row, ...]]:
    """`_pattern` of one model, which remembers its answers: a model takes long to look up."""
    return lru_cache(maxsize=4096)(partial(_pattern, model, stages))


def _pattern(
    model: Model, stages: tuple[int, ...] | None, pp: int, vpp: int, folding: int, *ends: int
) -> tuple[_Row, ...]:
    """The distinct stages of one pattern, in the order in which they first appear."""
    rows = _held(model, pp, folding, stages or chunk_layers(model.num_layers, pp * vpp, (ends[0], ends[1])))
    return tuple((*row, float(rows.index(row)), float(count)) for row, count in Counter(rows).items())


def _held(model: Model, pp: int, folding: int, sizes: Sequence[int]) -> list[tuple[float, ...]]:
    """Embeddings, heads, and layers of each kind that each pipeline rank holds."""
    held = np.zeros((pp, 2 + len(layer_kinds(model))))
    ranks = [rank_of_chunk(i, pp, folding) for i in range(len(sizes))]
    held[ranks[0], 0] += 1.0
    held[ranks[-1], 1] += 1.0
    np.add.at(held[:, 2:], ranks, _layers_of(model, sizes))
    if folding == MIRRORED:
        held = held + held[::-1]
    return [tuple(row) for row in held.tolist()]


def has_fixed_ends(mesh: Mesh) -> bool:
    """Whether nothing is chosen: engines and PyTorch's own pipeline (fsdp2) place layers evenly, as paired
    microbatches of experts need (`loses_step`)."""
    plan = mesh.plan
    is_even = plan.stages == EVEN or mesh.serves or plan.done_by.deals_evenly
    return is_even or bool(np.all(mesh.is_paired | (np.asarray(mesh.pp) == 1)))


def stages_of(model: Model, mesh: Mesh) -> list[Stage]:
    """The kinds of stages of `mesh`; in a grid, as many as its richest pattern has."""
    sizes = (mesh.pp, mesh.vpp, folding(mesh), *mesh.ends)
    if not any(isinstance(size, np.ndarray) for size in sizes):
        return [_stage(mesh, row) for row in _patterns(model, mesh.plan.stages)(*map(int, sizes))]
    patterns, pattern = patterns_of(model, mesh)
    rows = itertools.zip_longest(*patterns, fillvalue=(0.0,) * len(patterns[0][0]))
    return [_stage(mesh, np.array(kth).T[:, pattern]) for kth in rows]


def patterns_of(model: Model, mesh: Mesh) -> tuple[list[tuple[_Row, ...]], NDArray[np.intp]]:
    """The patterns of a grid, and the place of each cell's: the same where stages hold the same."""
    sizes = (mesh.pp, mesh.vpp, folding(mesh), *mesh.ends)
    cells = np.stack(np.broadcast_arrays(*sizes))
    first, kind = distinct_columns(flat := cells.reshape(len(sizes), -1))
    pattern_of, places = _patterns(model, mesh.plan.stages), dict[tuple[_Row, ...], int]()
    place = [places.setdefault(pattern_of(*map(int, flat[:, cell])), len(places)) for cell in first]
    return list(places), np.array(place, dtype=np.intp)[kind].reshape(cells.shape[1:])


def _stage(mesh: Mesh, row: Iterable[Num]) -> Stage:
    """The stage of a row of a pattern, or of rows along the cells of a grid."""
    embeddings, heads, *layers, index, num_stages = row
    is_mirrored = folding(mesh) == MIRRORED
    return Stage(
        index=index,
        num_stages=num_stages,
        embeddings=embeddings,
        heads=heads,
        layers=tuple(layers),
        share=1.0 - 0.5 * is_mirrored if anywhere(is_mirrored) else 1.0,
    )


def folding(mesh: Mesh) -> Num:
    """How chunks come to ranks: `ROUND`, `FOLDED` or `MIRRORED`."""
    mirrored = mesh.schedule == SCHEDULES.index("dualpipe")
    folded = sum((mesh.schedule == SCHEDULES.index(name)) * 1 for name in V_SHAPED)
    return (FOLDED * folded + MIRRORED * mirrored) * (mesh.pp > 1) * 1.0

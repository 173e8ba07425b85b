"""Which tokens, and which columns of a matrix, a rank holds.

Tokens that attend are spans of positions, `((begin, end), ...)`. Under a causal mask later tokens cost more,
so a sequence over n ranks is cut in 2n chunks and rank r holds the chunks r and 2n - 1 - r: all ranks see as
many keys. Columns are index arrays, since a rank's part of a fused projection lies scattered in the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis

Spans = tuple[tuple[int, int], ...]
Index = NDArray[np.int64]


def chunk_order(num_ranks: int, *, is_causal: bool) -> list[int]:
    """The chunks of a sequence in the order in which the ranks hold them: 0 3 1 2 for two causal ranks."""
    if not is_causal or num_ranks == 1:
        return list(range(num_ranks))
    return [chunk for rank in range(num_ranks) for chunk in (rank, 2 * num_ranks - 1 - rank)]


def rank_spans(seq: int, along: MeshAxis, *, is_causal: bool) -> Spans:
    """The tokens of this one of the ranks over which a sequence is cut."""
    order = chunk_order(along.size, is_causal=is_causal)
    size = seq // len(order)
    mine = np.split(np.array(order), along.size)[along.index].tolist()
    return tuple((chunk * size, (chunk + 1) * size) for chunk in mine)


def part(whole: Index, along: MeshAxis) -> Index:
    """This rank's equal part of `whole`, cut over the ranks of an axis."""
    return np.split(whole, along.size)[along.index]


def split(sections: Sequence[tuple[int, int]], num_parts: int) -> list[Index]:
    """Columns of each part of a fused matrix, whose sections are (units, width): heads and their size.

    Each part takes its share of the units of every section.
    """
    parts: list[list[Index]] = [[] for _ in range(num_parts)]
    start = 0
    for units, width in sections:
        for i, piece in enumerate(np.split(np.arange(start, start + units * width), num_parts)):
            parts[i].append(piece)
        start += units * width
    return [np.concatenate(pieces) for pieces in parts]

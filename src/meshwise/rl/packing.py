"""Samples packed into bins of a number of tokens: first fit decreasing.

Longest first, each sample goes into the first bin that has room. Trainers pack the samples of an optimizer
step, and give every data-parallel rank as many bins; the fullest rank sets the pace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from meshwise.rl.rollouts import Tokens


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """`bins` bins a data-parallel rank, of `fill` tokens each: `samples` samples of `sample_tokens` tokens.

    `sample_tokens` is the mean over tokens (of a token's sample, not of samples), so that attention, which
    grows with the square of each sample, comes out right.
    """

    bins: int
    fill: float
    samples: int
    sample_tokens: int


def num_bins(tokens: Tokens, most_tokens: int) -> int:
    """Bins of `most_tokens` that samples need by first fit decreasing."""
    rooms, used = np.full(len(tokens), most_tokens), 0
    for length in np.sort(tokens)[::-1].tolist():
        first = int(np.argmax(rooms >= length))
        rooms[first] -= length
        used = max(used, first + 1)
    return used


def pack(
    tokens: Tokens, most_tokens: int, *, ranks: int, token_multiple: int = 1, bin_multiple: int = 1
) -> PackedBatch:
    """The samples of a step over `ranks` data-parallel ranks.

    A sample's tokens are a multiple of `token_multiple` (ranks that cut it), a rank's bins of `bin_multiple`
    (stages of an interleaved pipeline).
    """
    most = ranks * bin_multiple
    bins = math.ceil(num_bins(tokens, max(most_tokens, int(tokens.max()))) / most) * bin_multiple
    fill = float(tokens.sum()) / (bins * ranks)
    of_a_token = float((tokens.astype(float) ** 2).sum() / tokens.sum())
    samples = max(round(fill / of_a_token), 1)
    return PackedBatch(bins, fill, samples, math.ceil(fill / samples / token_multiple) * token_multiple)

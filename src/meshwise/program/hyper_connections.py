"""Hyper-connections: several residual streams, mixed around attention and around the MLP.

One layer reads all n streams of a token, normalised, and says by (2 + n) n numbers how they are added up to
what attention or MLP reads, what each takes of its result, and how they are mixed with each other (a matrix
made doubly stochastic by a few normalisations of n x n numbers, which are not priced). Every rank does this
for its own tokens. Source: mHC, arXiv 2512.24880; DeepSeek-V4 in `transformers` 5.23.
"""

from __future__ import annotations

from meshwise.model.architecture import Model, Streams
from meshwise.program.cut import Cut
from meshwise.program.op import Stated, elementwise
from meshwise.program.tensor import Tensor, made
from meshwise.program.tensor_1d import plain_linear

MODULE = "streams"


def hyper_connections(model: Model, own: Streams, cut: Cut, x: Tensor) -> Stated:
    """What both halves of a block do with the streams: read them, add them up, mix them."""
    rows, hidden, prec = cut.split_tokens, float(model.hidden), cut.precision
    for half in ("attention", "mlp"):
        streams = made(MODULE, f"{half}_streams", (rows, own.number * hidden), prec.act_dtype)
        normed = yield from elementwise(MODULE, f"{half}_norm", "rmsnorm", streams, prec)
        name = f"{half}_mixes"
        yield from plain_linear(MODULE, name, normed, {name: float(own.mixes)}, cut, bias=True)
        of_each = Tensor(streams.name, (rows * own.number, hidden), streams.dtype, streams)
        yield from elementwise(MODULE, f"{half}_gather", "scale_by_gate", of_each, prec)
        mixed = yield from elementwise(MODULE, f"{half}_spread", "scale_by_gate", of_each, prec)
        yield from elementwise(MODULE, f"{half}_add", "residual", (mixed, of_each), prec)
    return x

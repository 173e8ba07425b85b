"""Several residual streams around each block, one of which it computes (AltUp, arXiv 2301.13310; Gemma 3n).

Every rank does this for its own tokens. The router of the streams reads the hidden state twice, before the
block and behind it, with the same weights. Source: `transformers` 5.23, gemma3n/modeling_gemma3n.py.
"""

from __future__ import annotations

from typing import Any

from meshwise.cost.op import matmul
from meshwise.model.architecture import Model, Streams
from meshwise.program.cut import Cut
from meshwise.program.op import Op, Stated, elementwise, linear
from meshwise.program.tensor import Tensor, made
from meshwise.program.tensor_1d import norm, plain_linear

MODULE = "streams"


def predicted(model: Model, cut: Cut, x: Tensor) -> Stated:
    """Each stream from all of them, before the block."""
    own, number = _of(model)
    rows, hidden, rank, prec = cut.split_tokens, float(model.hidden), float(own.laurel_rank), cut.precision
    normed = yield from norm(model, cut, MODULE, "router_norm", x)
    (gates,) = yield from plain_linear(MODULE, "modalities", normed, {"modalities": number}, cut)
    (mixing,) = yield from plain_linear(MODULE, "predict", gates, {"predict": number * number}, cut)
    streams = made(MODULE, "streams", (rows * number, hidden), prec.act_dtype)
    mixed = made(MODULE, "mix", (rows * number, hidden), prec.act_dtype)
    tensors: dict[str, Any] = {"reads": (streams, mixing), "makes": (mixed,), "keeps": (streams,)}
    for phase, shape in (
        ("forward", (rows, hidden, number, number)),
        ("backward", (rows, hidden, number, number)),
        ("backward", (rows, number, number, hidden)),
    ):
        yield Op(
            module=MODULE, name="mix", phase=phase, kind="matmul", shape=shape,
            cost=matmul(*shape[1:], elem_bytes=prec.act_bytes, batch=rows),
            dtype="bf16" if prec.casts else prec.dtype, **(tensors if phase == "forward" else {}),
        )  # fmt: skip
    yield from elementwise(MODULE, "mix_add", "residual", (mixed, streams), prec)
    (thin,) = yield from plain_linear(MODULE, "laurel_left", x, {"laurel_left": rank}, cut)
    (y,) = yield from plain_linear(MODULE, "laurel_right", thin, {"laurel_right": hidden}, cut)
    y = yield from norm(model, cut, MODULE, "laurel_norm", y)
    for name in ("laurel_residual", "laurel_add"):
        y = yield from elementwise(MODULE, name, "residual", (y, x), prec)
    return x


def corrected(model: Model, cut: Cut, x: Tensor) -> Stated:
    """Each stream by the difference between its prediction and what the block made, behind the block."""
    _, number = _of(model)
    rows, hidden, prec = cut.split_tokens, float(model.hidden), cut.precision
    normed = yield from norm(model, cut, MODULE, "router_norm_again", x)
    gates = yield from linear(MODULE, "modalities_again", normed, number, prec, frozen=cut.lora_rank > 0)
    yield from plain_linear(MODULE, "correct", gates, {"correct": number}, cut)
    yield from elementwise(MODULE, "innovation", "residual", x, prec)
    streams = made(MODULE, "innovations", (rows * number, hidden), prec.act_dtype)
    y = yield from elementwise(MODULE, "correction", "scale_by_gate", streams, prec)
    yield from elementwise(MODULE, "correction_add", "residual", y, prec)
    first = made(MODULE, "first_stream", (rows, hidden), prec.act_dtype)
    return (yield from elementwise(MODULE, "output_scale", "layer_scale", first, prec))


def begun(model: Model, cut: Cut, x: Tensor) -> Stated:
    """The other streams, projected from the embedding and scaled to its length."""
    return _projected(model, cut, "embedding", x)


def ended(model: Model, cut: Cut, x: Tensor) -> Stated:
    """The other streams, projected, scaled to the length of the first, and averaged with it."""
    y = yield from _projected(model, cut, "head", x)
    return (yield from elementwise("head", "stream_mean", "residual", y, cut.precision))


def _projected(model: Model, cut: Cut, module: str, x: Tensor) -> Stated:
    _, number = _of(model)
    others = made(module, "streams", (number - 1, *x.shape), x.dtype)
    y = yield from linear(module, "stream_proj", others, x.shape[-1], cut.precision, frozen=cut.lora_rank > 0)
    return (yield from elementwise(module, "stream_length", model.norm, y, cut.precision))


def _of(model: Model) -> tuple[Streams, float]:
    own = model.streams
    assert own is not None
    return own, float(own.number)

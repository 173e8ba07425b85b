"""Several residual streams around each block, one of which it computes (AltUp, arXiv 2301.13310; Gemma 3n).

Every rank does this for its own tokens. The router of the streams reads the hidden state twice, before the
block and behind it, with the same weights. Source: `transformers` 5.23, gemma3n/modeling_gemma3n.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwise.cost.op import matmul
from meshwise.model.architecture import Model, Streams
from meshwise.program.cut import Cut
from meshwise.program.op import Op, elementwise, linear
from meshwise.program.tensor_1d import norm, plain_linear

MODULE = "streams"


def predicted(model: Model, cut: Cut) -> Iterator[Op]:
    """Each stream from all of them, before the block."""
    own, number = _of(model)
    rows, hidden, rank, prec = cut.split_tokens, float(model.hidden), float(own.laurel_rank), cut.precision
    yield from norm(model, cut, MODULE, "router_norm")
    yield from plain_linear(MODULE, "modalities", rows, hidden, {"modalities": number}, cut)
    yield from plain_linear(MODULE, "predict", rows, number, {"predict": number * number}, cut)
    for phase, shape in (
        ("forward", (rows, hidden, number, number)),
        ("backward", (rows, hidden, number, number)),
        ("backward", (rows, number, number, hidden)),
    ):
        yield Op(
            module=MODULE, name="mix", phase=phase, kind="matmul", shape=shape,
            cost=matmul(*shape[1:], elem_bytes=prec.act_bytes, batch=rows),
            saved_bytes=rows * number * hidden * prec.act_bytes * (phase == "forward"),
            dtype="bf16" if prec.casts else prec.dtype,
        )  # fmt: skip
    yield from elementwise(MODULE, "mix_add", "residual", rows * number, hidden, prec)
    yield from plain_linear(MODULE, "laurel_left", rows, hidden, {"laurel_left": rank}, cut)
    yield from plain_linear(MODULE, "laurel_right", rows, rank, {"laurel_right": hidden}, cut)
    yield from norm(model, cut, MODULE, "laurel_norm")
    for name in ("laurel_residual", "laurel_add"):
        yield from elementwise(MODULE, name, "residual", rows, hidden, prec)


def corrected(model: Model, cut: Cut) -> Iterator[Op]:
    """Each stream by the difference between its prediction and what the block made, behind the block."""
    _, number = _of(model)
    rows, hidden, prec = cut.split_tokens, float(model.hidden), cut.precision
    yield from norm(model, cut, MODULE, "router_norm_again")
    yield from linear(MODULE, "modalities_again", rows, hidden, number, prec, frozen=cut.lora_rank > 0)
    yield from plain_linear(MODULE, "correct", rows, number, {"correct": number}, cut)
    yield from elementwise(MODULE, "innovation", "residual", rows, hidden, prec)
    yield from elementwise(MODULE, "correction", "scale_by_gate", rows * number, hidden, prec)
    yield from elementwise(MODULE, "correction_add", "residual", rows * number, hidden, prec)
    yield from elementwise(MODULE, "output_scale", "layer_scale", rows, hidden, prec)


def begun(model: Model, cut: Cut) -> Iterator[Op]:
    """The other streams, projected from the embedding and scaled to its length."""
    return _projected(model, cut, "embedding")


def ended(model: Model, cut: Cut) -> Iterator[Op]:
    """The other streams, projected, scaled to the length of the first, and averaged with it."""
    yield from _projected(model, cut, "head")
    _, number = _of(model)
    rows, hidden = cut.split_tokens * (number - 1), float(model.hidden)
    yield from elementwise("head", "stream_mean", "residual", rows, hidden, cut.precision)


def _projected(model: Model, cut: Cut, module: str) -> Iterator[Op]:
    _, number = _of(model)
    rows, hidden, is_frozen = cut.split_tokens, float(model.hidden), cut.lora_rank > 0
    yield from linear(
        module, "stream_proj", rows, hidden, hidden, cut.precision, batch=number - 1, frozen=is_frozen
    )
    yield from elementwise(module, "stream_length", model.norm, rows * (number - 1), hidden, cut.precision)


def _of(model: Model) -> tuple[Streams, float]:
    own = model.streams
    assert own is not None
    return own, float(own.number)

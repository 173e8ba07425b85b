"""Per-layer embeddings (Gemma 3n and 4): what a block adds at its end, what comes before the first.

Every rank does both for its own tokens; the table is cut by tp like that of the tokens. Source:
`transformers` 5.23, gemma4/modeling_gemma4.py.
"""

from __future__ import annotations

from msgspec import structs

from meshwise.cost.op import embedding, embedding_backward
from meshwise.model.architecture import Model
from meshwise.program.cut import Cut
from meshwise.program.op import Op, Stated, elementwise
from meshwise.program.tensor import Tensor, made
from meshwise.program.tensor_1d import norm, on_tp, plain_linear, summing

MODULE = "per_layer"


def per_layer(model: Model, cut: Cut, x: Tensor) -> Stated:
    """Gate, product with the block's vector, projection, norm, residual."""
    own, prec = model.per_layer, cut.precision
    assert own is not None
    (gate,) = yield from plain_linear(MODULE, "gate", x, {"gate": float(own.width)}, cut)
    vector = made(MODULE, "vector", gate.shape, gate.dtype)
    y = yield from elementwise(MODULE, "gate_act", "swiglu", (gate, vector), prec)
    (y,) = yield from plain_linear(MODULE, "up", y, {"up": float(model.hidden)}, cut)
    y = yield from norm(model, cut, MODULE, "norm", y)
    return (yield from elementwise(MODULE, "residual", "residual", (y, x), prec))


def look_up_per_layer(model: Model, cut: Cut, x: Tensor) -> Stated:
    """The second table, and the projection of the first embedding that is added to it."""
    module, prec, rows = "embedding", cut.precision, cut.split_tokens
    own = model.per_layer
    assert own is not None
    width = float(model.num_layers * own.width)
    both = Op(module=module, name="layer_tokens", phase="forward", kind="kernel", shape=(cut.tokens, width))
    yield structs.replace(both, cost=embedding(cut.tokens, width, elem_bytes=prec.act_bytes))
    yield on_tp(module, "layer_tokens", "forward", summing(cut), width, cut)
    if cut.sequence_parallel:
        yield on_tp(module, "layer_tokens", "backward", "all_gather", width, cut)
    cost = embedding_backward(cut.tokens, width, elem_bytes=prec.act_bytes)
    yield structs.replace(both, phase="backward", cost=cost, is_weight_grad=True)
    (y,) = yield from plain_linear(module, "layer_proj", x, {"layer_proj": width}, cut)
    shape = rows * model.num_layers, float(own.width)
    yield from elementwise(module, "layer_norm", model.norm, y, prec, shape=shape)
    return (yield from elementwise(module, "layer_add", "residual", y, prec))

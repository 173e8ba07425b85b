"""Numbers of parameters by part, to hold against published counts."""

from dataclasses import dataclass

from meshwise.model import weights
from meshwise.model.architecture import Layer, Model, layer_kind
from meshwise.model.weights import Weights, num_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Numbers of parameters by part, exact.

    `attention` (with its q, k and latent norms and sinks) and `norms_per_layer` are of one layer,
    `dense_mlp` of one dense layer; `router` (with the gate of the shared experts), `experts` (all of
    them) and `shared_expert` of one MoE layer. `embedding` holds tokens, token types, patches, class
    token and embedding norm; `head` the untied LM head and whatever else follows the last norm.
    """

    embedding: int
    positions: int
    attention: int
    dense_mlp: int
    router: int
    experts: int
    shared_expert: int
    norms_per_layer: int
    final_norm: int
    head: int


def params(model: Model) -> Params:
    """The parameters of `model`, part by part."""
    dense = weights.block_weights(model, Layer())
    experts = weights.block_weights(model, Layer(moe=True)) if model.moe else ()

    def count(among: Weights, module: str, *names: str) -> int:
        return num_weights(w for w in among if w.module == module and (not names or w.op in names))

    norms = num_weights(w for w in dense if w.op.removeprefix("post_") in ("norm1", "norm2"))
    gate = count(experts, "shared_expert", "gate")
    positions = count(weights.embedding_weights(model), "embedding", "positions")
    final_norm = count(weights.head_weights(model), "head", "final_norm")
    return Params(
        embedding=num_weights(weights.embedding_weights(model)) - positions,
        positions=positions,
        attention=count(dense, "attention") - count(dense, "attention", "norm1", "post_norm1"),
        dense_mlp=count(dense, "mlp", "fc1", "fc2"),
        router=count(experts, "moe", "router", "balance_bias") + gate,
        experts=num_weights(w for w in experts if w.is_expert),
        shared_expert=count(experts, "shared_expert") - gate,
        norms_per_layer=norms,
        final_norm=final_norm,
        head=num_weights(weights.head_weights(model)) - final_norm,
    )


def num_mtp_params(model: Model) -> int:
    """Parameters of the modules of multi-token prediction, the shared embedding and head apart."""
    block = weights.block_weights(model, layer_kind(model, model.num_layers - 1))
    return model.mtp_layers * (num_weights(weights.mtp_weights(model)) + num_weights(block))

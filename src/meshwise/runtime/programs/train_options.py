"""What a training step on torch's own parts may be told, and what that makes: model, plan, workload, mesh.

Tensor parallelism with sequence parallelism by DTensor (`tp`), data parallelism by FSDP2 (`zero`,
`zero_group`), pipelines by torch.distributed.pipelining (`pp`, `vpp`, `schedule`), context parallelism by
torch's ring attention and an exchange of heads (`cp`, `cp_kind`, `ulysses`), experts spread over neighbours
by its functional all-to-all (`ep`), recomputation by torch.utils.checkpoint of modules, of the first layers
of each chunk, or of ops whose results are not kept (`recompute`), inputs of activation functions kept in fp8
(`act_input_dtype`), adapters beside frozen weights (`lora_rank`), AdamW or SGD.
Gradients of several microbatches add up before the optimizer steps. Dropout is left out. Layouts beyond 1d,
and what `RUN` leaves out, are priced by `meshwise estimate` and refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from meshwise.core.errors import ModelError, PlanError
from meshwise.machine.hardware import Cluster, find_cluster
from meshwise.model.architecture import Model, checked_model, layer_kinds
from meshwise.model.find import find_model
from meshwise.plan.mesh import Mesh, resolve
from meshwise.plan.plan import KEYS, Plan, plan_keys
from meshwise.plan.stages import chunks_of_rank
from meshwise.plan.workload import Workload
from meshwise.program.parts import FP8_TILE

RUN: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("implementation", ("fsdp2",), "it is made of PyTorch's own parts; use implementation=fsdp2"),
    ("dtype", ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8"), "use dtype=fp8"),
    (
        "optimizer",
        ("adam", "adam-fp32", "adam-bf16", "sgd", "none"),
        "it has torch's own; use optimizer=adam",
    ),
    ("param_dtype", ("bf16",), "it keeps wide weights; leave param_dtype out"),
    ("lora_targets", ((),), "it adapts all linear layers; leave lora_targets out"),
    ("frozen_dtype", (None,), "it keeps frozen weights as all others; leave frozen_dtype out"),
    ("offload_optimizer", (0.0, 1.0), "the host keeps all states or none; use offload_optimizer=1 or 0"),
    ("loss_fusion", (None, "none"), "its loss is PyTorch's own, not compiled; leave loss_fusion out"),
    ("imbalance", (1.0,), "it gives all experts as many tokens; leave imbalance out"),
)
"""Keys of a plan of which less runs than is priced: what runs, and what to do about the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line may choose."""

    model: Annotated[
        str, Meta(description="preset, or path of a config.json; like GPT, Llama, Mixtral, DeepSeek")
    ] = "llama2-7b"
    layers: Annotated[int, Meta(ge=0, description="cut the model to so many layers (0: all)")] = 0
    plan: Annotated[
        str,
        Meta(description="keys of layout=1d (meshwise list plan), as in tp=2,pp=2; dp is what they leave"),
    ] = "tp=1,zero=3"
    batch: Annotated[int, Meta(ge=0, description="sequences in a step (0: pp microbatches a replica)")] = 0
    microbatch: Annotated[int, Meta(ge=1, description="sequences at once on a rank")] = 1
    seq: Annotated[int, Meta(ge=2, description="tokens of a sequence")] = 2048
    steps: Annotated[
        int,
        Meta(ge=1, description="training steps on the same batch; optimizer states exist from the second"),
    ] = 2
    lr: Annotated[float, Meta(gt=0, description="learning rate of AdamW")] = 1e-3
    check: Annotated[
        bool, Meta(description="compare losses and gradients with one process that holds everything")
    ] = False
    seed: Annotated[int, Meta(description="seed of weights and tokens")] = 0


def check(options: Options, ranks: int) -> None:
    """PlanError, ModelError or WorkloadError for what does not fit or is not built."""
    plan, model, mesh = the_plan(options), the_model(options), the_mesh(options, ranks)
    if model.moe is None:
        return
    if plan.dispatch_dtype == "fp8" and model.hidden % FP8_TILE:
        raise PlanError(
            f"train: dispatch_dtype=fp8 scales {FP8_TILE} elements of a token together, which do not divide "
            f"the hidden width {model.hidden} of {model.name}; use dispatch_dtype=bf16"
        )
    alike = int(mesh.shard_ranks(1, mesh.expert_replicas))
    run = tokens_in_a_row(options)
    for what, number, divisor in (
        ("hidden width", model.hidden, alike),
        ("experts' width", model.moe.ffn_hidden // int(mesh.etp), alike),
        (f"seq {options.seq} leaves each rank {run} tokens in a row, whose choices", run * model.moe.top_k,
         model.moe.num_experts),
    ):  # fmt: skip
        if number % divisor:
            raise PlanError(f"train: {what} {number} does not divide by {divisor}, so that all are alike")


def the_plan(options: Options) -> Plan:
    """The plan; FSDP2, and so ZeRO 3, unless it says otherwise. PlanError for what does not run."""
    keys: dict[str, Any] = {"implementation": "fsdp2", "zero": 3}
    plan = Plan(**keys | plan_keys(options.plan))
    for key, run, hint in RUN:
        if (value := getattr(plan, key)) not in run:
            raise PlanError(
                f"the program train does not run {key}={KEYS[key].show(value)}, "
                f"which meshwise estimate prices; {hint}"
            )
    return plan


def the_model(options: Options) -> Model:
    """The model without dropout, cut to its first layers where asked; ModelError for another shape."""
    model = find_model(options.model)
    has = {
        "a gate of shared experts": model.moe is not None and model.moe.shared_gate,
        "a capacity of experts": model.moe is not None and model.moe.capacity_factor > 0,
        "experts with biases": model.moe is not None and model.linear_bias,
        "sparse attention": model.sparse is not None or any(layer.sparse for layer in model.layers),
        "experts of another width, or that compute nothing": model.moe is not None
        and model.moe.latent + model.moe.zero_experts > 0,
        "small layers beside the large ones": any(kind.sides for kind in layer_kinds(model)) or model.sides,
        "compressed queries and results": model.low_rank is not None or model.v_head_dim,
        f"the activation {model.activation}": model.activation not in ("swiglu", "gelu"),
        "norms of queries and keys": model.qk_norm,
        "norms without weights": not model.norm_weight,
        f"{model.positions} positions": model.positions not in ("rotary", "learned"),
        f"{model.num_norms} norms a block": model.num_norms != 2 or not model.final_norm,
        "a norm of embeddings": model.embedding_norm,
        "a parallel block": model.parallel_block,
        "sinks": model.sinks,
        "a sliding window": any(kind.window for kind in layer_kinds(model)),
        "attention that sees what follows": not model.causal,
        "no language-model head, or more than one": not model.lm_head or model.head_bias or model.pooler,
        "layer scales": model.layer_scale,
        "per-layer embeddings": model.per_layer is not None,
        "several residual streams": model.streams is not None,
        "layers of several sizes": any(
            kind.head_dim or kind.num_heads or kind.keys for kind in layer_kinds(model)
        ),
        "scores of distances": model.distances is not None,
        "an encoder": model.encoder is not None,
        "recurrent layers": model.recurrence is not None,
        "gated attention": model.attention_gate,
        "patches": model.patches is not None,
        "token types": model.token_types > 0,
        "capped scores or logits": model.attention_softcap or model.logit_softcap,
    }
    for what, is_there in has.items():
        if is_there:
            raise ModelError(
                f"train: {model.name} has {what}; choose one shaped like GPT, Llama, Mixtral or DeepSeek-V2"
            )
    layers = options.layers or model.num_layers
    return checked_model(replace(model, num_layers=layers, dropout_frac=0.0), model.name)


def the_workload(options: Options, ranks: int) -> Workload:
    """Batch, sequence and microbatch; by default as many microbatches as stages a replica."""
    plan = the_plan(options)
    dp = plan.data_parallel(ranks)
    batch = options.batch or dp * plan.pp * options.microbatch
    return Workload(batch=batch, seq=options.seq, microbatch=options.microbatch)


def tokens_in_a_row(options: Options) -> int:
    """Of a sequence, on each rank: a ring rank has two such parts."""
    plan = the_plan(options)
    has_ring = plan.cp_kind != "ulysses" and plan.cp > plan.ulysses
    return options.seq // plan.tp // plan.cp // (1 + has_ring)


def the_mesh(options: Options, ranks: int) -> Mesh:
    """The plan resolved on `ranks` ranks; what chip they are does not matter here."""
    return resolve(the_model(options), the_plan(options), the_workload(options, ranks), the_cluster(ranks))


def the_cluster(ranks: int) -> Cluster:
    """So many ranks."""
    return find_cluster(f"b200-sxm:{ranks}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a number stands on each axis of `AXES`: tp on neighbours, then cp, dp, pp."""

    tp: int
    cp: int
    dp: int
    pp: int

    @classmethod
    def of(cls, rank: int, plan: Plan, dp: int) -> Place:
        """The place of number `rank` in a world of dp replicas."""
        rest, tp = divmod(rank, plan.tp)
        rest, cp = divmod(rest, plan.cp)
        pp, dp_rank = divmod(rest, dp)
        return cls(tp, cp, dp_rank, pp)


def renumbered(number: int, sizes: Mapping[str, int], order: Sequence[str], new: Sequence[str]) -> int:
    """The number in the order `new` of what is `number` in `order`; axes from neighbours outwards."""
    place = {}
    for axis in order:
        number, place[axis] = divmod(number, sizes[axis])
    for axis in reversed(new):
        number = number * sizes[axis] + place[axis]
    return number


def rank_layers(options: Options, ranks: int, pp_rank: int) -> dict[int, range]:
    """The layers of each stage that a rank holds: round and round, down and back up, or from both ends."""
    plan, model = the_plan(options), the_model(options)
    held = chunks_of_rank(model, plan.pp, plan.vpp, plan.schedule, plan.stages, pp_rank)
    return {int(chunk.index): layers for chunk, layers in held}

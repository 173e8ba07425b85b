"""What a training step on torch's own parts may be told, and what that makes: model, plan, workload, mesh.

Tensor parallelism with sequence parallelism by DTensor (`tp`), data parallelism by FSDP2 (`zero`,
`zero_group`), pipelines by torch.distributed.pipelining (`pp`, `vpp`, `schedule`), context parallelism by
torch's ring attention and an exchange of heads (`cp`, `cp_kind`, `ulysses`), experts spread over neighbours
by its functional all-to-all (`ep`), recomputation by torch.utils.checkpoint of modules, of the first layers
of each chunk, or of ops whose results are not kept (`recompute`), adapters beside frozen weights
(`lora_rank`), AdamW or SGD.
Gradients of several microbatches add up before the optimizer steps. Dropout is left out. Layouts beyond 1d,
and what `catalog/train.toml` leaves out, are priced by `meshwise estimate` and refused here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from typing import Annotated, Any

from msgspec import Meta

from meshwise.core.errors import ModelError, PlanError
from meshwise.core.files import read_catalog
from meshwise.machine.hardware import Cluster, find_cluster
from meshwise.model.architecture import Model, checked_model, layer_kinds
from meshwise.model.find import find_model
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import DEFAULTS, KEYS, Plan, plan_keys
from meshwise.plan.rules import resolve
from meshwise.plan.stages import chunks_of_rank
from meshwise.plan.workload import Workload
from meshwise.runtime.torch_private import release

_CATALOG = read_catalog("train.toml")
_PARTS = _CATALOG["parts"]


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
    model, mesh = the_model(options), the_mesh(options, ranks)
    if model.moe is None:
        return
    alike = int(mesh.shard_ranks(mesh.expert_replicas))
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
    """The plan; FSDP2 of the torch at hand, and so ZeRO 3, unless it says otherwise. PlanError for what does
    not run.
    """
    software = "torch-2026" if release(version("torch")) >= (2, 15) else "torch-2024"
    keys: dict[str, Any] = {"implementation": "fsdp2", "zero": 3, "software": software}
    plan = Plan(**keys | plan_keys(options.plan))
    for key, own in _CATALOG["plan"].items():
        value = getattr(plan, key)
        if value is not None and value not in own.get("run", [DEFAULTS[key]]):
            raise PlanError(
                f"the program train does not run {key}={KEYS[key].show(value)}, "
                f"which meshwise estimate prices; {own['hint']}"
            )
    recomputed = _PARTS["recompute_modules"]
    if others := set(plan.recompute_modules).difference(recomputed):
        raise PlanError(
            f"the program train does not run recompute_modules={'+'.join(sorted(others))}, which meshwise "
            f"estimate prices; torch.utils.checkpoint runs {', '.join(recomputed)}"
        )
    return plan


def the_model(options: Options) -> Model:
    """The model without dropout, cut to its first layers where asked; ModelError for another shape."""
    model = find_model(options.model)
    stated = list(_beside(model, _PARTS["model"]))
    for kind in layer_kinds(model):
        stated += _beside(kind, _PARTS["layer"])
    if model.moe is not None:
        stated += [*_beside(model.moe, _PARTS["moe"]), *("experts with biases",) * model.linear_bias]
    stated += [f"the activation {model.activation}"] * (model.activation not in _PARTS["activation"])
    stated += [f"positions {model.positions}"] * (model.positions not in _PARTS["positions"])
    if stated:
        raise ModelError(
            f"train: {model.name} has {stated[0]}; choose one shaped like GPT, Llama, Mixtral or DeepSeek-V2"
        )
    layers = options.layers or model.num_layers
    return checked_model(replace(model, num_layers=layers, dropout_frac=0.0), model.name)


def _beside(part: Any, built: Sequence[str]) -> Iterator[str]:
    """What is stated of a part of a model beside what is `built`."""
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name not in built and value != field.default:
            yield f"{field.name}={value}" if isinstance(value, int | str) else field.name


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


def rank_layers(options: Options, ranks: int, pp_rank: int) -> dict[int, range]:
    """The layers of each stage that a rank holds: round and round, down and back up, or from both ends."""
    plan, model = the_plan(options), the_model(options)
    held = chunks_of_rank(model, plan.pp, plan.vpp, plan.schedule, plan.stages, pp_rank)
    return {int(chunk.index): layers for chunk, layers in held}

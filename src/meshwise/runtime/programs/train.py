"""A training step of a model like GPT, Llama, Mixtral or DeepSeek-V2 on torch's own parts, cut by a `Plan`.

Tensor parallelism with sequence parallelism by DTensor (`tp`), data parallelism by FSDP2 (`zero`,
`zero_group`), pipelines by torch.distributed.pipelining (`pp`, `vpp`, `schedule`), context parallelism by
torch's ring attention and an exchange of heads (`cp`, `cp_kind`, `ulysses`), experts spread over neighbours
by its functional all-to-all (`ep`), recomputation by torch.utils.checkpoint of modules, of the first layers
of each chunk, or of ops whose results are not kept (`recompute`), adapters beside frozen weights
(`lora_rank`), AdamW or SGD. Gradients of several microbatches add up before the optimizer steps. Dropout is
left out. Layouts beyond 1d, and what `catalog/train.toml` leaves out, are priced by `meshwise estimate` under
implementation=fsdp2 and refused here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from meshwise.core.errors import ModelError, PlanError
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse
from meshwise.estimate.one_plan import estimate as price
from meshwise.estimate.timing import overheads_of
from meshwise.machine.hardware import Cluster, find_cluster
from meshwise.model.architecture import Model, checked_model, layer_kinds
from meshwise.model.find import find_model
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import DEFAULTS, KEYS, Plan, plan_keys
from meshwise.plan.rules import resolve
from meshwise.plan.workload import Workload
from meshwise.program.implementation import stops_early
from meshwise.program.tape import Tape
from meshwise.runtime.programs import program_options
from meshwise.runtime.torch_private import release

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context

_CATALOG = read_catalog("train.toml")
_PARTS = _CATALOG["parts"]


Options = program_options(__name__, "train")
STATES = "totals"


def check(options: Any, ranks: int) -> None:
    """PlanError, ModelError or WorkloadError for what does not fit or is not built."""
    model, mesh = the_model(options), the_mesh(options, ranks)
    if model.moe is None:
        return
    alike = int(mesh.shard_ranks(mesh.expert_replicas))
    has_ring = mesh.plan.cp_kind != "ulysses" and mesh.plan.cp > mesh.plan.ulysses
    run = options.seq // mesh.plan.tp // mesh.plan.cp // (1 + has_ring)  # a ring rank has two such parts
    width, choices = model.moe.ffn_hidden // int(mesh.etp), run * model.moe.top_k
    named = {"seq": options.seq, "run": run, "choices": choices, "alike": alike, "width": width}
    refuse("program train", PlanError, "train: ", model=model, **named)


def the_plan(options: Any) -> Plan:
    """The plan; FSDP2 of the torch at hand, and so ZeRO 3, unless it says otherwise. PlanError for what does
    not run.
    """
    software = "torch-2026" if release(version("torch")) >= (2, 15) else "torch-2024"
    keys: dict[str, Any] = {"implementation": "fsdp2", "zero": 3, "software": software}
    plan = Plan(**keys | plan_keys(options.plan))
    run = {key: (None, *own.get("run", [DEFAULTS[key]])) for key, own in _CATALOG["plan"].items()}
    hints = {key: _CATALOG["plan"][key]["hint"] for key in run if getattr(plan, key) not in run[key]}
    recomputed = _PARTS["recompute_modules"]
    if not set(plan.recompute_modules).issubset(recomputed):
        hints["recompute_modules"] = f"torch.utils.checkpoint runs {', '.join(recomputed)}"
    for key, hint in hints.items():
        told = f"{key}={KEYS[key].show(getattr(plan, key))}, which meshwise estimate prices"
        raise PlanError(f"the program train does not run {told}; {hint}")
    return plan


def the_model(options: Any) -> Model:
    """The model without dropout, cut to its first layers where asked; ModelError for one of another shape."""
    model = find_model(options.model)
    stated = list(_beside(model, _PARTS["model"]))
    for kind in layer_kinds(model):
        stated += _beside(kind, _PARTS["layer"])
    if model.moe is not None:
        stated += [*_beside(model.moe, _PARTS["moe"]), *("experts with biases",) * model.linear_bias]
    stated += [f"the activation {model.activation}"] * (model.activation not in _PARTS["activation"])
    stated += [f"positions {model.positions}"] * (model.positions not in _PARTS["positions"])
    refuse("model of program train", ModelError, "train: ", model=model, stated=stated)
    layers = options.layers or model.num_layers
    return checked_model(replace(model, num_layers=layers, dropout_frac=0.0), model.name)


def _beside(part: Any, built: Sequence[str]) -> Iterator[str]:
    """What is stated of a part of a model beside what is `built`."""
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name not in built and value != field.default:
            yield f"{field.name}={value}" if isinstance(value, int | str) else field.name


def the_workload(options: Any, ranks: int) -> Workload:
    """Batch, sequence and microbatch; by default as many microbatches as stages a replica."""
    plan = the_plan(options)
    batch = options.batch or plan.data_parallel(ranks) * plan.pp * options.microbatch
    return Workload(batch=batch, seq=options.seq, microbatch=options.microbatch)


def the_mesh(options: Any, ranks: int) -> Mesh:
    """The plan resolved on `ranks` ranks; what chip they are does not matter here."""
    return resolve(the_model(options), the_plan(options), the_workload(options, ranks), the_cluster(ranks))


def the_cluster(ranks: int) -> Cluster:
    """So many ranks."""
    return find_cluster(f"b200-sxm:{ranks}")


def estimate(options: Any, tape: Tape) -> None:
    """Write on `tape` what the closed form says of this rank: its ledger, `steps` times over."""
    ranks, plan = tape.world_size, the_plan(options)
    cluster, workload = the_cluster(ranks), the_workload(options, ranks)
    overheads = replace(overheads_of(cluster.chip, plan), stops_early=1.0 * stops_early(plan))
    priced, on_device = (
        price(the_model(options), cluster, each, workload, overheads=overheads)
        for each in (plan, replace(plan, offload_optimizer=0.0))
    )
    tape.priced(priced.rank_ledger(tape.rank), options.steps)
    of_rank = on_device.rank_step(tape.rank).stages[-1]
    held = {"parameters": of_rank.memory.weights, "gradients": of_rank.gradient_bytes}
    tape.states(held | {"optimizer": of_rank.memory.optimizer})
    tape.op("activations", module="states", phase="step", saved_bytes=float(of_rank.kept_bytes))


def main(options: Any, context: Context) -> dict[str, Any]:
    """`steps` steps; returns the losses and the bytes of parameters, gradients and optimizer states."""
    import torch
    from torch.profiler import record_function

    from meshwise.runtime.programs.training import Trainer, local_bytes

    recorder = context.recorder
    mesh = the_mesh(options, context.world_size)
    trainer = Trainer(options, the_plan(options), the_model(options), mesh, context)
    torch.set_float32_matmul_precision("high" if trainer.plan.dtype == "tf32" else "highest")
    with recorder.setup():
        parameters = trainer.parameters()
        recorder.weights(*parameters)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        kind = torch.optim.SGD if trainer.plan.optimizer == "sgd" else torch.optim.AdamW
        optimizer = kind(trained, lr=options.lr, foreach=False)
    losses = []
    for number in range(options.steps):
        with record_function(f"ProfilerStep#{number}"):
            losses.append(trainer.forward_backward())
            grad_bytes = local_bytes([p.grad for p in parameters if p.grad is not None])
            with recorder.phase("optimizer"):
                if trainer.plan.optimizer != "none":
                    optimizer.step()
            for parameter in parameters:
                parameter.grad = None
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    held = {"parameters": local_bytes(parameters), "gradients": grad_bytes, "optimizer": local_bytes(states)}
    recorder.tape.states(held)
    recorder.tape.op("activations", module="states", phase="step", saved_bytes=recorder.kept.peak_bytes)
    return {"losses": losses, "bytes": held}

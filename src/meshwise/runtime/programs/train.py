"""A training step of a GPT-, Llama- or Mixtral-shaped model on torch's own parts, cut as a `Plan` says.

Tensor parallelism with sequence parallelism by DTensor (`tp`), sharded data parallelism by FSDP2 (`zero=3`),
pipelines by torch.distributed.pipelining (`pp`, `vpp`, `schedule`), context parallelism by torch's ring
attention (`cp`, `cp_kind`), experts spread over neighbours by its functional all-to-all (`ep`), recomputation
by torch.utils.checkpoint (`recompute`), AdamW. Gradients of several microbatches add up before the optimizer
steps. Dropout is left out. Other plans are priced by `meshwise estimate` and refused here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from meshwise.core.errors import ModelError, PlanError
from meshwise.core.units import DTYPE_BYTES
from meshwise.cost.simulate import KINDS, simulate
from meshwise.machine.hardware import find_cluster
from meshwise.model.architecture import Model, checked_model, is_moe_layer
from meshwise.model.find import find_model
from meshwise.plan.mesh import Mesh, resolve
from meshwise.plan.plan import Plan, parse_plan
from meshwise.plan.stages import FOLDED, ROUND, V_SHAPED, chunks, rank_of_chunk
from meshwise.plan.workload import Workload
from meshwise.program.parts import cut_of
from meshwise.program.tape import Tape
from meshwise.program.train import write_train
from meshwise.program.training import Piece, Training

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context


STATES_TOTALS_ONLY = True

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v")
CP_KINDS = ("ring", "all_gather")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line may choose."""

    model: Annotated[str, Meta(description="preset, or path of a config.json; like GPT, Llama, Mixtral")] = (
        "llama2-7b"
    )
    layers: Annotated[int, Meta(ge=0, description="cut the model to so many layers (0: all)")] = 0
    plan: Annotated[
        str,
        Meta(
            description="tp, cp, ep, pp, vpp, schedule=gpipe|1f1b|interleaved|zb-v, cp_kind=ring|all_gather, "
            "recompute=none|selective|full, dtype=bf16|fp16|fp32|fp64, joined by commas as in tp=2,pp=2; "
            "dp is what they leave"
        ),
    ] = "tp=1,zero=3"
    batch: Annotated[int, Meta(ge=0, description="sequences in a step (0: pp microbatches a replica)")] = 0
    microbatch: Annotated[int, Meta(ge=1, description="sequences at once on a rank")] = 1
    seq: Annotated[int, Meta(ge=2, description="tokens of a sequence")] = 2048
    steps: Annotated[int, Meta(ge=1, description="training steps on the same batch")] = 1
    lr: Annotated[float, Meta(gt=0, description="learning rate of AdamW")] = 1e-3
    check: Annotated[
        bool, Meta(description="compare losses and gradients with one process that holds everything")
    ] = False
    seed: Annotated[int, Meta(description="seed of weights and tokens")] = 0


def check(options: Options, ranks: int) -> None:
    """PlanError, ModelError or WorkloadError for what does not fit or is not built."""
    plan, model = the_plan(options), the_model(options)
    plan.data_parallel(ranks)
    built: dict[str, tuple[Any, ...]] = {
        "layout": ("1d",), "zero": (3,), "zero_group": (None,), "optimizer": ("adam",), "lora_rank": (0,),
        "attention": ("flash",), "recompute_layers": (None,), "schedule": SCHEDULES, "cp_kind": CP_KINDS,
        "dtype": ("bf16", "fp16", "fp32", "fp64"), "dispatch": ("per_expert",),
        "imbalance": (1.0,), "placement": (Plan().placement,),
    }  # fmt: skip
    for name, values in built.items():
        value = getattr(plan, name)
        if value not in values and not (name == "schedule" and plan.pp == 1):
            known = " or ".join(f"{name}={known}" for known in values)
            raise PlanError(f"train: the program is built for {known}, not {name}={value}")
    if not plan.sequence_parallel and plan.tp > 1:
        raise PlanError("train: the program is built for sp=1 with tp > 1, not sp=0")
    if plan.vpp > 1 and plan.pp == 1:
        raise PlanError(f"train: vpp={plan.vpp} needs a pipeline; use pp=2 or more, or leave vpp out")
    parts = plan.tp * (2 * plan.cp if plan.cp > 1 else 1)
    for what, number, divisor in (
        ("seq", options.seq, parts), ("heads", model.num_heads, plan.tp),
        ("kv heads", model.num_kv_heads, plan.tp), ("ffn width", model.ffn_hidden, plan.tp),
        ("vocabulary", model.vocab, plan.tp),
    ):  # fmt: skip
        if number % divisor:
            by = f"tp={plan.tp}" if divisor == plan.tp else f"{divisor}: two parts for each rank of cp x tp"
            raise PlanError(f"train: {what} {number} does not divide by {by}")
    if model.positions == "learned" and options.seq > model.max_seq:
        raise PlanError(f"train: seq {options.seq} exceeds the {model.max_seq} positions of {model.name}")
    if plan.pp > 1 and plan.schedule == "zb-v" and plan.recompute != "none":
        raise PlanError(
            f"train: schedule=zb-v of torch would recompute once for each weight; use recompute=none, not "
            f"recompute={plan.recompute}"
        )
    on = the_mesh(options, ranks)
    _check_experts(options, on)
    if plan.pp > 1:
        num = int(on.num_microbatches)
        if plan.schedule == "1f1b" and num < plan.pp:
            raise PlanError(
                f"train: schedule=1f1b of torch needs at least pp={plan.pp} microbatches, not {num}"
            )


def _check_experts(options: Options, on: Mesh) -> None:
    plan, model = the_plan(options), the_model(options)
    if model.moe is None:
        if plan.ep > 1:
            raise PlanError(f"train: {model.name} has no experts to spread over ep={plan.ep}; leave ep out")
        return
    if on.etp > 1:
        raise PlanError("train: the program does not cut experts; add etp=1 to the plan")
    alike = int(on.expert_replicas)
    run = options.seq // plan.tp // (2 * plan.cp if plan.cp > 1 else 1)
    for what, number, divisor in (
        ("experts", model.moe.num_experts, plan.ep),
        ("hidden width", model.hidden, alike), ("experts' width", model.moe.ffn_hidden, alike),
        (f"seq {options.seq} leaves each rank {run} tokens in a row, whose choices", run * model.moe.top_k,
         model.moe.num_experts),
    ):  # fmt: skip
        if number % divisor:
            raise PlanError(f"train: {what} {number} does not divide by {divisor}, so that all are alike")


def the_plan(options: Options) -> Plan:
    """The plan; ZeRO 3 unless it says otherwise."""
    text = options.plan
    return parse_plan(text if text.endswith(".toml") or "zero=" in text else f"{text},zero=3")


def the_model(options: Options) -> Model:
    """The model without dropout, cut to its first layers where asked; ModelError for another shape."""
    model = find_model(options.model)
    has = {
        "shared experts": model.moe is not None and model.moe.shared_ffn_hidden > 0,
        "a router with biases or gates": model.moe is not None
        and (model.moe.router_bias or model.moe.balance_bias or model.moe.shared_gate),
        "a capacity of experts": model.moe is not None and model.moe.capacity_factor > 0,
        "experts with biases": model.moe is not None and model.linear_bias,
        "latent attention": model.mla is not None,
        f"the activation {model.activation}": model.activation not in ("swiglu", "gelu"),
        "norms of queries and keys": model.qk_norm,
        "norms without weights": not model.norm_weight,
        f"{model.positions} positions": model.positions not in ("rotary", "learned"),
        f"{model.num_norms} norms a block": model.num_norms != 2 or not model.final_norm,
        "a norm of embeddings": model.embedding_norm,
        "a parallel block": model.parallel_block,
        "sinks": model.sinks,
        "a sliding window": model.sliding_window > 0,
        "attention that sees what follows": not model.causal,
        "no language-model head, or more than one": not model.lm_head or model.head_bias or model.pooler,
        "patches": model.patches is not None,
        "token types": model.token_types > 0,
        "multi-token prediction": model.mtp_layers > 0,
        "capped scores or logits": model.attention_softcap or model.logit_softcap,
    }
    for what, is_there in has.items():
        if is_there:
            raise ModelError(f"train: {model.name} has {what}; choose one shaped like GPT, Llama or Mixtral")
    layers = options.layers or model.num_layers
    return checked_model(replace(model, num_layers=layers, dropout_frac=0.0), model.name)


def the_workload(options: Options, ranks: int) -> Workload:
    """Batch, sequence and microbatch; by default as many microbatches as stages a replica."""
    plan = the_plan(options)
    dp = plan.data_parallel(ranks)
    batch = options.batch or dp * plan.pp * options.microbatch
    return Workload(batch=batch, seq=options.seq, microbatch=options.microbatch)


def the_mesh(options: Options, ranks: int) -> Mesh:
    """The plan resolved on `ranks` ranks; what chip they are does not matter here."""
    cluster = find_cluster(f"h100-80g-sxm:{ranks}")
    return resolve(the_model(options), the_plan(options), the_workload(options, ranks), cluster)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands on each axis: tp on neighbours, then cp, dp, pp."""

    tp: int
    cp: int
    dp: int
    pp: int

    @classmethod
    def of(cls, rank: int, plan: Plan, dp: int) -> Place:
        """The place of `rank` in a world of dp replicas."""
        rest, tp = divmod(rank, plan.tp)
        rest, cp = divmod(rest, plan.cp)
        pp, dp_rank = divmod(rest, dp)
        return cls(tp, cp, dp_rank, pp)


def rank_layers(options: Options, ranks: int, pp_rank: int) -> dict[int, range]:
    """The layers of each stage that a rank of the pipeline holds: round and round, or down and back up."""
    plan = the_plan(options)
    ends = [0]
    for chunk in chunks(the_model(options), plan.pp, plan.vpp, plan.stages):
        ends.append(ends[-1] + int(chunk.num_layers))
    folding = FOLDED if plan.schedule in V_SHAPED else ROUND
    stages = [i for i in range(plan.pp * plan.vpp) if rank_of_chunk(i, plan.pp, folding) == pp_rank]
    return {stage: range(ends[stage], ends[stage + 1]) for stage in stages}


def estimate(options: Options, tape: Tape) -> None:
    """Write the closed form of `main` on `tape`: matmuls, attention, collectives, states, activations."""
    write_train(the_training(options, tape.rank, tape.world_size), tape)


def the_training(options: Options, rank: int, ranks: int) -> Training:
    """The numbers that the closed form takes, of one rank."""
    plan, model, on = the_plan(options), the_model(options), the_mesh(options, ranks)
    place = Place.of(rank, plan, int(on.dp))
    held = rank_layers(options, ranks, place.pp)
    return Training(
        model=model,
        cut=cut_of(on),
        tp=plan.tp,
        cp=plan.cp,
        pp=plan.pp,
        ep=plan.ep,
        experts_shards=int(on.expert_replicas),
        shards=int(on.dp) * plan.cp,
        shard=place.dp * plan.cp + place.cp,
        ring_rank=place.cp,
        pieces={stage: piece_of(layers, model) for stage, layers in held.items()},
        order=rank_order(plan, place.pp, int(on.num_microbatches)),
        microbatches=int(on.num_microbatches),
        steps=options.steps,
        recompute=plan.recompute,
        cp_kind=plan.cp_kind,
        dtype=plan.dtype,
        elem_bytes=int(DTYPE_BYTES[plan.dtype]),
        state_bytes=8 if plan.dtype == "fp64" else 4,
    )


def piece_of(layers: range, model: Model) -> Piece:
    """A stage of `layers`, with the ends of the model that it has."""
    return Piece(
        has_experts=tuple(is_moe_layer(model, layer) for layer in layers),
        has_embedding=layers.start == 0,
        has_head=layers.stop == model.num_layers,
    )


def rank_order(plan: Plan, pp_rank: int, num_microbatches: int) -> tuple[tuple[str, int], ...]:
    """What a rank does in a step: (F, B, I or W, which of its pieces)."""
    if plan.pp == 1:
        return (("F", 0), ("B", 0)) * num_microbatches
    played = simulate(plan.schedule, 1.0, 1.0, 1.0, pp=plan.pp, m=num_microbatches, v=plan.vpp)
    mine = played.rank == pp_rank
    actions = zip(played.kind[mine], played.chunk[mine], strict=True)
    return tuple((KINDS[kind], int(chunk)) for kind, chunk in actions)


def main(options: Options, context: Context) -> dict[str, Any]:
    """`steps` steps; returns the losses and the bytes of parameters, gradients and optimizer states.

    With `--check` also how far the first loss and its gradients are from one process that holds everything.
    """
    import torch

    from meshwise.runtime.programs.parallelize import local_bytes
    from meshwise.runtime.programs.train_reference import differences
    from meshwise.runtime.programs.training import Trainer

    recorder = context.recorder
    trainer = Trainer(options, context)
    with recorder.setup():
        parameters = trainer.parameters()
        recorder.weights(*parameters)
        optimizer = torch.optim.AdamW(parameters, lr=options.lr, foreach=False)
    losses, found = [], {}
    for number in range(options.steps):
        loss = trainer.forward_backward()
        grad_bytes = local_bytes([p.grad for p in parameters if p.grad is not None])
        if options.check and number == 0 and loss is not None:
            with recorder.setup():
                found = {"differences": differences(trainer, loss)}
        with recorder.phase("optimizer"):
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    held = {"parameters": local_bytes(parameters), "gradients": grad_bytes, "optimizer": local_bytes(states)}
    for name, size_bytes in held.items():
        recorder.tape.op(name, module="states", phase="step", weight_bytes=size_bytes)
    recorder.tape.op("activations", module="states", phase="step", saved_bytes=recorder.kept_peak_bytes())
    return {"losses": losses, "bytes": held, **found}

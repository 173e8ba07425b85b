"""A training step of a Llama-shaped model on torch's own parts, cut as a `Plan` says.

Tensor parallelism with sequence parallelism by DTensor (`tp`), sharded data parallelism by FSDP2 (`zero=3`),
AdamW. Gradients of several microbatches add up before the optimizer steps. Plans with other axes are priced
by `meshwise estimate` and refused here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from meshwise.errors import ModelError, PlanError
from meshwise.layout.tape import Tape
from meshwise.layout.train import Training, write_train
from meshwise.model import Model, checked_model, find_model
from meshwise.plan import Plan, parse_plan
from meshwise.units import DTYPE_BYTES
from meshwise.workload import workload

if TYPE_CHECKING:
    from meshwise.programs.context import Context


STATES_TOTALS_ONLY = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line may choose."""

    model: Annotated[str, Meta(description="preset, or path of a config.json; Llama-shaped")] = "llama2-7b"
    layers: Annotated[int, Meta(ge=0, description="cut the model to so many layers (0: all)")] = 0
    plan: Annotated[str, Meta(description="tp=2,zero=3,dtype=bf16; dp is what tp leaves")] = "tp=1,zero=3"
    batch: Annotated[int, Meta(ge=0, description="sequences in a step (0: one a data-parallel rank)")] = 0
    microbatch: Annotated[int, Meta(ge=1, description="sequences at once on a rank")] = 1
    seq: Annotated[int, Meta(ge=2, description="tokens of a sequence")] = 2048
    steps: Annotated[int, Meta(ge=1, description="training steps on the same batch")] = 1
    lr: Annotated[float, Meta(gt=0, description="learning rate of AdamW")] = 1e-3
    seed: Annotated[int, Meta(description="seed of weights and tokens")] = 0


def check(options: Options, ranks: int) -> None:
    """PlanError, ModelError or WorkloadError for what does not fit or is not built."""
    plan, model = the_plan(options), the_model(options)
    dp = plan.data_parallel(ranks)
    built = {"pp": 1, "cp": 1, "ep": 1, "layout": "1d", "recompute": "none", "zero": 3, "optimizer": "adam"}
    for name, value in built.items():
        if getattr(plan, name) != value:
            raise PlanError(
                f"train: the program is built for {name}={value}, not {name}={getattr(plan, name)}"
            )
    if plan.dtype not in ("bf16", "fp16", "fp32"):
        raise PlanError(
            f"train: dtype={plan.dtype} is not one that the program computes in; use bf16, fp16 or fp32"
        )
    if not plan.sequence_parallel and plan.tp > 1:
        raise PlanError("train: the program is built for sp=1 with tp > 1, not sp=0")
    for what, number in (("seq", options.seq), ("heads", model.num_heads), ("kv heads", model.num_kv_heads),
                         ("ffn width", model.ffn_hidden), ("vocabulary", model.vocab)):  # fmt: skip
        if number % plan.tp:
            raise PlanError(f"train: {what} {number} does not divide by tp={plan.tp}")
    workload(options.batch or dp * options.microbatch, options.seq, options.microbatch).num_microbatches(dp)


def the_plan(options: Options) -> Plan:
    """The plan; ZeRO 3 unless it says otherwise."""
    text = options.plan
    return parse_plan(text if text.endswith(".toml") or "zero=" in text else f"{text},zero=3")


def the_model(options: Options) -> Model:
    """The model, cut to its first layers where asked; ModelError if it is not shaped like Llama."""
    model = find_model(options.model)
    has = {
        "a mixture of experts": model.moe is not None,
        "latent attention": model.mla is not None,
        "biases": model.linear_bias or model.qkv_bias or model.out_bias,
        "tied embeddings": model.tied_embedding,
        "an MLP that is not SwiGLU": model.activation != "swiglu",
        f"{model.norm}": model.norm != "rmsnorm",
        "norms of queries and keys": model.qk_norm,
        f"{model.positions} positions": model.positions != "rotary",
    }
    for what, is_there in has.items():
        if is_there:
            raise ModelError(f"train: {model.name} has {what}; choose a Llama-shaped model")
    if options.layers:
        model = checked_model(replace(model, num_layers=options.layers), model.name)
    return model


def estimate(options: Options, tape: Tape) -> None:
    """Write the closed form of `main` on `tape`: its matmuls, attention, collectives and states."""
    plan = the_plan(options)
    dp = plan.data_parallel(tape.world_size)
    training = Training(
        model=the_model(options),
        tp=plan.tp,
        dp=dp,
        batch=options.microbatch,
        seq=options.seq,
        microbatches=(options.batch or dp * options.microbatch) // (dp * options.microbatch),
        steps=options.steps,
        dtype=plan.dtype,
        elem_bytes=int(DTYPE_BYTES[plan.dtype]),
    )
    write_train(training, tape)


def main(options: Options, context: Context) -> dict[str, Any]:
    """`steps` steps; returns the losses and the bytes of parameters, gradients and optimizer states."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel
    from torch.nn import functional as F

    from meshwise.programs.llama import Decoder, cut_tensors, local_bytes, shard_states

    model, plan, recorder = the_model(options), the_plan(options), context.recorder
    dp = plan.data_parallel(context.world_size)
    mesh = context.mesh(dp=dp, tp=plan.tp)
    data_group = mesh.get_group("dp")
    num = (options.batch or dp * options.microbatch) // (dp * options.microbatch)
    with recorder.setup():
        with torch.device(context.device):
            torch.manual_seed(options.seed)
            decoder = Decoder(model, options.seq, recorder)
        if plan.tp > 1:
            cut_tensors(decoder, mesh["tp"])
        shard_states(decoder, mesh["dp"], context.dtype(plan.dtype))
        parameters = list(decoder.parameters())
        recorder.weights(*parameters)
        optimizer = torch.optim.AdamW(parameters, lr=options.lr, foreach=False)
        shape = dp, num, options.microbatch, options.seq + 1
        tokens = torch.randint(model.vocab, shape, device=context.device)[context.rank // plan.tp]
    losses = []
    for _ in range(options.steps):
        total = torch.zeros((), device=context.device)
        for number, part in enumerate(tokens):
            decoder.set_requires_gradient_sync(number == num - 1)
            with loss_parallel():
                logits = decoder(part[:, :-1])
                with recorder.section("loss"):
                    loss = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten()) / num
                    if isinstance(loss, DTensor):
                        total += loss.detach().full_tensor()
                    else:
                        total += loss.detach()
                loss.backward()
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        with recorder.phase("optimizer"):
            optimizer.step()
        grad_bytes = local_bytes(grads)
        del grads, logits, loss
        optimizer.zero_grad()
        with recorder.setup():
            dist.all_reduce(total, op=dist.ReduceOp.AVG, group=data_group)
        losses.append(None if context.is_fake else float(total))
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    held = {"parameters": local_bytes(parameters), "gradients": grad_bytes, "optimizer": local_bytes(states)}
    for name, size_bytes in held.items():
        recorder.tape.op(name, module="states", phase="step", weight_bytes=size_bytes)
    return {"losses": losses, "bytes": held}

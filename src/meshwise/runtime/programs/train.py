"""A training step of a model like GPT, Llama, Mixtral or DeepSeek-V2 on torch's own parts, cut by a `Plan`.

`train_options` says which plans; `meshwise estimate` prices them under implementation=fsdp2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshwise.estimate.one_plan import estimate as price
from meshwise.machine.overheads import find_overheads
from meshwise.program.tape import Tape
from meshwise.runtime.programs.train_options import (
    Options,
    check,
    the_cluster,
    the_model,
    the_plan,
    the_workload,
)

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context

__all__ = ["Options", "check", "estimate", "main"]

STATES_TOTALS_ONLY = True


def estimate(options: Options, tape: Tape) -> None:
    """Write on `tape` what the closed form says of this rank: its ledger, `steps` times over."""
    ranks, plan = tape.world_size, the_plan(options)
    cluster, workload = the_cluster(ranks), the_workload(options, ranks)
    # as `Setting.again` recomputes
    recomputes_all = replace(find_overheads(cluster.chip, plan.software), stops_early=0.0)
    priced = price(the_model(options), cluster, plan, workload, overheads=recomputes_all)
    tape.priced(priced.rank_ledger(tape.rank), options.steps)
    of_rank = priced.rank_step(tape.rank).stages[-1]
    held = {"parameters": of_rank.memory.weights, "gradients": of_rank.gradient_bytes}
    tape.states(held | {"optimizer": of_rank.memory.optimizer})
    tape.op("activations", module="states", phase="step", saved_bytes=float(of_rank.kept_bytes))


def main(options: Options, context: Context) -> dict[str, Any]:
    """`steps` steps; returns the losses and the bytes of parameters, gradients and optimizer states.

    With `--check` also how far the first loss and its gradients are from one process that holds everything.
    """
    import torch
    from torch.profiler import record_function

    from meshwise.runtime.programs.parallelize import local_bytes
    from meshwise.runtime.programs.train_reference import differences
    from meshwise.runtime.programs.training import Trainer

    recorder = context.recorder
    trainer = Trainer(options, context)
    torch.set_float32_matmul_precision("high" if trainer.plan.dtype == "tf32" else "highest")
    with recorder.setup():
        parameters = trainer.parameters()
        recorder.weights(*parameters)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        kind = torch.optim.SGD if trainer.plan.optimizer == "sgd" else torch.optim.AdamW
        optimizer = kind(trained, lr=options.lr, foreach=False)
    losses, found = [], {}
    for number in range(options.steps):
        with record_function(f"ProfilerStep#{number}"):
            loss = trainer.forward_backward()
            grad_bytes = local_bytes([p.grad for p in parameters if p.grad is not None])
            if options.check and number == 0 and loss is not None:
                with recorder.setup():
                    found = {"differences": differences(trainer, loss)}
            with recorder.phase("optimizer"):
                if trainer.plan.optimizer != "none":
                    optimizer.step()
            for parameter in parameters:
                parameter.grad = None
        losses.append(loss)
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    held = {"parameters": local_bytes(parameters), "gradients": grad_bytes, "optimizer": local_bytes(states)}
    recorder.tape.states(held)
    recorder.tape.op("activations", module="states", phase="step", saved_bytes=recorder.kept_peak_bytes())
    return {"losses": losses, "bytes": held, **found}

"""A step of several microbatches through the stages of a pipeline: torch.distributed.pipelining.

A rank holds one stage, or several that take turns (interleaved), or the first half of the model down and
the second back up (zb-v), or a stage for each of two ways (dualpipe). The stages state the shapes they pass
on, so nothing is exchanged to find them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.stage import InferenceMode

from meshwise.runtime.programs.context import Context
from meshwise.runtime.programs.dualpipe import ScheduleDualPipe, StageOfOneWay
from meshwise.runtime.recorder import OpRecorder

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb-h1": pipelining.ScheduleInterleavedZeroBubble,
    "zb-v": pipelining.ScheduleZBVZeroBubble,
    "dualpipe": ScheduleDualPipe,
    "dualpipe-v": pipelining.ScheduleDualPipeV,
}
"""torch's schedules, and one on its runtime, by the names of a `Plan`."""
REDUCING = ("backward_weight_one_chunk", "perform_reduce_grad", "start_gradient_reduction")
"""What a stage does for gradients of weights alone, and for their reduction (the last from torch 2.15)."""
VOTES = ("_warmup_p2p", "_initialize_pipeline_distributed_state")
"""How the stages agree on whether they know their shapes, which they do: up to torch 2.14, and from 2.15."""


def make_schedule(
    name: str, pieces: Mapping[int, nn.Module], num_stages: int, num_microbatches: int,
    passed: tuple[tuple[int, ...], torch.dtype], group: dist.ProcessGroup, context: Context,
) -> Callable[..., list[Tensor]]:  # fmt: skip
    """A function of tokens and labels that runs all microbatches, forward and backward.

    `pieces`: this rank's modules by stage; the last stage's returns its loss. `passed`: shape and dtype of
    what a stage hands on. The
    function returns the losses of the microbatches, empty on other ranks.
    """
    shape, dtype = passed
    between = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    tokens = torch.empty(shape[:2], dtype=torch.int64, device="meta")
    loss = torch.empty((), device="meta", requires_grad=True)
    ways, stage_type = (2, StageOfOneWay) if name == "dualpipe" else (1, pipelining.PipelineStage)
    num_each_way = num_microbatches // ways
    stages = [
        stage_type(
            module, index, num_stages, context.device, group=group,
            input_args=between if index else tokens,
            output_args=between if index < num_stages - 1 else loss,
        )
        for index, module in pieces.items()
    ]  # fmt: skip
    kind = SCHEDULES[name]
    is_single = name in ("gpipe", "1f1b")
    schedule = kind(
        stages[0] if is_single else stages, num_each_way, scale_grads=False,
        loss_fn=lambda loss, _: loss / num_each_way,
    )  # fmt: skip
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
        _end_backward_of_weights(stage)
        for method in filter(partial(hasattr, stage), REDUCING):
            setattr(stage, method, _in_backward(getattr(stage, method), context.recorder))
    for vote in VOTES:
        setattr(schedule, vote, lambda *_: None)

    def step(tokens: Tensor, labels: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        entering, leaving = tokens.chunk(ways), labels.chunk(ways)
        at_end = min(dist.get_rank(group), ways - 1)  # where one way begins another ends
        inputs = (entering[at_end],) if 0 in pieces else ()
        targets = leaving[ways - 1 - at_end]
        ends = {"target": targets, "labels": targets} if num_stages - 1 in pieces else {}
        schedule.step(*inputs, losses=losses, return_outputs=False, **ends)
        return losses

    return step


def _end_backward_of_weights(stage: pipelining.PipelineStage) -> None:
    """FSDP adds up gradients in fp32, or reduces them, behind a backward of weights alone: it misses it."""
    backward_of_weights = stage.backward_weight_one_chunk

    def run(*args: Any, **kwargs: Any) -> None:
        all_states = stage.submod._get_fsdp_state()._state_ctx
        all_states.post_backward_final_callback_queued = True  # else reduced when some of a group are there
        backward_of_weights(*args, **kwargs)
        all_states.post_backward_final_callback_queued = False
        for module in stage.submod.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                for group in state._fsdp_param_groups:
                    group.post_backward()
                # else a forward counts as recomputed
                state._training_state = type(state._training_state).IDLE

    stage.backward_weight_one_chunk = run


def _in_backward(run: Callable[..., None], recorder: OpRecorder) -> Callable[..., None]:
    """What a pipeline runs outside autograd for gradients of weights, as part of the backward."""

    def in_phase(*args: Any, **kwargs: Any) -> None:
        with recorder.phase("backward"):
            run(*args, **kwargs)

    return in_phase

"""A step of several microbatches through the stages of a pipeline: torch.distributed.pipelining.

A rank holds one stage, or several that take turns (interleaved), or the first half of the model down and
the second back up (zb-v). The stages state the shapes they pass on, so nothing is exchanged to find them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.stage import InferenceMode

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context, Recorder

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}
"""torch's schedules by the names of a `Plan`."""


def make_schedule(
    name: str, pieces: Mapping[int, nn.Module], num_stages: int, num_microbatches: int,
    passed: tuple[tuple[int, ...], torch.dtype], group: dist.ProcessGroup, context: Context,
) -> Callable[..., list[Tensor]]:  # fmt: skip
    """A function of tokens and labels that runs all microbatches, forward and backward.

    `pieces`: this rank's modules by stage; the last stage's returns its loss. `passed`: shape and dtype of
    what a stage hands on. The function returns the losses of the microbatches, empty on other ranks.
    """
    shape, dtype = passed
    between = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    tokens = torch.empty(shape[:2], dtype=torch.int64, device="meta")
    loss = torch.empty((), device="meta", requires_grad=True)
    stages = [
        PipelineStage(
            module, index, num_stages, context.device, group=group,
            input_args=between if index else tokens,
            output_args=between if index < num_stages - 1 else loss,
        )
        for index, module in pieces.items()
    ]  # fmt: skip
    kind = SCHEDULES[name]
    is_single = name in ("gpipe", "1f1b")
    schedule = kind(
        stages[0] if is_single else stages, num_microbatches, scale_grads=False,
        loss_fn=lambda loss, _: loss / num_microbatches,
    )  # fmt: skip
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
        stage.perform_reduce_grad = _in_backward(stage.perform_reduce_grad, context.recorder)
    schedule._warmup_p2p = lambda *_: None  # the stages vote on whether they know their shapes: they do

    def step(tokens: Tensor, labels: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        inputs = (tokens,) if 0 in pieces else ()
        ends = {"target": labels, "labels": labels} if num_stages - 1 in pieces else {}
        schedule.step(*inputs, losses=losses, return_outputs=False, **ends)
        return losses

    return step


def _in_backward(reduce: Callable[[int], None], recorder: Recorder) -> Callable[[int], None]:
    """FSDP's reductions, which a pipeline calls when all its backwards are through, as part of them."""

    def run(factor: int) -> None:
        with recorder.phase("backward"):
            reduce(factor)

    return run

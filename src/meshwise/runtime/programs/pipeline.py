"""A step of several microbatches through the stages of a pipeline: torch.distributed.pipelining.

A rank holds one stage, or several that take turns (interleaved), or the first half of the model down and
the second back up (zb-v), or a stage for each of two ways (dualpipe). The stages state the shapes they pass
on, so nothing is exchanged to find them.

Under DualPipe half of the microbatches enter at each end (arXiv 2412.19437, section 3.2.1). Rank i holds
stage i for those that enter at the first rank, and stage pp - 1 - i for those that enter at the last. torch
has its V-shaped relative only, but torch's runtime takes any order of actions on numbered stages. Here the
order is that of `meshwise.cost.simulate`, and stages of the way back have numbers of their own, one beyond
those of the way there, so that no stage takes the other way's end for its neighbour.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import InferenceMode

from meshwise.core.files import read_catalog
from meshwise.cost.simulate import KINDS, rank_order
from meshwise.runtime.programs.context import Context
from meshwise.runtime.torch_private import PipelineAction, PipelineRuntime, pipelining_schedules

Orders = dict[int, list[Any]]
"""The actions of each rank of a pipeline."""
_MESSAGES = {"F": ("SEND_F", "RECV_F", 1), "B": ("SEND_B", "RECV_B", -1), "I": ("SEND_B", "RECV_B", -1)}
"""What hands on the result of an action, and what takes it how many stages further."""


class StageOfOneWay(PipelineStage):
    """A stage of one of the two ways; its neighbours are the numbers that some rank has."""

    stage_index: int

    def __init__(
        self, module: nn.Module, index: int, num_stages: int, device: torch.device, *,
        group: dist.ProcessGroup, **passed: Any,
    ) -> None:  # fmt: skip
        number = index if index == dist.get_rank(group) else index + num_stages + 1
        super().__init__(module, number, 3 * num_stages, device, group=group, **passed)

    @property
    def is_first(self) -> bool:
        """Whether microbatches enter here."""
        return self.stage_index - 1 not in self.stage_index_to_group_rank

    @property
    def is_last(self) -> bool:
        """Whether their losses are computed here."""
        return self.stage_index + 1 not in self.stage_index_to_group_rank

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """torch's; it knows the first stage by the number 0."""
        number = self.stage_index
        self.stage_index = 0 if self.is_first else number
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.stage_index = number


class ScheduleDualPipe(PipelineRuntime):
    """Runs `n_microbatches` each way."""

    def __init__(self, stages: list[StageOfOneWay], n_microbatches: int, **how: Any) -> None:
        super().__init__(stages, n_microbatches, **how)
        num_ranks = self.pp_group_size
        ranks = {rank: rank for rank in range(num_ranks)}
        ranks |= {num_ranks + 1 + stage: num_ranks - 1 - stage for stage in range(num_ranks)}
        for stage in stages:
            stage.stage_index_to_group_rank = ranks
        orders = {rank: list(_actions(rank, num_ranks, n_microbatches)) for rank in range(num_ranks)}
        with_waits = getattr(pipelining_schedules, "_add_wait_send", dict)  # torch 2.15 wants them stated
        self.pipeline_order_with_comms = with_waits(_with_messages(orders, ranks))


def _actions(rank: int, num_ranks: int, microbatches_each_way: int) -> Iterator[Any]:
    """What a rank computes, and when it gathers weights and reduces gradients."""
    stages = rank, 2 * num_ranks - rank
    pending: tuple[deque[int], deque[int]] = deque(), deque()  # gradients of weights, by chunk
    numbers: defaultdict[tuple[bool, int], Iterator[int]] = defaultdict(count)
    computed = []
    for kind, chunk in zip(*rank_order("dualpipe", rank, num_ranks, 2 * microbatches_each_way), strict=True):
        name = KINDS[kind]
        number = pending[chunk].popleft() if name == "W" else next(numbers[name == "F", chunk])
        if name == "I":
            pending[chunk].append(number)
        computed.append(PipelineAction.from_str(f"{stages[chunk]}{name}{number}"))
    with_gathers = pipelining_schedules._add_unshard_reshard(computed)
    yield from pipelining_schedules._add_reduce_grad(with_gathers, microbatches_each_way)


def _with_messages(orders: Orders, ranks: Mapping[int, int]) -> Orders:
    """The same with messages; `ranks`: of stages by number.

    Each is sent behind the action that makes it, and its receipt is posted there and then, as torch does it:
    two ranks agree on the order of what is between them, and none waits for what is not sent.
    """
    complete: Orders = {rank: [] for rank in orders}
    received: set[str] = set()
    waiting = {rank: deque(order) for rank, order in orders.items() if order}
    while waiting:
        for rank, order in list(waiting.items()):
            action = order[0]
            stage, kind, number = action.stage_index, action.computation_type.value, action.microbatch_index
            send, receive, step = _MESSAGES.get(kind, ("", "", 0))
            if step and stage - step in ranks and f"{stage}{receive}{number}" not in received:
                continue
            complete[rank].append(order.popleft())
            if step and stage + step in ranks:
                complete[rank].append(PipelineAction.from_str(f"{stage}{send}{number}"))
                arrival = f"{stage + step}{receive}{number}"
                complete[ranks[stage + step]].append(PipelineAction.from_str(arrival))
                received.add(arrival)
            if not order:
                del waiting[rank]
    return complete


SCHEDULES: dict[str, str] = read_catalog("train.toml")["schedules"]
"""torch's schedules by the names of a `Plan`; that of DualPipe is our own."""
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
    what a stage hands on. The function returns the losses of the microbatches, empty on other ranks.
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
    kind: Any = ScheduleDualPipe if name == "dualpipe" else getattr(pipelining, SCHEDULES[name])
    is_single = name in ("gpipe", "1f1b")
    schedule = kind(
        stages[0] if is_single else stages, num_each_way, scale_grads=False,
        loss_fn=lambda loss, _: loss / num_each_way,
    )  # fmt: skip
    # what a pipeline runs outside autograd for gradients of weights is part of the backward
    in_backward: Any = context.recorder.phase("backward")
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
        _end_backward_of_weights(stage)
        for method in filter(partial(hasattr, stage), REDUCING):
            setattr(stage, method, in_backward(getattr(stage, method)))
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

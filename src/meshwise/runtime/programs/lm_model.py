"""The language model on one rank of a world: its groups, its weights, and a few training steps.

Training is plain: every batch of a step is one forward and backward, gradients add up over the batches of
all ranks, then Adam. The loss is the mean over the tokens of the step, and load balancing the mean over its
batches, so that a step is the same in a world of any size. Shared parameters sum their gradients over all
data-parallel ranks; an expert has seen the tokens of its whole all-to-all group already, and sums over the
groups that hold a copy of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import record_function

from meshwise.model.gpt_config import GptConfig
from meshwise.program.expert_parallel import Placement
from meshwise.runtime.programs import checkpoint
from meshwise.runtime.programs.moe import Shard
from meshwise.runtime.programs.text_data import Blocks
from meshwise.runtime.programs.transformer_lm import TransformerDecoder, init_parameters
from meshwise.runtime.torch_private import disable_current_modes

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context
    from meshwise.runtime.programs.lm_setting import Setting


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of this rank beside those of its shard (None: a group of one)."""

    dp: dist.ProcessGroup | None
    copies: dist.ProcessGroup | None


def join(placement: Placement, context: Context) -> tuple[Shard, Groups]:
    """This rank's place in the mesh dp x tp, where dp is copies x ep."""
    rank, ep = context.rank, placement.ep
    mesh = context.mesh(copies=placement.num_copies, ep=ep, tp=placement.tp)
    dp = context.mesh(dp=placement.dp, tp=placement.tp).get_group("dp")

    def group(name: str, size: int) -> dist.ProcessGroup | None:
        return mesh.get_group(name) if size > 1 else None

    shard = Shard(
        tp=placement.tp,
        tp_rank=placement.tp_rank(rank),
        tp_group=group("tp", placement.tp),
        ep=ep,
        ep_rank=placement.ep_rank(rank),
        ep_group=group("ep", ep),
        section=sections(context),
    )
    return shard, Groups(dp if placement.dp > 1 else None, group("copies", placement.num_copies))


def sections(context: Context) -> Callable[[str], Any]:
    """Named parts of the program, for torch's profiler and for the recorder."""

    @contextmanager
    def section(name: str) -> Iterator[None]:
        with record_function(name), context.recorder.section(name):
            yield

    return section


def new_model(
    found: Setting, shard: Shard, context: Context, *, folder: str, seed: int, grouped: bool = False,
    max_positions: int | None = None,
) -> TransformerDecoder:  # fmt: skip
    """The model as this rank holds it, filled from the checkpoint in `folder`, or at random from `seed`."""
    with context.recorder.setup():
        model = TransformerDecoder(
            found.config,
            shard,
            grouped=grouped,
            max_positions=max_positions,
            device=context.device,
            dtype=context.dtype(found.dtype),
        )
        context.recorder.weights(*model.parameters())
        # The whole tensors that pieces are cut from lie on the host and are no memory of the program's.
        with nullcontext() if context.is_fake else disable_current_modes():
            if folder:
                checkpoint.load(model, Path(folder))
                if not context.is_fake:
                    checkpoint.check_finite(model, Path(folder))
            elif not context.is_fake:
                init_parameters(model, seed)
    return model


def save_checkpoint(model: TransformerDecoder, placement: Placement, context: Context, folder: str) -> None:
    """Write the model to `folder`; every rank calls this."""
    dp_rank = placement.dp_rank(context.rank)
    with context.recorder.setup():
        checkpoint.save(model, Path(folder), is_writer=dp_rank < placement.ep, is_first=dp_rank == 0)


def on_device(blocks: NDArray[np.int64], context: Context) -> Tensor:
    """Token numbers [B, T] on this rank's device."""
    if context.is_fake:
        return torch.empty(blocks.shape, dtype=torch.int64, device=context.device)
    return torch.from_numpy(np.ascontiguousarray(blocks)).to(context.device)


def draws(config: GptConfig, context: Context, *key: int) -> torch.Generator | None:
    """A generator for the second-expert policies that draw; what it gives depends on `key` alone."""
    if config.moe_second_expert_policy == "all" or config.moe_top1_expert or context.is_fake:
        return None
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8]) >> 1
    return torch.Generator(device=context.device).manual_seed(seed)


def train(
    model: TransformerDecoder, blocks: Blocks, groups: Groups, placement: Placement, context: Context, *,
    steps: int, batches: int, learning_rate: float, gate_loss_weight: float, seed: int,
) -> list[float]:  # fmt: skip
    """`steps` steps of Adam on `blocks`, over and over; the loss in nats a token of each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    size = model.config.batch_size_valid
    num_batches = -(-len(blocks) // size)
    losses = []
    model.train()
    for step in range(steps):
        numbers = [step * batches + i for i in range(batches)]
        num_tokens = sum(blocks.batch(n % num_batches, size).num_tokens for n in numbers)
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=context.device)
        for number in numbers[placement.dp_rank(context.rank) :: placement.dp]:
            batch = blocks.batch(number % num_batches, size)
            output = model(
                on_device(batch.inputs, context), generator=draws(model.config, context, seed, number)
            )
            targets = on_device(batch.targets, context)
            nats = -model.embed_tokens.target_logprobs(output.logits, targets).sum()
            balance = sum(output.gate_loss, start=nats.new_zeros(()))
            (nats / num_tokens + gate_loss_weight * balance / batches).backward()
            total += nats.detach() / num_tokens
        _sum_gradients(model, groups)
        optimizer.step()
        _sum(total, groups.dp)
        losses.append(total)
    model.eval()
    return [0.0 if context.is_fake else float(loss) for loss in losses]


def _sum_gradients(model: TransformerDecoder, groups: Groups) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is None:  # experts of a rank that saw no token still take part in the sum
            parameter.grad = torch.zeros_like(parameter)
        _sum(parameter.grad, groups.copies if ".experts." in name else groups.dp)


def _sum(x: Tensor, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(x, group=group)

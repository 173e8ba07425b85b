"""The language model on one rank of a world: its groups, its weights, its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import record_function

from meshwise.program.expert_parallel import Placement
from meshwise.runtime.programs.moe import Shard
from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis, axis
from meshwise.runtime.programs.transformer_lm import TransformerDecoder, init_parameters
from meshwise.runtime.torch_private import disable_current_modes

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context
    from meshwise.runtime.programs.lm_setting import LanguageModelOptions, LanguageModelSetting


def join(placement: Placement, context: Context) -> tuple[Shard, MeshAxis]:
    """This rank's place in the mesh dp x tp, where dp is copies x ep, and its place in dp."""
    mesh = context.mesh(copies=placement.num_copies, ep=placement.ep, tp=placement.tp)
    shard = Shard(tp=axis(mesh, "tp"), ep=axis(mesh, "ep"), section=sections(context))
    return shard, axis(context.mesh(dp=placement.dp, tp=placement.tp), "dp")


def sections(context: Context) -> Callable[[str], Any]:
    """Named parts of the program, for torch's profiler and for the recorder."""

    @contextmanager
    def section(name: str) -> Iterator[None]:
        with record_function(name), context.recorder.section(name):
            yield

    return section


def new_model(
    options: LanguageModelOptions, found: LanguageModelSetting, shard: Shard, context: Context, *,
    grouped: bool = False, max_positions: int | None = None,
) -> TransformerDecoder:  # fmt: skip
    """The model as this rank holds it, filled at random from the options' seed."""
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
            if not context.is_fake:
                init_parameters(model, options.seed)
    return model.eval()


def on_device(blocks: NDArray[np.int64], context: Context) -> Tensor:
    """Token numbers [B, T] on this rank's device."""
    if context.is_fake:
        return torch.empty(blocks.shape, dtype=torch.int64, device=context.device)
    return torch.from_numpy(np.ascontiguousarray(blocks)).to(context.device)

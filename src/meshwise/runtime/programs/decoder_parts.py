"""What the blocks of a decoder share, and its parts that know of no attention: norm and feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, noop_context_fn, set_checkpoint_early_stop

from meshwise.model.architecture import Model
from meshwise.runtime.programs.adapters import Adapted
from meshwise.runtime.programs.attention_kernels import Attend
from meshwise.runtime.programs.functions import SwiGLU
from meshwise.runtime.programs.heads import deal_back, deal_heads
from meshwise.runtime.programs.local import local
from meshwise.runtime.programs.narrow import NarrowLinear
from meshwise.runtime.programs.norm import Norm
from meshwise.runtime.programs.routes import Routes
from meshwise.runtime.programs.tensor_parallel.exchange import ALONE, MeshAxis
from meshwise.runtime.recorder import OpRecorder
from meshwise.runtime.torch_private import current_graph_task_id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """What the modules of a decoder share: the tokens they see, how they attend, what they keep.

    `turns`: of the tokens that pass through attention, how rotary positions turn them (`Rotate`);
    `own_places`: positions of those between the matmuls, a part of them under sequence parallelism.
    `routes`: where tokens go whose layer has experts. `heads`: the ranks that exchange heads for tokens.
    `redone_modules`: what selective recomputation covers; `redone_layers`: how many of a piece's layers are
    recomputed whole, the first ones. `loss_chunks`: in how many pieces the loss is computed. `is_narrow`:
    linear layers of blocks compute in fp8. `lora_rank`: of adapters beside frozen weights (0: all train).
    """

    turns: tuple[Tensor, Tensor]
    own_places: Tensor
    recorder: OpRecorder
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda q, k, v: Attend.apply(q, k, v, True)
    redone_modules: tuple[str, ...] = ()
    redone_layers: float = 0
    loss_chunks: int = 1
    is_narrow: bool = False
    routes: Routes | None = None
    heads: MeshAxis = ALONE
    lora_rank: int = 0

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention [batch, heads, own tokens, width] -> [batch, own tokens, heads, width]."""
        if self.heads.size == 1:
            mixed: Tensor = self.redone("core_attn", self.attend, q, k, v)
            return mixed
        return deal_back(self.heads, self.redone("core_attn", self.attend, *deal_heads(self.heads, q, k, v)))

    def redone(self, module: str, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """`function(*inputs)`; where `module` is recomputed, the backward runs it again from its inputs."""
        return self.again(function, *inputs) if module in self.redone_modules else function(*inputs)

    def again(
        self, function: Callable[..., Any], *inputs: Tensor,
        keeps: Callable[[], tuple[Any, Any]] = noop_context_fn,
    ) -> Any:  # fmt: skip
        """`function(*inputs)`, run a second time in the backward, which keeps only the inputs till then.

        All of it again, as Megatron-LM does, but for the ops whose results torch's contexts `keeps` hold.
        """

        def run(*args: Tensor) -> Any:
            in_backward = current_graph_task_id() != -1
            with self.recorder.phase("recompute") if in_backward else nullcontext():
                return function(*args)

        with set_checkpoint_early_stop(False):
            return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=keeps)

    def planned(self, layer: nn.Linear) -> nn.Module:
        """`layer` as the plan has it: its product in fp8, or with adapters, whose are not."""
        if self.is_narrow:
            layer = NarrowLinear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        return Adapted(layer, self.lora_rank) if self.lora_rank else layer


class DecoderNorm(nn.Module):
    """RMSNorm, or LayerNorm with a bias, of each token's `width` numbers (0: the hidden ones)."""

    def __init__(self, model: Model, width: int = 0) -> None:
        super().__init__()
        width = width or model.hidden
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if model.norm_bias else None
        self.is_centered = model.norm == "layernorm"

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        bias = None if self.bias is None else local(self.bias)
        return Norm.apply(local(x), local(self.weight), bias, self.is_centered, x.shape[-1], ALONE)


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x))), of inner width `width`."""

    def __init__(self, model: Model, setting: Setting, width: int) -> None:
        super().__init__()
        bias = model.linear_bias
        wide = [setting.planned(nn.Linear(model.hidden, width, bias=bias)) for _ in range(1 + model.gated)]
        self.gate = wide[1] if model.gated else None
        self.up = wide[0]
        self.down = setting.planned(nn.Linear(width, model.hidden, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        layers = [self.up] if self.gate is None else [self.gate, self.up]
        return self.down(activated(*(layer(x) for layer in layers)))


def activated(*wide: Tensor) -> Tensor:
    """SwiGLU of gate and up, or GELU of up."""
    return SwiGLU.apply(*wide) if len(wide) == 2 else F.gelu(*wide)

"""A GPT- or Llama-shaped decoder, or some consecutive layers of one, plain: nothing here knows of ranks.

Blocks are norm, attention, residual, norm, feed-forward, residual; norms are RMSNorm or LayerNorm, the
feed-forward is SwiGLU or GELU, positions are rotary or learned, linear layers have biases or not. How the
decoder is cut over ranks is applied from outside (`meshwise.runtime.programs.parallelize`).

The first piece of a decoder has the embedding, the last one the head and the loss; such a piece may have no
layers. It takes token numbers or activations, and gives activations or the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from meshwise.model.architecture import Model, is_moe_layer
from meshwise.runtime.programs.attention_kernels import Attend
from meshwise.runtime.programs.functions import SwiGLU
from meshwise.runtime.programs.heads import CoreAttention, attend_by_heads
from meshwise.runtime.programs.local import local
from meshwise.runtime.programs.mixture import Mixture, Routes
from meshwise.runtime.programs.norm import Norm
from meshwise.runtime.programs.rotary import Rotate
from meshwise.runtime.torch_private import current_graph_task_id

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Recorder
    from meshwise.runtime.programs.tensor_parallel.exchange import Axis

TABLE, TIED = "embedding.tokens.weight", "head.logits.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """What the modules of a decoder share: the tokens they see, how they attend, what they keep.

    `turns`: of the tokens that pass through attention, how rotary positions turn them (`Rotate`);
    `own_places`: positions of those between the matmuls, a part of them under sequence parallelism.
    `routes`: where tokens go whose layer has experts. `heads`: the ranks that exchange heads for tokens.
    `recompute`: none, selective (the core attention) or full (each block).
    """

    turns: tuple[Tensor, Tensor]
    own_places: Tensor
    recorder: Recorder
    attend: CoreAttention = lambda q, k, v: Attend.apply(q, k, v, True)
    recompute: str = "none"
    routes: Routes | None = None
    heads: Axis | None = None

    def redone(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`function(*inputs)`, run a second time in the backward, which keeps only the inputs till then."""

        def run(*args: Tensor) -> Tensor:
            with self._place():
                return function(*args)

        with set_checkpoint_early_stop(False):  # all of it again, as Megatron-LM does
            return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)

    def _place(self) -> AbstractContextManager[None]:
        in_backward = current_graph_task_id() != -1
        return self.recorder.phase("recompute") if in_backward else nullcontext()


class DecoderNorm(nn.Module):
    """RMSNorm, or LayerNorm with a bias, of each token."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.hidden))
        self.bias = nn.Parameter(torch.empty(model.hidden)) if model.norm_bias else None
        self.is_centered = model.norm == "layernorm"

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        bias = None if self.bias is None else local(self.bias)
        return Norm.apply(local(x), local(self.weight), bias, self.is_centered, x.shape[-1], None)


class Attention(nn.Module):
    """Causal attention, query heads in groups that share a key head; local heads are what q, k, v leave."""

    def __init__(self, model: Model, setting: Setting) -> None:
        super().__init__()
        self.head_dim, self.setting = model.head_dim, setting
        wide, narrow = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self.q = nn.Linear(model.hidden, wide, bias=model.qkv_bias)
        self.k = nn.Linear(model.hidden, narrow, bias=model.qkv_bias)
        self.v = nn.Linear(model.hidden, narrow, bias=model.qkv_bias)
        self.out = nn.Linear(wide, model.hidden, bias=model.out_bias)
        self.is_rotary = model.positions == "rotary"

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        setting = self.setting
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q, self.k, self.v))
        if self.is_rotary:
            q, k = (Rotate.apply(part, *setting.turns) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        attend = (
            partial(setting.redone, setting.attend) if setting.recompute == "selective" else setting.attend
        )
        if setting.heads is not None:
            attend = partial(attend_by_heads, setting.heads, attend)
        mixed = attend(q, k, v)
        return self.out(mixed.flatten(2))


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x)))."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        bias = model.linear_bias
        self.gate = nn.Linear(model.hidden, model.ffn_hidden, bias=bias) if model.gated else None
        self.up = nn.Linear(model.hidden, model.ffn_hidden, bias=bias)
        self.down = nn.Linear(model.ffn_hidden, model.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(SwiGLU.apply(self.gate(x), self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, model: Model, setting: Setting, has_experts: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = DecoderNorm(model), DecoderNorm(model)
        self.attention = Attention(model, setting)
        self.mlp = Mixture(model, setting.routes) if has_experts else FeedForward(model)
        self.setting = setting

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        return self.setting.redone(self.compute, x) if self.setting.recompute == "full" else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """The block itself, whoever calls it and however often."""
        with self.setting.recorder.section("attention"):
            x = x + self.attention(self.norm1(x))
        with self.setting.recorder.section("mlp"):
            return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """A row per token number, and one per position where positions are learned."""

    def __init__(self, model: Model, setting: Setting) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocab, model.hidden)
        rows = model.max_seq + model.extra_position_rows
        is_learned = model.positions == "learned"
        self.positions = nn.Parameter(torch.empty(rows, model.hidden)) if is_learned else None
        self.setting = setting

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, tokens] -> [batch, own tokens, hidden]."""
        x = self.tokens(tokens)
        return (
            x if self.positions is None else x + F.embedding(self.setting.own_places, local(self.positions))
        )


class Head(nn.Module):
    """The last norm and the logits."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = DecoderNorm(model)
        self.logits = nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> [batch, tokens, vocabulary]."""
        return self.logits(self.norm(x))


class Decoder(nn.Module):
    """The layers `layers` of a model, with the ends of the model that are theirs."""

    def __init__(
        self, model: Model, setting: Setting, layers: range, *, is_first: bool = True, is_last: bool = True
    ) -> None:
        super().__init__()
        self.embedding = Embedding(model, setting) if is_first else None
        self.layers = nn.ModuleDict(
            {str(number): Block(model, setting, is_moe_layer(model, number)) for number in layers}
        )
        self.head = Head(model) if is_last else None
        self.is_tied, self.setting = model.tied_embedding, setting
        self.tie()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Token numbers or activations [batch, tokens, hidden] -> activations, or the tokens' mean loss."""
        section = self.setting.recorder.section
        if self.embedding is not None:
            with section("embedding"):
                x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.head is None:
            return x
        assert labels is not None
        with section("head"):
            logits = self.head(x)
        with section("loss"):
            return mean_loss(logits, labels)

    def tie(self) -> bool:
        """Make embedding and head one table where the model says so and both are here; whether they are."""
        if not self.is_tied or self.head is None or self.embedding is None:
            return False
        self.head.logits.weight = self.embedding.tokens.weight
        return True

    def alias(self, name: str) -> str:
        """The weight that holds the same numbers as the weight `name`: of a tied head, the embedding's."""
        return TABLE if self.is_tied and name == TIED else name

    def tied(self) -> nn.Parameter | None:
        """This piece's copy of a table that is embedding and head, if it has one end of the model only."""
        if not self.is_tied or (self.embedding is not None and self.head is not None):
            return None
        if self.embedding is not None:
            return self.embedding.tokens.weight
        return None if self.head is None else self.head.logits.weight


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy [nats], the mean over tokens; computed in fp32 at least."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(wide.flatten(0, 1), labels.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss

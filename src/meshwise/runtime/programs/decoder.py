"""A GPT- or Llama-shaped decoder, or some consecutive layers of one, plain: nothing here knows of ranks.

Blocks are norm, attention, residual, norm, feed-forward, residual; norms are RMSNorm or LayerNorm, the
feed-forward is SwiGLU or GELU, positions are rotary or learned, linear layers have biases or not. How the
decoder is cut over ranks is applied from outside (`meshwise.runtime.programs.parallelize`).

The first piece of a decoder has the embedding, the last one the head and the loss; such a piece may have no
layers. It takes token numbers or activations, and gives activations or the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwise.model.architecture import Model, is_moe_layer
from meshwise.runtime.programs.adapters import is_adapter
from meshwise.runtime.programs.decoder_attention import Attention, LatentAttention
from meshwise.runtime.programs.decoder_parts import DecoderNorm, FeedForward, Setting
from meshwise.runtime.programs.local import local
from meshwise.runtime.programs.mixture import Mixture
from meshwise.runtime.programs.per_op import per_op_contexts

TABLE, TIED = "embedding.tokens.weight", "head.logits.weight"


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, model: Model, setting: Setting, *, has_experts: bool, is_redone: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = DecoderNorm(model), DecoderNorm(model)
        self.attention = (LatentAttention if model.mla else Attention)(model, setting)
        self.mlp = Mixture(model, setting) if has_experts else FeedForward(model, setting, model.ffn_hidden)
        self.setting, self.is_redone = setting, is_redone
        self.router_shape = (model.hidden, model.moe.num_experts) if model.moe else ()

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        if "per_op" in self.setting.redone_modules:
            return self.setting.again(self.compute, x, keeps=per_op_contexts(self.router_shape))
        return self.setting.again(self.compute, x) if self.is_redone else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """The block itself, whoever calls it and however often."""
        with self.setting.recorder.section("attention"):
            x = x + self.attention(self.norm1(x))
        with self.setting.recorder.section("mlp"):
            return x + self._feed_forward(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        redone, modules = self.setting.redone, self.setting.redone_modules
        if isinstance(self.mlp, FeedForward):
            return redone("mlp", self.mlp, self.norm2(x))
        if "moe" not in modules:
            return self.mlp(*redone("layernorm", self._scored, x, to_its_end=False))
        if "layernorm" in modules:
            return redone("moe", lambda x: self.mlp(*self._scored(x)), x)
        return redone("moe", lambda normed: self.mlp(normed, self.mlp.scores(normed)), self.norm2(x))

    def _scored(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm2(x)
        return normed, self.mlp.scores(normed)


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
            {
                str(number): Block(
                    model,
                    setting,
                    has_experts=is_moe_layer(model, number),
                    is_redone=place < setting.redone_layers,
                )
                for place, number in enumerate(layers)
            }
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
            if self.setting.lora_rank:
                x.requires_grad_()  # the frozen embedding has no gradient, the blocks' adapters have
        with self.setting.keeping():
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

    def trains(self, name: str) -> bool:
        """Whether the weight `name` has a gradient: beside adapters nothing else has, nor a rule's bias."""
        return is_adapter(name) or not (self.setting.lora_rank or name.endswith("balance_bias"))

    def tied(self) -> nn.Parameter | None:
        """This piece's copy of a table that is embedding and head, if it has one end of the model only."""
        has_both = self.embedding is not None and self.head is not None
        if not self.is_tied or has_both or self.setting.lora_rank:
            return None
        if self.embedding is not None:
            return self.embedding.tokens.weight
        return None if self.head is None else self.head.logits.weight


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy [nats], the mean over tokens; computed in fp32 at least."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(wide.flatten(0, 1), labels.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss

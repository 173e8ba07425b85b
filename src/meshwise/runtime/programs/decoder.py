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
from meshwise.runtime.programs.chunked_loss import loss_in_chunks
from meshwise.runtime.programs.decoder_attention import Attention, LatentAttention
from meshwise.runtime.programs.decoder_parts import DecoderNorm, FeedForward, Setting
from meshwise.runtime.programs.local import local
from meshwise.runtime.programs.mixture import Mixture
from meshwise.runtime.programs.per_op import per_op_contexts


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, model: Model, setting: Setting, *, has_experts: bool, is_redone: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = DecoderNorm(model), DecoderNorm(model)
        self.attention = (LatentAttention if model.mla else Attention)(model, setting)
        self.mlp = Mixture(model, setting) if has_experts else FeedForward(model, setting, model.ffn_hidden)
        self.setting, self.is_redone = setting, is_redone

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        if "per_op" in self.setting.redone_modules:
            router = self.mlp.router if isinstance(self.mlp, Mixture) else None
            return self.setting.again(self.compute, x, keeps=per_op_contexts(router))
        return self.setting.again(self.compute, x) if self.is_redone else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """The block itself, whoever calls it and however often."""
        with self.setting.recorder.section("attention"):
            x = x + self.attention(self.norm1(x))
        with self.setting.recorder.section("mlp"):
            kind = "moe" if isinstance(self.mlp, Mixture) else "mlp"
            return x + self.setting.redone(kind, self.mlp, self.norm2(x))


TABLE, TIED = "embedding.tokens.weight", "head.logits.weight"


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
    """The last norm and the logits; where the loss is computed in chunks, the norm alone."""

    def __init__(self, model: Model, setting: Setting) -> None:
        super().__init__()
        self.norm = DecoderNorm(model)
        self.logits = nn.Linear(model.hidden, model.vocab, bias=False)
        self.is_whole = setting.loss_chunks == 1

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> what the loss is computed of."""
        normed = self.norm(x)
        return self.logits(normed) if self.is_whole else normed


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
        self.head = Head(model, setting) if is_last else None
        self.is_tied, self.setting = model.tied_embedding, setting
        self.tie()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Token numbers or activations [batch, tokens, hidden] -> activations, or the tokens' mean loss.

        `labels` [batch, tokens]: the next tokens.
        """
        section = self.setting.recorder.section
        if self.embedding is not None:
            with section("embedding"):  # beside adapters it is frozen, but the blocks pass gradients on
                x = self.embedding(x).requires_grad_() if self.setting.lora_rank else self.embedding(x)
        for block in self.layers.values():
            x = block(x)
        if self.head is None:
            return x
        assert labels is not None
        with section("head"):
            found, chunks = self.head(x), self.setting.loss_chunks
            with section("/loss"):
                if chunks == 1:
                    return mean_loss(found, labels)
                return loss_in_chunks(found, self.head.logits.weight, labels, chunks, mean_loss)

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
        """This piece's copy of a table that both ends of the model read, if it has one end only."""
        if self.setting.lora_rank or not self.is_tied:
            return None
        ends = (self.embedding and self.embedding.tokens), (self.head and self.head.logits)
        tables = [end for end in ends if end is not None]
        return tables[0].weight if len(tables) == 1 else None


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy [nats], the mean over tokens; computed in fp32 at least."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(wide.flatten(0, -2), labels.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss

"""One block of a decoder: attention and feed-forward, each behind a norm and beside a residual."""

from __future__ import annotations

from torch import Tensor, nn

from meshwise.model.architecture import Model
from meshwise.runtime.programs.decoder_attention import Attention, LatentAttention
from meshwise.runtime.programs.decoder_parts import DecoderNorm, FeedForward, Setting
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

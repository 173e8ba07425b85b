"""Causal attention of a decoder: heads of keys and values shared by groups of queries, or made of latents."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwise.model.architecture import Model
from meshwise.runtime.programs.decoder_parts import DecoderNorm, Setting
from meshwise.runtime.programs.functions import Rotate
from meshwise.runtime.programs.local import local


class Attention(nn.Module):
    """Causal attention, query heads in groups that share a key head; local heads are what q, k, v leave."""

    def __init__(self, model: Model, setting: Setting) -> None:
        super().__init__()
        self.head_dim, self.setting = model.head_dim, setting
        wide, narrow = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        self.q = setting.planned(nn.Linear(model.hidden, wide, bias=model.qkv_bias))
        self.k = setting.planned(nn.Linear(model.hidden, narrow, bias=model.qkv_bias))
        self.v = setting.planned(nn.Linear(model.hidden, narrow, bias=model.qkv_bias))
        self.out = setting.planned(nn.Linear(wide, model.hidden, bias=model.out_bias))
        self.is_rotary = model.positions == "rotary"

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        setting = self.setting
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q, self.k, self.v))
        if self.is_rotary:
            q, k = (Rotate.apply(part, *setting.turns) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.out(setting.mixed(q, k, v).flatten(2))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values made of one latent.

    Latents are of the tokens that a rank has between the matmuls; under tensor parallelism they are gathered
    where heads are made of them. Positions turn a part of each query, and one key that all heads share.
    """

    def __init__(self, model: Model, setting: Setting) -> None:
        super().__init__()
        mla = model.mla
        assert mla is not None
        self.setting = setting
        self.parts_of_query = [mla.qk_nope_head_dim, mla.qk_rope_head_dim]
        self.parts_of_pair = [mla.qk_nope_head_dim, mla.v_head_dim]  # of a head's key and value
        self.parts_of_latents = [mla.kv_lora_rank, mla.qk_rope_head_dim]
        self.q_down: nn.Module = nn.Identity()
        self.q_norm: nn.Module = nn.Identity()
        if mla.q_lora_rank:
            self.q_down = setting.planned(Latents(model, mla.q_lora_rank))
            self.q_norm = DecoderNorm(model, mla.q_lora_rank)
        heads = model.num_heads
        self.q = setting.planned(
            nn.Linear(mla.q_lora_rank or model.hidden, heads * sum(self.parts_of_query), bias=False)
        )
        self.kv_down = setting.planned(Latents(model, sum(self.parts_of_latents)))
        self.kv_norm = DecoderNorm(model, mla.kv_lora_rank)
        self.kv = setting.planned(nn.Linear(mla.kv_lora_rank, heads * sum(self.parts_of_pair), bias=False))
        self.shared_key = nn.Identity()
        self.out = setting.planned(nn.Linear(heads * mla.v_head_dim, model.hidden, bias=model.out_bias))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same."""
        q = self._queries(self.q_norm(self.q_down(x)))
        latents, key = (part.contiguous() for part in self.kv_down(x).split(self.parts_of_latents, dim=-1))
        mixed = self.setting.mixed(q, *self._keys_values(self.kv_norm(latents), local(self.shared_key(key))))
        return self.out(mixed.flatten(2))

    def _queries(self, latents: Tensor) -> Tensor:
        """[batch, own tokens, latent] -> [batch, heads, tokens, width]."""
        q = self.q(latents).unflatten(-1, (-1, sum(self.parts_of_query)))
        own, turned = q.split(self.parts_of_query, dim=-1)
        q = torch.cat([own, Rotate.apply(turned, *self.setting.turns)], dim=-1)
        return q.transpose(1, 2)

    def _keys_values(self, latents: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, own tokens, latent], [batch, tokens, width] -> [batch, heads, tokens, width] x 2."""
        kv = self.kv(latents).unflatten(-1, (-1, sum(self.parts_of_pair)))
        own, v = kv.split(self.parts_of_pair, dim=-1)
        turned = Rotate.apply(key.unsqueeze(2), *self.setting.turns)
        k = torch.cat([own, turned.expand(-1, -1, own.shape[2], -1)], dim=-1)
        return k.transpose(1, 2), v.contiguous().transpose(1, 2)


class Latents(nn.Linear):
    """From hidden numbers to latents, for the tokens that a rank has."""

    def __init__(self, model: Model, width: int) -> None:
        super().__init__(model.hidden, width, bias=model.qkv_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, own tokens, hidden] -> [batch, own tokens, width]."""
        return F.linear(local(x), local(self.weight), None if self.bias is None else local(self.bias))

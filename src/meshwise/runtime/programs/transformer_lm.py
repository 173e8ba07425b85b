"""A GPT decoder with mixtures of experts, as fairseq computes `transformer_lm_gpt`, for inference.

Pre-norm blocks, GELU, tied embedding, sinusoidal positions; every `moe_freq`-th block has experts
(`programs.moe`) in place of its feed-forward. The model is plain: it knows the tensors that its rank
holds, and a `Shard` says how they are cut. Words, attention heads, the feed-forward and each expert's
hidden width are cut over tp, the experts over ep, the batch over the rest. `init_parameters` draws every
tensor whole, so that no world changes them.

The projections of attention add their bias after the product, and after the sum over tp where it is cut;
the feed-forward's two matrices add theirs within the product (`addmm`), on one rank of tp.

Of the words, rank r of P holds V / P rows of the tied embedding, one run of words. It looks up the tokens
that it holds, and the sum over ranks is the embedding. It makes the logits of its own words, and they stay
where they are: the log-softmax of a target takes three numbers a token from the other ranks, the largest
logit, the sum of exponentials, and the target's own (Megatron-LM, arXiv 1909.08053).
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from meshwise.model.gpt_config import GptConfig
from meshwise.runtime.programs.context import Context, generator_of, numbers_of
from meshwise.runtime.programs.moe import Affine, MoELayer, Shard, gelu
from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis, all_max, all_sum, axis, start_gather
from meshwise.runtime.programs.text_data import PAD
from meshwise.runtime.torch_private import disable_current_modes


class Vocabulary(nn.Module):
    """The rows of the tied embedding that one rank of `tp` holds: `weight` [V / P, M], not initialised."""

    def __init__(self, vocab_size: int, width: int, tp: MeshAxis) -> None:
        super().__init__()
        self.tp, self.num_words = tp, vocab_size // tp.size
        self.weight = nn.Parameter(torch.empty(self.num_words, width))

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] -> their rows [B, T, M]."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        local, elsewhere = self._local(tokens)
        rows = F.embedding(local, self.weight)
        return all_sum(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp)

    def logits(self, x: Tensor) -> Tensor:
        """[B, T, M] -> the logits [B, T, V / P] of this rank's words."""
        return F.linear(x, self.weight)

    def target_logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Natural log-probability of each target token [B, T], fp32; 0 where that is padding."""
        if self.tp.size == 1:
            chosen = logits.float().log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1))
        else:
            shifted, log_total = self._shifted(logits)
            local, elsewhere = self._local(targets.unsqueeze(-1))
            own = shifted.gather(-1, local).masked_fill(elsewhere, 0.0)
            chosen = all_sum(own, self.tp) - log_total
        return chosen.squeeze(-1).masked_fill(targets == PAD, 0.0)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Natural log-probabilities [B, V] of all words from logits [B, V / P], fp32, on every rank.

        The one place where ranks exchange whole rows, [B, V] numbers: whoever chooses the next token must
        see all words.
        """
        if self.tp.size == 1:
            return logits.float().log_softmax(dim=-1)
        shifted, log_total = self._shifted(logits)
        return start_gather((shifted - log_total).unsqueeze(0), self.tp)().transpose(0, 1).flatten(1)

    def _local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of `tokens` on this rank, and a mask of those that are on another."""
        local = tokens - self.tp.index * self.num_words
        elsewhere = (local < 0) | (local >= self.num_words)
        return local.masked_fill_(elsewhere, 0), elsewhere

    def _shifted(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits in fp32 less the largest of all ranks; log of the sum of all their exponentials [..., 1]."""
        wide = logits.float()
        largest = all_max(wide.amax(dim=-1, keepdim=True), self.tp)
        shifted = wide - largest
        del wide
        return shifted, all_sum(shifted.exp().sum(dim=-1, keepdim=True), self.tp).log()


@dataclass(slots=True, eq=False)
class KVCache:
    """Keys and values [B, heads, capacity, head_dim] of the tokens seen so far, layer by layer."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int = 0

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row `rows[b]` was: beams that live on take their history along."""
        for stores in (self.keys, self.values):
            for layer in range(len(stores)):  # one at a time: the old one goes before the next is made
                stores[layer] = stores[layer].index_select(0, rows)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B heads, past + T, head_dim] of a layer, the new [B heads, T, head_dim] added.

        Both are views: a product reads the cache where it lies.
        """
        start, stop = self.length, self.length + key.shape[1]
        both = (self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1))
        for store, new in zip(both, (key, value), strict=True):
            store[:, start:stop] = new
        return both[0][:, :stop], both[1][:, :stop]


@dataclass(frozen=True, slots=True, eq=False)
class DecoderOutput:
    """Logits of this rank's words [B, T, V / P], or of the last token's [B, 1, V / P].

    `inner_states`: the embedded input and each layer's output [B, T, M]. `metrics`: of each MoE layer.
    """

    logits: Tensor
    inner_states: list[Tensor]
    metrics: list[Tensor] = field(default_factory=list)


class MultiheadAttention(nn.Module):
    """Causal self-attention, its heads cut over tp; scores are kept, as in the einsum formulation."""

    def __init__(self, config: GptConfig, shard: Shard) -> None:
        super().__init__()
        self.shard, self.head_dim = shard, config.head_dim
        width, local = config.decoder_embed_dim, config.decoder_embed_dim // shard.tp.size
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, Affine(local, width, bias=True))
        self.out_proj = Affine(width, local, bias=True)

    def forward(self, x: Tensor, mask: Tensor | None, cache: KVCache | None = None, layer: int = 0) -> Tensor:
        """[B, T, M] -> [B, T, M]; `mask` [T, past + T] is added to the scores."""
        with self.shard.section("MultiheadAttention"):
            batch, num_queries, _ = x.shape
            query, key, value = (self._heads(x, proj) for proj in (self.q_proj, self.k_proj, self.v_proj))
            query = query * self.head_dim**-0.5
            if cache is not None:
                key, value = cache.extend(layer, key, value)
            scores = torch.bmm(query, key.transpose(1, 2))
            if mask is not None:
                scores += mask
            mixed = torch.bmm(F.softmax(scores, dim=-1), value)
            mixed = mixed.view(batch, -1, num_queries, self.head_dim).transpose(1, 2).flatten(2)
            out = all_sum(F.linear(mixed, self.out_proj.weight), self.shard.tp)
            return out.add_(self.out_proj.bias)

    def _heads(self, x: Tensor, proj: Affine) -> Tensor:
        """[B, T, M] -> [B heads, T, head_dim]."""
        y = F.linear(x, proj.weight).add_(proj.bias)
        return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2).flatten(0, 1)


class TransformerDecoderLayer(nn.Module):
    """One block: attention, then the feed-forward or the experts, each on the normed input, each added."""

    def __init__(self, config: GptConfig, layer: int, shard: Shard, *, grouped: bool) -> None:
        super().__init__()
        self.shard, self.layer = shard, layer
        width, hidden = config.decoder_embed_dim, config.decoder_ffn_embed_dim // shard.tp.size
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.self_attn = MultiheadAttention(config, shard)
        self.final_layer_norm = nn.LayerNorm(width)
        self.moe_layer = MoELayer(config, shard, grouped=grouped) if config.is_moe_layer(layer) else None
        if self.moe_layer is None:
            self.fc1 = Affine(hidden, width, bias=True)
            self.fc2 = Affine(width, hidden, bias=shard.tp.index == 0)

    def forward(self, x: Tensor, mask: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Tensor | None]:
        """[B, T, M] -> [B, T, M], and the routing metrics of a MoE layer."""
        kind = "without MoE" if self.moe_layer is None else "with MoE"
        with self.shard.section(f"TransformerDecoderLayer {kind}"):
            x = x + self.self_attn(self.self_attn_layer_norm(x), mask, cache, self.layer)
            normed = self.final_layer_norm(x)
            if self.moe_layer is None:
                return x + self._feed_forward(normed), None
            y, metrics = self.moe_layer(normed)
            return x + y, metrics

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden = gelu(F.linear(x.reshape(-1, x.shape[-1]), self.fc1.weight, self.fc1.bias))
        return all_sum(F.linear(hidden, self.fc2.weight, self.fc2.bias), self.shard.tp).view_as(x)


class TransformerDecoder(nn.Module):
    """The whole model, as one rank holds it; parameters are not initialised (see `init_parameters`)."""

    def __init__(
        self, config: GptConfig, shard: Shard = Shard(), *, grouped: bool = False,  # noqa: B008
        max_positions: int | None = None, device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.shard = config, shard
        width, num_rows = config.decoder_embed_dim, (max_positions or config.tokens_per_sample) + PAD + 1
        with torch.device(device), numbers_of(dtype):
            self.embed_tokens = Vocabulary(config.vocab_size, width, shard.tp)
            self.layers = nn.ModuleList(
                TransformerDecoderLayer(config, layer, shard, grouped=grouped)
                for layer in range(config.decoder_layers)
            )
            self.layer_norm = nn.LayerNorm(width)
            positions = sinusoidal_positions(num_rows, width).to(dtype)
            self.register_buffer("positions", positions, persistent=False)

    def forward(
        self, tokens: Tensor, *, cache: KVCache | None = None, last_only: bool = False
    ) -> DecoderOutput:
        """Logits for tokens [B, T], which may end in padding; with a `cache`, for those that follow it.

        `last_only`: of the last token alone, all that a search needs.
        """
        with self.shard.section("TransformerDecoder"):
            past = 0 if cache is None else cache.length
            x = self._embedded(tokens, past)
            num, like = tokens.shape[1], {"dtype": x.dtype, "device": x.device}
            mask = torch.full((num, past + num), -math.inf, **like).triu_(past + 1) if num > 1 else None
            output = DecoderOutput(x, [x])
            for layer in self.layers:
                x, metrics = layer(x, mask, cache)
                output.inner_states.append(x)
                if metrics is not None:
                    output.metrics.append(metrics)
            if cache is not None:
                cache.length += tokens.shape[1]
            if last_only:
                x = x[:, -1:]
            return replace(output, logits=self.embed_tokens.logits(self.layer_norm(x)))

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens."""
        weight = self.embed_tokens.weight
        heads = self.config.decoder_attention_heads // self.shard.tp.size
        shape = batch, heads, capacity, self.config.head_dim
        keys, values = ([weight.new_empty(shape) for _ in self.layers] for _ in "kv")
        return KVCache(keys, values)

    def _embedded(self, tokens: Tensor, past: int) -> Tensor:
        x = self.embed_tokens.embed(tokens) * math.sqrt(self.config.decoder_embed_dim)
        first = past + PAD + 1
        places = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        x += F.embedding(torch.where(tokens == PAD, PAD, places), self.positions)
        return x


def sinusoidal_positions(num_rows: int, width: int) -> Tensor:
    """fairseq's table [rows, width]: sines, then cosines, of row / 10000^(i / (width/2 - 1)); row PAD is 0.

    Token t of a sequence has row PAD + 1 + t. fp32; an odd width ends in a column of zeros.
    """
    half = width // 2
    log_step = math.log(10000.0) / max(half - 1, 1)
    rates = torch.exp(torch.arange(half, dtype=torch.float32) * -log_step)
    angles = torch.arange(num_rows, dtype=torch.float32)[:, None] * rates
    table = F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width % 2))
    table[PAD] = 0
    return table


# --- parameters ----------------------------------------------------------------------------------

_CUT_DIM = {
    "embed_tokens.weight": 0,
    **{f"{proj}.{kind}": 0 for proj in ("q_proj", "k_proj", "v_proj", "fc1") for kind in ("weight", "bias")},
    "out_proj.weight": 1,
    "fc2.weight": 1,
}
"""The dim of a parameter that is cut over tp; the rest is whole on each rank."""


def init_parameters(model: TransformerDecoder, seed: int) -> None:
    """Random parameters from `seed`, each tensor from a generator of its own: no world changes them.

    Embedding normal with deviation M^-1/2 and a zero row for padding, matrices Xavier-uniform (queries, keys
    and values with gain 2^-1/2), norms one, biases zero: fairseq's.
    """
    tp, first = model.shard.tp, model.shard.ep.index
    for name, parameter in model.named_parameters():
        dim = _CUT_DIM.get(".".join(name.split(".")[-2:]))
        pieces = {name: parameter.data}
        if ".experts." in name:
            number = enumerate(parameter.data, start=first * len(parameter))
            pieces = {name.replace(".experts.", f".experts.{place}."): expert for place, expert in number}
        for each, piece in pieces.items():  # drawn whole, and cut along `dim`
            whole = torch.empty([n * tp.size if place == dim else n for place, n in enumerate(piece.shape)])
            _fill(each, whole, generator_of(whole.device, seed, each))
            piece.copy_(whole if dim is None else whole.chunk(tp.size, dim)[tp.index])


def _fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if tensor.dim() == 1:
        tensor.fill_(float(name.endswith("norm.weight")))
    elif name.startswith("embed_tokens"):
        tensor.normal_(0, tensor.shape[1] ** -0.5, generator=generator)
        tensor[PAD] = 0
    else:
        gain = 2**-0.5 if any(f"{proj}_proj" in name for proj in "qkv") else 1.0
        nn.init.xavier_uniform_(tensor, gain, generator)


def new_model(of: Any, seed: int, context: Context, **how: Any) -> tuple[TransformerDecoder, MeshAxis]:
    """The model as this rank holds it, filled at random from a seed, and the rank's place in dp.

    `of`: a `LanguageModelSetting`. The mesh is dp x tp, where dp is copies x ep. `how` as for
    `TransformerDecoder`.
    """
    placement, dtype = of.placement, context.dtype(of.dtype)
    mesh = context.mesh(copies=placement.dp // placement.ep, ep=placement.ep, tp=placement.tp)
    shard = Shard(tp=axis(mesh, "tp"), ep=axis(mesh, "ep"), section=context.recorder.section)
    dp = axis(context.mesh(dp=placement.dp, tp=placement.tp), "dp")
    with context.recorder.setup():
        model = TransformerDecoder(of.config, shard, device=context.device, dtype=dtype, **how)
        context.recorder.weights(*model.parameters())
        if not context.is_fake:
            with disable_current_modes():  # whole tensors, of which pieces are cut, are not the program's
                init_parameters(model, seed)
    return model.eval(), dp


def on_device(blocks: NDArray[np.int64], context: Context) -> Tensor:
    """Token numbers [B, T] on this rank's device."""
    if context.is_fake:
        return torch.empty(blocks.shape, dtype=torch.int64, device=context.device)
    return torch.from_numpy(np.ascontiguousarray(blocks)).to(context.device)

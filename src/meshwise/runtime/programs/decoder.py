"""A GPT-, Llama-, Mixtral- or DeepSeek-shaped decoder, or some layers of one, plain: it knows of no ranks.

Blocks are norm, attention, residual, norm, feed-forward, residual; norms are RMSNorm or LayerNorm, the
feed-forward is SwiGLU or GELU, positions are rotary or learned, linear layers have biases or not. Heads of
keys and values are shared by groups of queries, or made of latents. How the decoder is cut over ranks is
applied from outside (`meshwise.runtime.programs.training`).

A mixture of experts stands in place of a block's MLP, its experts spread over ranks, each cut over others.
Each rank routes its own tokens: a router gives every expert a probability, each token visits k experts, and
what they answer is weighed by theirs. Copies of the tokens go to the ranks that hold their experts by all-
to-all and come back by another. Ranks that hold parts of the same experts gather what came to any of them,
and add up what they answer. Which experts a token visits is set by its place in the sequence, not by the
router, so that all get the same number (Megatron-LM's `--moe-router-force-load-balancing`): every rank's
shapes are known beforehand, and every world computes the same. The router still learns, through the weights
of the answers.

Behind the last block a module may say the token after the next (multi-token prediction, arXiv 2412.19437).
The first piece of a decoder has the embedding, the last one the head and the loss; such a piece may have no
layers. It takes token numbers or activations, and gives activations or the loss.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, noop_context_fn, set_checkpoint_early_stop

from meshwise.model.architecture import Model, is_moe_layer
from meshwise.runtime import torch_private as private
from meshwise.runtime.programs.attention_kernels import Attend, wide_dtype
from meshwise.runtime.programs.context import generator_of
from meshwise.runtime.programs.functions import Norm, Rotate, SwiGLU
from meshwise.runtime.programs.linear_layers import Adapted, NarrowLinear, OwnLinear, local
from meshwise.runtime.programs.per_op import per_op_contexts
from meshwise.runtime.programs.tensor_parallel.exchange import ALONE, MeshAxis, deal_back, deal_heads
from meshwise.runtime.recorder import OpRecorder


class ExpertPlace(NamedTuple):
    """A rank among the `ranks` that hold the experts, and among those that hold `parts` of the same ones."""

    ranks: MeshAxis = ALONE
    parts: MeshAxis = ALONE

    @property
    def num_sources(self) -> int:
        """Ranks whose tokens come to the experts of one."""
        return self.ranks.size * self.parts.size


WHOLE = ExpertPlace()
"""One rank that holds all experts."""


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Where the tokens of a microbatch go, constants all.

    `experts` [tokens, k]: of each token's copies; `sources` [k tokens]: whose copies they are, sorted by
    expert; `back` [k tokens]: where each token's copies stand in that order. `place`: which experts, and
    which part of them, this rank has.
    """

    experts: Tensor
    sources: Tensor
    back: Tensor
    place: ExpertPlace = WHOLE


def cut_dim(name: str) -> int:
    """The dim of a stack of experts' matrices `name` [experts, d_in, d_out] along which parts are cut."""
    return 1 if name.endswith("down") else 2


def fill(name: str, tensor: Tensor, seed: int, place: ExpertPlace = WHOLE) -> None:
    """Norms' weights one, biases zero, matrices normal with deviation width^-1/2.

    A stack is filled expert by expert, with the parts of those at `place`.
    """
    if tensor.dim() == 3:
        dim = cut_dim(name) - 1
        for number, mine in enumerate(tensor, place.ranks.index * len(tensor)):
            expert = torch.cat([mine] * place.parts.size, dim)
            fill(f"{name}.{number}", expert, seed)
            mine.copy_(expert.chunk(place.parts.size, dim)[place.parts.index])
        return
    if tensor.dim() == 1:
        tensor.fill_(float(name.endswith("weight")))
        return
    tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator_of(tensor.device, seed, name))


def routes(places: Tensor, sequences: int, model: Model, place: ExpertPlace = WHOLE) -> Routes:
    """The routes of tokens at `places` of each of `sequences` sequences."""
    assert model.moe is not None
    choices = torch.arange(model.moe.top_k, device=places.device)
    in_turn = (places[:, None] * model.moe.top_k + choices).remainder(model.moe.num_experts)
    experts = in_turn.repeat(sequences, 1)
    order = experts.flatten().argsort(stable=True)
    return Routes(experts, order // model.moe.top_k, order.argsort(), place)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """What the modules of a decoder share: the tokens they see, how they attend, what they keep.

    `turns`: of the tokens that pass through attention, how rotary positions turn them (`Rotate`);
    `own_places`: positions of those between the matmuls, a part of them under sequence parallelism. `routes`:
    where tokens go whose layer has experts. `heads`: the ranks that exchange heads for tokens.
    `redone_modules`: what selective recomputation covers; `redone_layers`: how many of a piece's layers are
    recomputed whole, the first ones. `is_narrow`: linear layers of blocks compute in fp8. `lora_rank`: of
    adapters beside frozen weights (0: all train).
    """

    turns: tuple[Tensor, Tensor]
    own_places: Tensor
    recorder: OpRecorder
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda q, k, v: Attend.apply(q, k, v, True)
    redone_modules: tuple[str, ...] = ()
    redone_layers: float = 0
    is_narrow: bool = False
    routes: Routes | None = None
    heads: MeshAxis = ALONE
    lora_rank: int = 0
    stops_early: bool = True

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
        self, function: Callable[..., Any], *inputs: Tensor, keeps: Callable[[], Any] = noop_context_fn
    ) -> Any:
        """`function(*inputs)`, run a second time in the backward, which keeps only the inputs till then.

        Again are its ops up to the last that keeps a tensor where torch `stops_early`, but for those whose
        results torch's contexts `keeps` hold.
        """

        def run(*args: Tensor) -> Any:
            with self.recorder.phase("recompute") if private.current_graph_task_id() != -1 else nullcontext():
                return function(*args)

        with set_checkpoint_early_stop(self.stops_early):
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
        x, weight, bias = map(local, (x, self.weight, self.bias))
        return Norm.apply(x, weight, bias, self.is_centered, x.shape[-1], ALONE)


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
            self.q_down = setting.planned(OwnLinear(model.hidden, mla.q_lora_rank, bias=model.qkv_bias))
            self.q_norm = DecoderNorm(model, mla.q_lora_rank)
        heads = model.num_heads
        width = mla.q_lora_rank or model.hidden
        self.q = setting.planned(nn.Linear(width, heads * sum(self.parts_of_query), bias=False))
        latents = sum(self.parts_of_latents)
        self.kv_down = setting.planned(OwnLinear(model.hidden, latents, bias=model.qkv_bias))
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
        return torch.cat([own, Rotate.apply(turned, *self.setting.turns)], dim=-1).transpose(1, 2)

    def _keys_values(self, latents: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, own tokens, latent], [batch, tokens, width] -> [batch, heads, tokens, width] x 2."""
        kv = self.kv(latents).unflatten(-1, (-1, sum(self.parts_of_pair)))
        own, v = kv.split(self.parts_of_pair, dim=-1)
        turned = Rotate.apply(key.unsqueeze(2), *self.setting.turns)
        k = torch.cat([own, turned.expand(-1, -1, own.shape[2], -1)], dim=-1)
        return k.transpose(1, 2), v.contiguous().transpose(1, 2)


class Experts(nn.Module):
    """The MLPs of this rank's experts, a matrix each in three (or two) stacks, or its parts of them."""

    def __init__(self, model: Model, place: ExpertPlace) -> None:
        super().__init__()
        assert model.moe is not None
        number, width = model.moe.num_experts // place.ranks.size, model.moe.ffn_hidden // place.parts.size
        self.number, self.place = number, place
        self.gate = nn.Parameter(torch.empty(number, model.hidden, width)) if model.gated else None
        self.up = nn.Parameter(torch.empty(number, model.hidden, width))
        self.down = nn.Parameter(torch.empty(number, width, model.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """[experts, rows, hidden] -> the same, or this rank's part of their sum."""
        matrices = [self.up] if self.gate is None else [self.gate, self.up]
        return torch.bmm(activated(*(torch.bmm(x, matrix) for matrix in matrices)), self.down)


class Mixture(nn.Module):
    """Router and experts, and the MLP that all tokens visit, where there is one."""

    def __init__(self, model: Model, setting: Setting) -> None:
        super().__init__()
        moe, routes = model.moe, setting.routes
        assert moe is not None and routes is not None
        self.router = OwnLinear(model.hidden, moe.num_experts, bias=moe.router_bias)
        if moe.balance_bias:  # moves the choice of experts, which is forced here, by a rule
            self.balance_bias = nn.Parameter(torch.empty(moe.num_experts))
        self.experts = Experts(model, routes.place)
        self.shared = FeedForward(model, setting, moe.shared_ffn_hidden) if moe.shared_ffn_hidden else None
        self.setting, self.routes = setting, routes

    def forward(self, x: Tensor) -> Tensor:
        """[batch, own tokens, hidden] -> the same."""
        way, logits, tokens = self.routes, self.router(x.flatten(0, 1)), x.flatten(0, 1)
        wide = logits.to(wide_dtype(logits.dtype))
        gates = wide.softmax(-1).gather(1, way.experts).to(x.dtype)
        copies = tokens.index_select(0, way.sources)
        ranks, parts = way.place
        arrived = self._by_expert(_gathered(_exchanged(copies, ranks), parts))
        answers = _exchanged(_added(self._by_rank(self.experts(arrived)), parts), ranks)
        weighed = answers.index_select(0, way.back) * gates.view(-1, 1)
        mixed = weighed.view(*way.experts.shape, -1).sum(1).view(x.shape)
        return mixed if self.shared is None else mixed + self.setting.redone("shared_experts", self.shared, x)

    def _by_expert(self, copies: Tensor) -> Tensor:
        """Copies as they arrived, [sources x experts x rows, hidden] -> [experts, sources x rows, hidden]."""
        by_source = copies.view(self.routes.place.num_sources, self.experts.number, -1, copies.shape[-1])
        return by_source.transpose(0, 1).flatten(1, 2)

    def _by_rank(self, answers: Tensor) -> Tensor:
        """The inverse of `_by_expert`."""
        return answers.unflatten(1, (self.routes.place.num_sources, -1)).transpose(0, 1).flatten(0, 2)


def _exchanged(rows: Tensor, along: MeshAxis) -> Tensor:
    """Equal parts of the rows to the ranks that hold the experts: copies there, answers back."""
    return rows if along.size == 1 else private.all_to_all_single(rows, None, None, along.group)


def _gathered(copies: Tensor, along: MeshAxis) -> Tensor:
    """The copies that came to any of the ranks that hold parts of the same experts."""
    return copies if along.size == 1 else private.all_gather_single(copies, 0, along.group)


def _added(answers: Tensor, along: MeshAxis) -> Tensor:
    """The sum of what parts of experts answer, of the copies that came to this rank."""
    return answers if along.size == 1 else private.reduce_scatter_single(answers, "sum", 0, along.group)


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


LOSS_WEIGHT = 0.3
"""Of the mean loss of all modules, beside the model's (DeepSeek-V3's for its first ten trillion tokens)."""


class FurtherToken(nn.Module):
    """One module of multi-token prediction."""

    def __init__(self, model: Model, setting: Setting) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = DecoderNorm(model), DecoderNorm(model)
        self.projection = nn.Linear(2 * model.hidden, model.hidden, bias=False)
        has_experts = is_moe_layer(model, model.num_layers - 1)
        plain = replace(setting, redone_modules=())  # of recomputation only the model's blocks know
        self.block = Block(model, plain, has_experts=has_experts, is_redone=False)
        self.norm = DecoderNorm(model)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """[batch, own tokens, hidden] x 2 -> the same, before `norm`."""
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(x)], dim=-1)
        joined = self.projection(both)
        if isinstance(joined, DTensor):
            rows = Shard(1) if x.shape[1] < joined.shape[1] else Replicate()
            joined = joined.redistribute(placements=[rows]).to_local()
        return self.block(joined)


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
        x, learned = self.tokens(tokens), self.positions
        return x if learned is None else x + F.embedding(self.setting.own_places, local(learned))


class Head(nn.Module):
    """The last norm and the logits."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = DecoderNorm(model)
        self.logits = nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> [batch, tokens, vocabulary]."""
        logits: Tensor = self.logits(self.norm(x))
        return logits


class Decoder(nn.Module):
    """The layers `layers` of a model, with the ends of the model that are theirs."""

    def __init__(
        self, model: Model, setting: Setting, layers: range, *, is_first: bool = True, is_last: bool = True
    ) -> None:
        super().__init__()
        looks_up = is_first or (is_last and model.mtp_layers > 0)
        self.embedding = Embedding(model, setting) if looks_up else None
        self.layers = nn.ModuleDict()
        for place, number in enumerate(layers):
            has_experts, is_redone = is_moe_layer(model, number), place < setting.redone_layers
            self.layers[str(number)] = Block(model, setting, has_experts=has_experts, is_redone=is_redone)
        self.head = Head(model) if is_last else None
        self.further = nn.ModuleList(FurtherToken(model, setting) for _ in range(model.mtp_layers * is_last))
        self.is_first, self.is_tied, self.shares_table = is_first, model.tied_embedding, model.shares_table
        self.setting = setting
        self.tie()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Token numbers or activations [batch, tokens, hidden] -> activations, or the tokens' mean loss.

        `labels` [batch, 1 + modules of multi-token prediction, tokens]: the next tokens, and later ones.
        """
        section = self.setting.recorder.section
        if self.is_first:
            assert self.embedding is not None
            with section("embedding"):
                x = self._for_blocks(self.embedding(x))
        for block in self.layers.values():
            x = block(x)
        if self.head is None:
            return x
        assert labels is not None
        with section("head"):
            loss = self._loss(self.head(x), labels[:, 0])
        for number, further in enumerate(self.further):
            with section("further"):
                assert self.embedding is not None
                table = self.embedding.tokens if self.is_first else self.embedding  # used as it was gathered
                x = further(x, self._for_blocks(table(labels[:, number])))
                further_loss = self._loss(self.head.logits(further.norm(x)), labels[:, number + 1])
            loss = loss + LOSS_WEIGHT / len(self.further) * further_loss
        return loss

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy [nats], the mean over tokens; computed in fp32 at least."""
        with self.setting.recorder.section("/loss"):
            wide = logits.to(wide_dtype(logits.dtype))
            loss = F.cross_entropy(wide.flatten(0, -2), labels.flatten())
            return loss.to_local() if isinstance(loss, DTensor) else loss

    def _for_blocks(self, embedded: Tensor) -> Tensor:
        """Beside adapters an embedding is frozen, but the blocks that read it pass gradients on."""
        return embedded.requires_grad_() if self.setting.lora_rank else embedded

    @property
    def blocks(self) -> list[Block]:
        """All blocks, those of multi-token prediction last."""
        return [*self.layers.values(), *(further.block for further in self.further)]

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
        return ".lora_" in name or not (self.setting.lora_rank or name.endswith("balance_bias"))

    def tied(self) -> nn.Parameter | None:
        """This piece's copy of a table that both ends of the model read, if it has one end only."""
        end, has_one = self.embedding or self.head, self.is_first == (self.head is None)
        if end is None or not has_one or not self.shares_table or self.setting.lora_rank:
            return None
        return end.logits.weight if isinstance(end, Head) else end.tokens.weight

"""The modules of a decoder on PyTorch's own parts, as tensors that are nothing but their bytes.

Each function makes what the module of `meshwise run train` makes, in its order, and lets go of it where that
does. Weights are `Leaf`s by name; `forward` of a block or an end is called inside a `Graph`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from meshwise.estimate.live_again import Checkpoints, MadeAgain, Make, read_again
from meshwise.estimate.live_context import (
    Heads,
    NewStorage,
    Order,
    Ring,
    copied,
    deal_back,
    deal_heads,
    ring_attention,
    ring_gradients,
    token_by_token,
)
from meshwise.estimate.live_formats import kept_narrow, sent_narrow
from meshwise.estimate.live_linear import Linears, Weights
from meshwise.estimate.live_loss import Losses
from meshwise.estimate.live_tensors import Graph, Node, Storage, Tensor
from meshwise.estimate.live_unfused import attend_unfused
from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.program.cut import Cut
from meshwise.program.expert_load import met_ranks

Experts = Callable[[Tensor], Tensor]
"""What experts make of what came to them."""


class Modules:
    """The modules of a rank, of which some are `redone`; sizes in bytes are of a microbatch."""

    def __init__(
        self, model: Model, mesh: Mesh, cut: Cut, graph: Graph, redone: tuple[str, ...] = ()
    ) -> None:
        self.redone, self.model, self.mesh, self.cut, self.graph = redone, model, mesh, cut, graph
        self.new, self.checkpoints = graph.memory.new, Checkpoints(graph, is_lasting=bool(mesh.pp > 1))
        narrow, wide = cut.precision.act_bytes, cut.precision.stat_bytes
        tokens, tp = float(cut.tokens), float(mesh.tp)
        self.is_split = bool(tp > 1 and mesh.plan.sequence_parallel)
        self.tokens, self.own, self.tp = tokens, tokens / tp if self.is_split else tokens, tp
        self.narrow, self.number = narrow, wide
        self.is_cut = tp > 1
        self.whole = tokens * model.hidden * narrow
        self.x = self.own * model.hidden * narrow
        self.places = self.x / float(mesh.microbatch)
        width = model.mla.qk_rope_head_dim if model.mla else model.head_dim
        self.sine = tokens / float(mesh.microbatch) * width / 2.0 * narrow
        self.q = tokens * model.num_heads / tp * model.head_dim * narrow
        self.kv = tokens * model.num_kv_heads / tp * model.head_dim * narrow
        self.ffn = tokens * model.ffn_hidden / tp * narrow
        self.lse = tokens * model.num_heads / tp * wide
        kv_heads = (model.num_heads if model.mla else model.num_kv_heads) / tp
        ranks = int(cut.ulysses)
        self.heads = Heads(
            queries=model.num_heads / tp / ranks, keys=max(kv_heads / ranks, 1.0),
            sequences=float(mesh.microbatch), ranks=ranks, repeats=max(1.0, ranks // kv_heads),
        )  # fmt: skip
        self.ring = Ring(
            rank=int(mesh.ring_rank), size=int(cut.ring), heads=self.heads, lse=self.lse,
            wide_frac=max(wide, 4.0) / narrow, gathers=cut.gather_keys,
        )  # fmt: skip
        self.order = self._order()
        self.scales = self.own * (1.0 + (model.norm == "layernorm")) * wide
        self.linears = Linears(model, cut, graph, self._result if self._is_redone("per_op") else None)
        self.linear = self.linears.layer
        self.logits = tokens * model.vocab / tp * narrow
        self.losses = Losses(cut, graph, self.linears)

    def _order(self) -> Order:
        """How tensors lie in attention."""
        heads, ring = self.heads, self.ring
        has_several, has_scores = heads.sequences > 1, not self.cut.flash
        is_whole = ring.size > 1 and not ring.has_parts
        return Order(
            q=heads.queries > 1 and not is_whole,
            k=has_several and not heads.is_dealt if has_scores else heads.keys > 1,
            v=heads.keys > 1,
            mixed=heads.queries > 1 or heads.is_mixed if has_scores else ring.size > 1 and heads.is_mixed,
        )

    # --- blocks --------------------------------------------------------------------------------

    def block(self, weights: Weights, experts: Experts | None, x: Tensor) -> Tensor:
        """Attention and feed-forward, each behind a norm and beside a residual."""
        attention = self.latent_attention if self.model.mla else self.attention
        self.linears.num_products = 0
        norm1, attend = partial(self._normed, weights, "norm1"), partial(attention, weights)
        x = self.add(x, self._read_again("layernorm" if self.model.mla else "", norm1, attend, x))
        return self.add(x, self._feed_forward(weights, experts, x))

    def _normed(self, weights: Weights, name: str, x: Tensor) -> tuple[Tensor]:
        return (self.norm(weights, name, x),)

    def _feed_forward(self, weights: Weights, experts: Experts | None, x: Tensor) -> Tensor:
        """Behind its norm."""
        norm2 = partial(self._normed, weights, "norm2")
        if experts is None:
            return self._redone("mlp", partial(self.feed_forward, weights, width=self.ffn), *norm2(x))
        mixture = partial(self._routed, weights, experts)
        if not self._is_redone("moe"):
            return self._read_again("layernorm", norm2, mixture, x)
        if self._is_redone("layernorm"):
            return self._redone("moe", lambda x: mixture(*norm2(x)), x)
        return self._redone("moe", mixture, *norm2(x))

    def _routed(self, weights: Weights, experts: Experts, x: Tensor) -> Tensor:
        return self.mixture(weights, experts, x, self.scores(weights, x))

    def attention(self, weights: Weights, x: Tensor) -> Tensor:
        """Causal attention; local heads are those of tp."""
        model = self.model
        whole = self.gathered(x)
        q, k, v = (
            self.in_order(name, self.linear(weights, name, whole, size))
            for name, size in (("q", self.q), ("k", self.kv), ("v", self.kv))
        )
        if model.positions == "rotary":
            q, k = (self.turned(part, part.size) for part in (q, k))
        return self.linear_by_rows(weights, "o", self._by_token(self.mixed(q, k, v)))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The core of attention, of some heads of all tokens where ranks exchange them."""
        return self._attend_dealt(*self._dealt(q, k, v))

    def _dealt(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return deal_heads(self.graph, self.heads, self.order, q, k, v) if self.heads.is_dealt else (q, k, v)

    def _attend_dealt(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = self._redone("core_attn", self.attend, q, k, v)
        return deal_back(self.graph, self.heads, self.order, mixed) if self.heads.is_dealt else mixed

    def _by_token(self, mixed: Tensor) -> Tensor:
        """What attention gives, as the matmul behind it reads it."""
        is_copied = self.order.mixed and not self.heads.is_dealt
        return token_by_token(self.graph, mixed, is_copied=is_copied)

    def latent_attention(self, weights: Weights, x: Tensor) -> Tensor:
        """Queries, and keys and values made of latents; positions turn a part of each, and of one key."""
        mla = self.model.mla
        assert mla is not None
        latents = x
        if mla.q_lora_rank:
            down = self.linear(weights, "q_down", self.local(x), self.own * mla.q_lora_rank * self.narrow)
            latents = self.norm(weights, "q_norm", down)
            del down
        if self._is_redone("mla_up_proj"):
            both = self._latents_of_pair(weights, x)
            mixed = self._read_again(
                "mla_up_proj", partial(self._heads, weights), self._attend_dealt, latents, *both
            )
        else:
            query = self._queries(weights, latents)
            mixed = self.mixed(query, *self._keys_values(weights, *self._latents_of_pair(weights, x)))
        return self.linear_by_rows(weights, "o", self._by_token(mixed))

    def _heads(self, weights: Weights, latents: Tensor, of_pair: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of latents; head by head, if attention is not fused."""
        heads = self._dealt(self._queries(weights, latents), *self._keys_values(weights, of_pair, key))
        if self.cut.flash or not (self.heads.is_dealt or self.heads.queries > 1):
            return heads
        return tuple(copied(self.graph, each) for each in heads)

    def _latents_of_pair(self, weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
        """Those of keys and values, and the one key that all heads share."""
        mla = self.model.mla
        assert mla is not None
        latent, shared = (
            self.own * self.narrow * width for width in (mla.kv_lora_rank, mla.qk_rope_head_dim)
        )
        both = self.split(self.linear(weights, "kv_down", self.local(x), latent + shared))
        latents, key = (self.copied(part, size) for part, size in zip(both, (latent, shared), strict=True))
        del both
        return self.norm(weights, "kv_norm", latents), self.gathered(key)

    def _queries(self, weights: Weights, latents: Tensor) -> Tensor:
        own, turned, _ = self._widths()
        name = "q_up" if "q_up" in weights else "q"
        parts = self.split(self.columns(weights, name, latents, own + turned))
        return self.joined(own + turned, parts[0], self.turned(parts[1], turned))

    def _keys_values(self, weights: Weights, latents: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        own, turned, value = self._widths()
        parts = self.split(self.columns(weights, "kv_up", latents, own + value))
        size = key.size
        of_all = self.turned(key, size)
        of_each = self.graph.op(of_all.storage, lambda _: (self.new(size),), of_all)
        return self.joined(own + turned, parts[0], of_each), self.copied(parts[1], value)

    def _widths(self) -> tuple[float, float, float]:
        """Bytes of all heads: what positions leave of a query or key, what they turn, and values."""
        mla = self.model.mla
        assert mla is not None
        heads = self.tokens * self.model.num_heads / self.tp * self.narrow
        return heads * mla.qk_nope_head_dim, heads * mla.qk_rope_head_dim, heads * mla.v_head_dim

    def feed_forward(self, weights: Weights, x: Tensor, *, width: float) -> Tensor:
        """down(silu(gate(x)) * up(x)), or down(gelu(up(x)))."""
        whole = self.gathered(x)
        names = ("gate", "up") if self.model.gated else ("up",)
        act = self.activated(*[self.linear(weights, name, whole, width) for name in names])
        return self.linear_by_rows(weights, "down", act)

    # --- experts -------------------------------------------------------------------------------

    def scores(self, weights: Weights, x: Tensor) -> Tensor:
        """The router's."""
        assert self.model.moe is not None
        return self.linear(
            weights, "router", self.flat(x), self.own * self.model.moe.num_experts * self.narrow
        )

    def mixture(self, weights: Weights, experts: Experts, x: Tensor, logits: Tensor) -> Tensor:
        """Copies of the tokens go to their experts and come back; what those answer is weighed and added."""
        moe = self.model.moe
        assert moe is not None
        tokens = self.flat(x)
        wide = self.graph.cast(logits, logits.size * self.number / self.narrow)
        gates = self.graph.cast(self._gates(wide), self.own * moe.top_k * self.narrow)
        if self.is_once:
            mixed = self._once_to_each(experts, tokens, gates)
        else:
            copies = self.selected(tokens, tokens.size * moe.top_k)
            arrived = self._by_expert(self._parts_gathered(self._sent(copies, there=True)))
            answers = self._sent(self._parts_added(self._by_rank(experts(arrived))), there=False)
            weighed = self.weighed(self.selected(answers, answers.size), gates)
            mixed = self._sum_of_choices(weighed)
        if not moe.shared_ffn_hidden:
            return mixed
        width = self.tokens * moe.shared_ffn_hidden / self.tp * self.narrow
        shared = partial(self.feed_forward, weights, width=width)
        return self.add(mixed, self._redone("shared_experts", shared, x))

    @property
    def is_once(self) -> bool:
        """Whether a token goes once to each rank, not to each expert."""
        return self.mesh.plan.dispatch == "per_rank" and bool(self.cut.ep > 1)

    def _met(self) -> tuple[float, float]:
        """On how many ranks the experts of a token lie, and at most how many on one of them."""
        assert self.model.moe is not None
        met = float(met_ranks(self.model.moe, self.cut.ep))
        return met, math.ceil(self.model.moe.top_k / met)

    @property
    def num_routes(self) -> float:
        """Numbers that say where the tokens go."""
        if self.model.moe is None:
            return 0.0
        choices = float(self.model.moe.top_k)
        if not self.is_once:
            return 3.0 * choices * self.own
        met, together = self._met()
        of_others = (choices + met * together) / float(self.cut.ep)
        return self.own * (choices + 2.0 * met + met * together + of_others)

    def _once_to_each(self, experts: Experts, tokens: Tensor, gates: Tensor) -> Tensor:
        """Tokens go once to each rank, with the weights of its answers, which are added up there."""
        moe = self.model.moe
        assert moe is not None
        met, together = self._met()
        arrived = self._sent(self.selected(tokens, tokens.size * met), there=True)
        factors = self._exchanged(self.selected(gates, gates.size / moe.top_k * met * together))
        factors = self.selected(factors, gates.size)
        copies = self.selected(arrived, tokens.size * moe.top_k)
        answers = experts(self._by_expert(self._parts_gathered(copies)))
        weighed = self.weighed(self._parts_added(self._by_rank(answers)), factors)
        size = weighed.size
        sums = self.graph.op(self._filled(arrived.size), lambda _: (self.new(size),), weighed)
        back = self.selected(self._sent(sums, there=False), arrived.size)
        return self._sum_of_choices(back)

    def experts(self, weights: Weights, x: Tensor) -> Tensor:
        """The MLPs of the rank's experts."""
        moe = self.model.moe
        assert moe is not None
        width = x.size / self.model.hidden * moe.ffn_hidden / float(self.cut.etp)
        names = ("expert_gate", "expert_up") if self.model.gated else ("expert_up",)
        wide = [self.linear(weights, name, x, width) for name in names]
        act = self.activated(*wide)
        answers = partial(self.linear, weights, "expert_down", size=x.size)
        if not self._is_redone("moe_act"):
            return answers(act)
        assert isinstance(act.origin, Node)
        again = MadeAgain(self.graph, partial(self._activated_again, wide[0].size))
        again.keep(*(Tensor(each.found()) for each in act.origin.saved))
        with again.reading((act,)):
            return answers(act)

    def _activated_again(self, size: float, *kept: Tensor) -> tuple[Tensor]:
        """Of what the activation kept, in its type or a narrow one."""
        return (self.activated(*(x if x.size == size else Tensor(self.new(size)) for x in kept)),)

    def _gates(self, wide: Tensor) -> Tensor:
        """The chosen ones of the probabilities."""
        assert self.model.moe is not None
        size = wide.size
        scores, chosen = self.new(size), size / self.model.moe.num_experts * self.model.moe.top_k
        found = self.graph.op(scores, lambda *_: (self.new(size),), wide, saved=(scores,))
        return self.graph.op(self.new(chosen), lambda _: (self._filled(size),), found)

    def selected(self, x: Tensor, size: float) -> Tensor:
        """Rows of x."""
        before = x.size
        return self.graph.op(self.new(size), lambda _: (self._filled(before),), x)

    def _filled(self, size: float) -> Storage:
        """Zeros, and what some of them become."""
        zeros = self.new(size)
        filled = self.new(size)
        del zeros
        return filled

    def _sent(self, copies: Tensor, *, there: bool) -> Tensor:
        """All-to-all, where experts are spread; what goes `there`, copies or gradients, may be in fp8.

        More copies, or fewer, come to the experts of a rank than it sends if their load is uneven.
        """
        is_alone, is_narrow = bool(self.cut.ep == 1), self.mesh.plan.dispatch_dtype == "fp8"
        if is_alone and not is_narrow:
            return copies
        load, new = float(self.mesh.imbalance), self.new

        def sent(before: Storage, *, there: bool, is_narrow: bool, make: NewStorage = new) -> Storage:
            def exchange(rows: Storage) -> Storage:
                return rows if is_alone else make(round(rows.size * load if there else rows.size / load))

            if is_narrow:
                return sent_narrow(self.graph.memory, before.size, self.narrow, exchange)
            return exchange(before)

        result = sent(copies.storage, there=there, is_narrow=is_narrow and there, make=self._result)
        return self.graph.op(
            result, lambda grad: (sent(grad, there=not there, is_narrow=is_narrow and not there),), copies
        )

    def _exchanged(self, x: Tensor) -> Tensor:
        """All-to-all, of as many bytes."""
        size = x.size
        return self.graph.op(self._result(size), lambda _: (self.new(size),), x)

    def _parts_gathered(self, copies: Tensor) -> Tensor:
        """For ranks that hold parts of the same experts."""
        parts = float(self.cut.etp)
        if parts == 1:
            return copies
        return self.graph.op(
            self.new(copies.size * parts), lambda grad: (self.new(grad.size / parts),), copies
        )

    def _parts_added(self, answers: Tensor) -> Tensor:
        """The way back."""
        parts = float(self.cut.etp)
        if parts == 1:
            return answers
        return self.graph.op(
            self._result(answers.size / parts), lambda grad: (self.new(grad.size * parts),), answers
        )

    def _by_expert(self, copies: Tensor) -> Tensor:
        """In another order, where several ranks send to several experts; of single rows a view, at first."""
        if not self._is_mixed:
            return copies
        size, is_view = copies.size, self._num_alike(copies) == 1
        return self.graph.op(
            copies.storage if is_view else self.new(size), lambda _: (self.new(size),), copies
        )

    def _by_rank(self, answers: Tensor) -> Tensor:
        """The inverse."""
        if not self._is_mixed:
            return answers
        size, is_view = answers.size, self._num_alike(answers) == 1
        return self.graph.op(self.new(size), lambda grad: (grad if is_view else self.new(size),), answers)

    @property
    def _is_mixed(self) -> bool:
        """Whether what comes from several ranks is of several experts."""
        assert self.model.moe is not None
        return not (self.model.moe.num_experts == self.cut.ep or self.cut.ep * self.cut.etp == 1)

    def _num_alike(self, copies: Tensor) -> float:
        """Copies of one expert from one rank."""
        assert self.model.moe is not None
        rows = copies.size / self.narrow / self.model.hidden
        return rows / (self.model.moe.num_experts * float(self.cut.etp))

    def weighed(self, answers: Tensor, gates: Tensor) -> Tensor:
        """Answers times gates, whose gradients are sums over the products' rows."""
        saved, sums, size = (answers.storage, gates.storage), (gates.size,), answers.size

        def back(*_: Storage) -> tuple[Storage, Storage]:
            return self.new(size), self.new(size)

        return self.graph.op(self.new(size), back, answers, gates, saved=saved, sums=sums)

    def _sum_of_choices(self, weighed: Tensor) -> Tensor:
        """Of all of a token's experts; the gradient is repeated for each, where there are several."""
        size = weighed.size
        return self.graph.op(
            self.new(self.x), lambda grad: (grad if size == self.x else self.new(size),), weighed
        )

    def _redone(self, module: str, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`function` of `inputs`, computed again in the backward where the plan says so."""
        again = self.checkpoints.again
        return again(function, *inputs) if self._is_redone(module) else function(*inputs)

    def _read_again(self, module: str, make: Make, read: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`read` of what `make` makes, in the backward again where the plan says so."""
        if self._is_redone(module):
            return read_again(self.graph, make, read, *inputs)
        return read(*make(*inputs))

    def _is_redone(self, module: str) -> bool:
        """Whether the plan recomputes a module, and it is not inside another one."""
        is_inside = "moe" in self.redone and module in ("moe_act", "shared_experts")
        return module in self.redone and not is_inside

    def _result(self, size: float) -> Storage:
        """Of an op that torchtitan's selective checkpointing keeps."""
        return self.checkpoints.kept(size) if self._is_redone("per_op") else self.new(size)

    # --- ops -----------------------------------------------------------------------------------

    def columns(self, weights: Weights, name: str, x: Tensor, size: float) -> Tensor:
        """Of all tokens, to a rank's part of the columns."""
        return self.linear(weights, name, self.gathered(x), size)

    def linear_by_rows(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        """To all tokens' hidden numbers, a sum over tp."""
        return self.scattered(self.linear(weights, name, x, self.whole, adds_up=self.is_cut))

    def norm(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        """Keeps its input and a number or two of each row; a bias or not, its gradient is made."""
        weight, bias = weights[name], weights.get(f"{name}_bias")

        def back(_: Storage, kept: Storage, scales: Storage) -> tuple[Storage, ...]:
            sums = self.new(scales.size)
            found = self.new(size), self.new(weight.made), self.new(weight.made)
            del sums
            return found if bias is not None else found[:2]

        x = self.local(x)
        size = x.size
        scales = self.new(self.scales)
        inputs = (x, weight) if bias is None else (x, weight, bias)
        return self.graph.op(self.new(size), back, *inputs, saved=(x.storage, scales))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """A residual."""
        return self.graph.op(self.new(x.size), lambda grad: (grad, grad), x, y)

    def gathered(self, x: Tensor) -> Tensor:
        """A rank's part of the tokens becomes all of them; of all, gradients are summed over tp."""
        if not self.is_cut:
            return x
        own = x.size
        if not self.is_split:
            return self.graph.op(x.storage, lambda _: (self.new(own),), x)
        return self.graph.op(self._all_tokens(own), lambda _: (self._own_tokens(own),), x)

    def scattered(self, x: Tensor) -> Tensor:
        """The sum over tp, of a rank's part of the tokens or of all."""
        if not self.is_cut:
            return x
        if not self.is_split:
            return copied(self.graph, x)
        own = x.size / self.tp
        return self.graph.op(self._own_tokens(own), lambda _: (self._all_tokens(own),), x)

    def _all_tokens(self, own: float) -> Storage:
        """What is gathered; of several sequences it has to be put in order."""
        came = self.new(own * self.tp)
        return came if self.mesh.microbatch == 1 else self.new(own * self.tp)

    def _own_tokens(self, own: float) -> Storage:
        """What is summed, by way of a copy of what the rank has."""
        copy = self.new(own * self.tp)
        summed = self._result(own)
        del copy
        return summed

    def local(self, x: Tensor) -> Tensor:
        """Out of a DTensor, where tp cuts tokens."""
        return self.flat(x) if self.is_split else x

    def flat(self, x: Tensor) -> Tensor:
        """Another view of the same."""
        return self.graph.op(x.storage, lambda grad: (grad,), x)

    def copied(self, x: Tensor, size: float) -> Tensor:
        """In one piece."""
        return self.graph.op(self.new(size), lambda grad: (grad,), x)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Two parts of the same memory, whose gradients are put together."""
        size = x.size
        first = self.graph.op(x.storage, lambda *_: (self.new(size),), x)
        return first, Tensor(x.storage, first.origin, 1)

    def joined(self, size: float, *parts: Tensor) -> Tensor:
        """Two parts in new memory, whose gradients are views."""
        return self.graph.op(self.new(size), lambda grad: (grad, grad), *parts)

    def turned(self, x: Tensor, size: float) -> Tensor:
        """Rotary positions of `size` bytes; the way back turns by negative sines."""

        def back(_: Storage) -> tuple[Storage]:
            sine = self.new(self.sine)
            found = self._put_together(size)
            del sine
            return (found,)

        return self.graph.op(self._put_together(size), back, x)

    def _put_together(self, size: float) -> Storage:
        """Halves by cosines and sines."""
        first, second = self._half(size / 2.0), self._half(size / 2.0)
        whole = self.new(size)
        del first, second
        return whole

    def _half(self, size: float) -> Storage:
        parts = self.new(size), self.new(size)
        found = self.new(size)
        del parts
        return found

    def in_order(self, name: str, x: Tensor) -> Tensor:
        """Heads beside tokens, whose gradient is copied where it lies in another order.

        But not one that positions turn back.
        """
        order = self.order
        is_copied = self.heads.is_mixed if self.heads.is_dealt else getattr(order, name)
        if (self.model.positions == "rotary" and name != "v") or not is_copied:
            return x
        size = x.size
        return self.graph.op(x.storage, lambda _: (self.new(size),), x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Fused attention keeps what it reads, its result, and a number of each query."""
        if not self.cut.flash:
            scores = self.lse * self.narrow / self.number * float(self.cut.seq)
            is_in_order = self._is_redone("mla_up_proj")
            return attend_unfused(self.graph, self.heads, scores, q, k, v, is_in_order=is_in_order)
        sizes = q.size, k.size, v.size
        out, lse = self._attended(sizes)

        def back(*_: Storage) -> tuple[Storage, ...]:
            if self.ring.size > 1:
                return ring_gradients(self.graph.memory, self.ring, sizes)
            return tuple(self.new(size) for size in sizes)

        saved = (q.storage, k.storage, v.storage, out, lse)
        return self.graph.op(out, back, q, k, v, saved=saved)

    def _attended(self, sizes: tuple[float, float, float]) -> tuple[Storage, Storage]:
        if self.ring.size > 1:
            return ring_attention(self.graph.memory, self.ring, self._result, sizes)
        q, k, v = sizes
        return self._result(q * v / k), self._result(self.lse)

    def activated(self, *wide: Tensor) -> Tensor:
        """SwiGLU of gate and up, which makes silu(gate) again, or GELU of up."""
        size, saved, widened = wide[0].size, tuple(each.storage for each in wide), 0.0
        if self.cut.narrow_act_input:
            saved, widened = tuple(kept_narrow(self.graph.memory, size, self.narrow) for _ in wide), size

        def back(_: Storage, *read: Storage) -> tuple[Storage, ...]:
            if len(read) == 1:
                return (self.new(size),)
            product = self.new(size)
            of_gate = self.new(size)
            del product
            silu = self.new(size)
            of_up = self.new(size)
            del silu
            return of_gate, of_up

        silu = self.new(size) if len(wide) == 2 else None
        product = self.new(size)
        del silu
        return self.graph.op(product, back, *wide, saved=saved, widened=widened)

    # --- ends ----------------------------------------------------------------------------------

    def embedding(self, weights: Weights) -> Tensor:
        """Rows of the tables; where the words are cut, a mask says which tokens are elsewhere."""
        table, places = weights["tokens"], weights.get("positions")
        x = self.graph.op(self._rows(), lambda _: (self.new(table.size * self.tp),), table)
        x = self.scattered(x)
        if places is None:
            return x
        rows = self.graph.op(self.new(self.places), lambda _: (self.new(places.made),), places)
        return self.graph.op(self.new(self.x), lambda grad: (grad, self.new(self.places)), x, rows)

    def _rows(self) -> Storage:
        if not self.is_cut:
            return self.new(self.x)
        flag, place = self.tokens, 8.0 * self.tokens
        self.graph.memory.play(3.0 * flag, -2.0 * flag, 2.0 * place, -place)
        rows = self.new(self.whole)
        self.graph.memory.play(-place - flag)
        return rows

    def head(self, weights: Weights, x: Tensor) -> Tensor:
        """Logits of all tokens; where the loss is computed in chunks, the last norm's result."""
        return self.read(weights, self.norm(weights, "final_norm", x))

    def read(self, weights: Weights, normed: Tensor) -> Tensor:
        """Logits, or what they will be made of in chunks."""
        if self.cut.loss_chunks > 1:
            return normed
        return self.linear(weights, self.table, self.gathered(normed), self.logits)

    def projected(self, weights: Weights, x: Tensor) -> Tensor:
        """What multi-token prediction joins, to hidden numbers; tp cuts the columns and then gathers them."""
        columns = self.linear(weights, "projection", self.gathered(x), self.x)
        if not self.is_cut:
            return columns
        came = self.new(self.whole)
        whole = self.graph.op(self.new(self.whole), lambda _: (self.new(self.x),), columns)
        del columns, came
        return self.graph.op(self.new(self.x), lambda _: (self.new(self.whole),), whole)

    @property
    def table(self) -> str:
        """The head's matrix."""
        return "tokens" if self.model.tied_embedding else "logits"

    def loss(self, weights: Weights, found: Tensor) -> Tensor:
        """The mean loss of what the head gives."""
        if self.cut.loss_chunks == 1:
            return self.losses.mean(found, self.tokens)
        return self.losses.in_chunks(weights[self.table], self.gathered(found), self.logits, self.tokens)

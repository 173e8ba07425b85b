"""The modules of a decoder on PyTorch's own parts, as tensors that are nothing but their bytes.

Each function makes what the module of `meshwise run train` makes, in its order, and lets go of it where that
does. Weights are `Leaf`s by name; `forward` of a block or an end is called inside a `Graph`.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwise.estimate.live_tensors import Graph, Leaf, Memory, Storage, Tensor
from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.program.cut import Cut

Weights = Mapping[str, "Weight"]


class Weight(Leaf):
    """A weight as a tensor-parallel rank has it.

    `size`: bytes of its gradient; `made`: of what an op finds, which for an embedding cut by tp is of all
    words; `is_apart`: tp sums or cuts it before the replicas do.
    """

    def __init__(self, memory: Memory, size: float, made: float, num_uses: int, *, is_apart: bool) -> None:
        super().__init__(memory, num_uses)
        self.size, self.made, self.is_apart = size, made, is_apart

    def summed(self, grads: list[Storage]) -> Storage:
        """Of a table's two uses, each cut as the table is."""
        if len(grads) == 1:
            return grads[0]
        cut = [grad if grad.size == self.size else self.memory.new(self.size) for grad in grads]
        return self.memory.new(cut[0].size)


class Modules:
    """The modules of a rank; sizes in bytes are of a microbatch."""

    def __init__(self, model: Model, mesh: Mesh, cut: Cut, graph: Graph) -> None:
        self.model, self.mesh, self.cut, self.graph = model, mesh, cut, graph
        self.new = graph.memory.new
        narrow, wide = cut.precision.act_bytes, cut.precision.stat_bytes
        tokens, tp = float(cut.tokens), float(mesh.tp)
        self.tokens, self.number, self.tp = tokens, wide, tp
        self.is_cut, self.is_cast = tp > 1, narrow < wide
        self.whole = tokens * model.hidden * narrow
        self.x = self.whole / tp
        self.places = tokens / float(mesh.microbatch) / tp * model.hidden * narrow
        self.sine = tokens / float(mesh.microbatch) * model.head_dim / 2.0 * narrow
        self.q = tokens * model.num_heads / tp * model.head_dim * narrow
        self.kv = tokens * model.num_kv_heads / tp * model.head_dim * narrow
        self.ffn = tokens * model.ffn_hidden / tp * narrow
        self.lse = tokens * model.num_heads / tp * wide
        self.scales = tokens / tp * (1.0 + (model.norm == "layernorm")) * wide
        self.logits, self.softmax = (tokens * model.vocab / tp * size for size in (narrow, wide))

    # --- blocks --------------------------------------------------------------------------------

    def block(self, weights: Weights, x: Tensor) -> Tensor:
        """Attention and feed-forward, each behind a norm and beside a residual."""
        x = self.add(x, self.attention(weights, self.norm(weights, "norm1", x)))
        return self.add(x, self.feed_forward(weights, self.norm(weights, "norm2", x)))

    def attention(self, weights: Weights, x: Tensor) -> Tensor:
        """Causal attention; local heads are those of tp."""
        model = self.model
        whole = self.gathered(x)
        q, k, v = (
            self.in_order(self.linear(weights, name, whole, size), heads / self.tp, is_turned)
            for name, size, heads, is_turned in (
                ("q", self.q, model.num_heads, model.positions == "rotary"),
                ("k", self.kv, model.num_kv_heads, model.positions == "rotary"),
                ("v", self.kv, model.num_kv_heads, False),
            )
        )
        if model.positions == "rotary":
            q, k = (self.turned(part) for part in (q, k))
        is_redone = "core_attn" in self.redone
        mixed = self.graph.again(self.attend, q, k, v) if is_redone else self.attend(q, k, v)
        return self.linear_by_rows(weights, "o", mixed)

    def feed_forward(self, weights: Weights, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x)), or down(gelu(up(x)))."""
        whole = self.gathered(x)
        names = ("gate", "up") if self.model.gated else ("up",)
        act = self.activated(*[self.linear(weights, name, whole, self.ffn) for name in names])
        return self.linear_by_rows(weights, "down", act)

    @property
    def redone(self) -> tuple[str, ...]:
        """Modules that are computed again."""
        return self.mesh.plan.recompute_modules if self.mesh.plan.recompute == "selective" else ()

    # --- ops -----------------------------------------------------------------------------------

    def linear(self, weights: Weights, name: str, x: Tensor, size: float) -> Tensor:
        """The gradient of a matrix alone comes before that of its input; beside a bias, behind it."""
        weight, bias = weights[name], weights.get(f"{name}_bias")

        def back(_: Storage, kept: Storage) -> tuple[Storage, ...]:
            if bias is None:
                of_weight = self.new(weight.made)
                return self.new(kept.size), of_weight
            return self.new(kept.size), self.new(weight.made)

        sums = () if bias is None else (bias.made,)
        biases = () if bias is None else (bias,)
        return self.graph.op(self.new(size), back, x, weight, *biases, saved=(x.storage,), sums=sums)

    def linear_by_rows(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        """To all tokens' hidden numbers, a sum over tp; each rank adds its part of a bias."""
        bias = weights.get(f"{name}_bias")
        part = self.new(bias.size) if self.is_cut and bias is not None else None
        partial_sum = self.linear(weights, name, x, self.whole)
        del part
        return self.scattered(partial_sum)

    def norm(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        """Keeps its input and a number or two of each row; a bias or not, its gradient is made."""
        weight, bias = weights[name], weights.get(f"{name}_bias")

        def back(_: Storage, kept: Storage, scales: Storage) -> tuple[Storage, ...]:
            sums = self.new(scales.size)
            found = self.new(self.x), self.new(weight.made), self.new(weight.made)
            del sums
            return found if bias is not None else found[:2]

        x = self.graph.op(x.storage, lambda grad: (grad,), x) if self.is_cut else x  # out of a DTensor
        scales = self.new(self.scales)
        inputs = (x, weight) if bias is None else (x, weight, bias)
        return self.graph.op(self.new(self.x), back, *inputs, saved=(x.storage, scales))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """A residual."""
        return self.graph.op(self.new(x.size), lambda grad: (grad, grad), x, y)

    def gathered(self, x: Tensor) -> Tensor:
        """A rank's part of the tokens becomes all of them."""
        if not self.is_cut:
            return x
        return self.graph.op(self._all_tokens(), lambda _: (self._own_tokens(),), x)

    def scattered(self, x: Tensor) -> Tensor:
        """The sum over tp of a rank's part of the tokens."""
        if not self.is_cut:
            return x
        return self.graph.op(self._own_tokens(), lambda _: (self._all_tokens(),), x)

    def _all_tokens(self) -> Storage:
        """What is gathered; of several sequences it has to be put in order."""
        came = self.new(self.whole)
        return came if self.mesh.microbatch == 1 else self.new(self.whole)

    def _own_tokens(self) -> Storage:
        """What is summed, by way of a copy of what the rank has."""
        copy = self.new(self.whole)
        summed = self.new(self.x)
        del copy
        return summed

    def turned(self, x: Tensor) -> Tensor:
        """Rotary positions; the way back turns by negative sines."""

        def back(grad: Storage) -> tuple[Storage]:
            sine = self.new(self.sine)
            found = self._put_together(grad.size)
            del sine
            return (found,)

        return self.graph.op(self._put_together(x.size), back, x)

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

    def in_order(self, x: Tensor, num_heads: float, is_turned: bool) -> Tensor:
        """Heads beside tokens; the gradient of several comes token by token of each head, and is copied."""
        if is_turned or num_heads <= 1:
            return x
        return self.graph.op(x.storage, lambda grad: (self.new(grad.size),), x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Fused attention keeps what it reads, its result, and a number of each query."""
        out, lse = self.new(q.size * v.size / k.size), self.new(self.lse)

        def back(_: Storage, *kept: Storage) -> tuple[Storage, ...]:
            return tuple(self.new(each.size) for each in kept[:3])

        saved = (q.storage, k.storage, v.storage, out, lse)
        return self.graph.op(out, back, q, k, v, saved=saved)

    def activated(self, *wide: Tensor) -> Tensor:
        """SwiGLU of gate and up, which makes silu(gate) again, or GELU of up."""
        saved = tuple(each.storage for each in wide)
        size = wide[0].size
        if len(wide) == 1:
            return self.graph.op(self.new(size), lambda grad, _: (self.new(size),), *wide, saved=saved)

        def back(*_: Storage) -> tuple[Storage, Storage]:
            product = self.new(size)
            of_gate = self.new(size)
            del product
            silu = self.new(size)
            of_up = self.new(size)
            del silu
            return of_gate, of_up

        silu = self.new(size)
        product = self.new(size)
        del silu
        return self.graph.op(product, back, *wide, saved=saved)

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
        normed = self.norm(weights, "final_norm", x)
        if self.cut.loss_chunks > 1:
            return normed
        return self.linear(weights, self.table, self.gathered(normed), self.logits)

    @property
    def table(self) -> str:
        """The head's matrix."""
        return "tokens" if self.model.tied_embedding else "logits"

    def loss(self, weights: Weights, found: Tensor) -> Tensor:
        """The mean loss of what the head gives."""
        if self.cut.loss_chunks > 1:
            return self.loss_in_chunks(weights[self.table], found)
        return self.split_loss(found) if self.is_cut else self.whole_loss(found)

    def widened(self, logits: Tensor) -> Tensor:
        """In the type of the loss."""
        if not self.is_cast:
            return logits
        return self.graph.op(self.new(self.softmax), lambda _: (self.new(self.logits),), logits)

    def whole_loss(self, logits: Tensor) -> Tensor:
        """Cross entropy: its softmax, and the gradients of both halves."""
        wide = self.widened(logits)
        scores = self.new(self.softmax)

        def back(*_: Storage) -> tuple[Storage]:
            return (self.new(self.softmax),)

        found = self.graph.op(scores, back, wide, saved=(scores,))
        mean, weight = self.new(self.number), self.new(self.number)
        return self.graph.op(mean, back, found, saved=(scores, weight))

    def loss_in_chunks(self, table: Weight, normed: Tensor) -> Tensor:
        """Logits, loss and gradients of one chunk of tokens after the other, then times those of the loss."""
        number, one = self.cut.loss_chunks, self.number
        logits, softmax, part = self.logits / number, self.softmax / number, self.x / number
        cast, back = (softmax, [logits, -softmax]) if self.is_cast else (0.0, [])
        chunk = [
            *[logits, cast, softmax, 2.0 * one, -logits, -cast, one, -one, 2.0 * one, softmax],
            *[-2.0 * one, softmax, -2.0 * softmax, *back, table.made, part, -logits, -one, -part],
        ]
        of_x, play = self.new(self.x), self.graph.memory.play
        play(*chunk, *[*chunk, -table.made] * (number - 1), number * one, one, -2.0 * number * one)
        of_table, mean = self.adopted(table.made), self.adopted(one)

        def times(*_: Storage) -> tuple[Storage, Storage]:
            return self.new(self.x), self.new(table.made)

        return self.graph.op(mean, times, normed, table, saved=(of_x, of_table))

    def split_loss(self, logits: Tensor) -> Tensor:
        """The same of a vocabulary that tp cuts: masked targets, three numbers of each token summed."""
        one, wide, flag, place = self.number, self.number * self.tokens, self.tokens, 8.0 * self.tokens
        softmax, play = self.softmax, self.graph.memory.play
        elsewhere = [3.0 * flag, -2.0 * flag, 2.0 * place, -place, 8.0, -8.0]
        scores = self.widened(logits)
        play(wide, wide, -wide, softmax, softmax, wide, -softmax, wide, -wide, wide, softmax)
        play(-softmax, -3.0 * wide, flag, place, -flag, *elsewhere, wide, one, -one, -flag, wide, wide)
        play(flag, wide, -flag, -wide, flag, 8.0, -flag, one, -8.0, 2.0 * one, -one)
        play(-3.0 * wide, -2.0 * place)

        def back(_: Storage) -> tuple[Storage]:
            play(one, flag, place, -flag, softmax, *elsewhere, wide, wide, -wide, place, flag, wide, -flag)
            play(-one, softmax, softmax, -softmax, softmax, -softmax, -2.0 * wide, -3.0 * place, -softmax)
            play(-flag, -one, -softmax)
            return (self.adopted(softmax),)

        return self.graph.op(self.adopted(one), back, scores)

    def adopted(self, size: float) -> Storage:
        """Of bytes that are there already."""
        self.graph.memory.play(-size)
        return self.new(size)

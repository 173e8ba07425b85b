"""The most bytes that all tensors of a training step on PyTorch's own parts hold at once, by a walk through.

What is kept for the backward is `estimate.fsdp2_memory`'s; this is everything: shards, whole weights, what
FSDP2 moves them through, gradients, temporaries of each op, the optimizer's. The step is written down as
changes of what is alive, in the order in which ops make tensors and the last of their readers lets go.

Known for dense models on replicas that share their states, each cut by tp or not (`is_known`): recomputation
of whole blocks, of the core attention or none, and several microbatches in narrow types or, where all
replicas share, under ZeRO 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import CORE_ATTENTION, DEFAULTS
from meshwise.plan.stages import stages_of
from meshwise.program.cut import Cut
from meshwise.program.fsdp2 import Unit, tp_sums, units
from meshwise.program.tensor_1d import shards

Changes = list[float]
"""Bytes that come (positive) and go (negative), one after the other."""


OTHERS = (
    *("attention", "lora_rank", "optimizer", "grad_dtype", "offload_optimizer", "offload_activations"),
    "recompute_every",
)
"""Keys of a plan that are walked by their defaults only."""


def is_known(model: Model, mesh: Mesh) -> bool:
    """Whether the walk states this model and plan."""
    is_alone = mesh.pp == mesh.cp == 1 < mesh.zero_group and mesh.zero >= 1
    is_dense = model.moe is None and model.mla is None and mesh.plan.act_input_dtype == "bf16"
    is_plain = mesh.plan.dtype != "fp8" and (mesh.plan.sequence_parallel or mesh.tp == 1)
    is_default = all(getattr(mesh.plan, key) == DEFAULTS[key] for key in OTHERS)
    is_once = mesh.num_microbatches == 1 or mesh.zero == 2
    is_summed = is_once or mesh.plan.dtype in ("bf16", "fp16")
    is_one_sum = mesh.num_microbatches == 1 or mesh.zero != 2 or mesh.zero_group == mesh.dp
    is_apart = mesh.tp == 1 or (mesh.plan.loss_chunks == 1 and (is_once or not model.tied_embedding))
    is_core = mesh.plan.recompute_modules in ((), CORE_ATTENTION)
    known = (is_alone, is_dense, is_plain, is_default, is_summed, is_one_sum, is_apart, is_core)
    return all(map(bool, known))


def live_peak_bytes(model: Model, mesh: Mesh, cut: Cut, steps: int) -> float:
    """The peak of `steps` steps on a rank."""
    return max(accumulate(changes(model, mesh, cut, steps)))


def changes(model: Model, mesh: Mesh, cut: Cut, steps: int) -> Changes:
    """All changes of `steps` steps (a third is like the second)."""
    walk = _Walk(model, mesh, cut)
    found = [walk.fixed, *walk.step(), *walk.optimizer(is_first=True)]
    return found + (walk.step() + walk.optimizer(is_first=False) if steps > 1 else [])


@dataclass(frozen=True, slots=True)
class _Group:
    """Weights that FSDP2 gathers together, sizes by name.

    `grads`: bytes of each one's whole gradient; `sums`: of those of several microbatches; `local`: of a
    rank's part of each in fp32; `made`: of each as the backward makes it, which for an embedding cut by tp is
    of all words. `over_tp`: those that tp sums or cuts before they are reduced. `whole`: bytes of all
    gathered; `wide`: of what is reduced; `shard`: of a rank's part of that.
    """

    grads: dict[str, float]
    sums: dict[str, float]
    made: dict[str, float]
    over_tp: tuple[str, ...]
    local: dict[str, float]
    whole: float
    wide: float
    shard: float

    @property
    def gather(self) -> Changes:
        """The rank's own part, and what all of them are gathered into, which stays."""
        part = self.whole * self.shard / self.wide
        return [part, self.whole, -part]

    def linear(self, name: str, result: float, kept: float, *, is_redone: bool) -> Changes:
        """Backward of a linear layer to the gradient of its input, of `result` bytes, and of its weights.

        `kept`: bytes of its input, if nothing else keeps it; what a recomputation brought back goes sooner.
        """
        bias = self.grads.get(f"{name}_bias")
        if bias is None:
            return [self.grads[name], result, -kept]
        return [result, self.grads[name], *([-kept, bias] if is_redone else [bias, -kept])]


class _Walk:
    """The sizes of a rank's tensors, and the changes that each module makes."""

    def __init__(self, model: Model, mesh: Mesh, cut: Cut) -> None:
        self.model, self.mesh, self.cut = model, mesh, cut
        self.narrow, self.wide = cut.precision.act_bytes, cut.precision.stat_bytes
        tokens, positions, tp = float(mesh.microbatch * mesh.seq), float(mesh.seq), float(mesh.tp)
        self.tokens, self.tp, self.is_cut, self.is_single = tokens, tp, tp > 1, mesh.microbatch == 1
        self.sine = positions * model.head_dim / 2.0 * self.narrow
        self.places = positions / tp * model.hidden * self.narrow * (model.positions == "learned")
        self.whole = tokens * model.hidden * self.narrow
        self.x = self.whole / tp
        self.q = tokens * model.num_heads / tp * model.head_dim * self.narrow
        self.kv = tokens * model.num_kv_heads / tp * model.head_dim * self.narrow
        self.ffn = tokens * model.ffn_hidden / tp * self.narrow
        self.lse = tokens * model.num_heads / tp * self.wide
        self.scales = tokens / tp * (1.0 + (model.norm == "layernorm")) * self.wide
        self.logits, self.softmax = (tokens * model.vocab / tp * size for size in (self.narrow, self.wide))
        self.is_freed, self.is_rotary = bool(mesh.zero >= 3), model.positions == "rotary"
        (stage,) = stages_of(model, mesh)
        *ends, block = (self.group(unit) for unit in units(model, stage, mesh) if unit.count)
        self.embedding, self.block, self.head = ends[0], block, ends[-1]
        self.is_in_chunks = cut.loss_chunks > 1
        self.redoes_core = mesh.plan.recompute == "selective"
        self.num_redone = float(mesh.recompute_layers) * (mesh.plan.recompute == "full")
        blocks = [block] * model.num_layers
        self.groups = (
            [self.embedding, *blocks] if model.tied_embedding else [self.embedding, *blocks, self.head]
        )
        numbers = 8.0 * (2.0 * float(mesh.num_microbatches) * tokens + positions)  # tokens, labels, places
        self.fixed = numbers + 2.0 * self.sine + sum(group.shard for group in self.groups)

    def group(self, unit: Unit) -> _Group:
        """A unit of weights; torch lists the norms of a block before its matrices."""
        norms_first = sorted(unit.weights, key=lambda weight: not weight.name.startswith("norm"))
        parts = {
            weight.name: Unit(weights=(weight,), count=1.0, gathers=(0.0, 0.0)) for weight in norms_first
        }
        padded = float(unit.padded_size(self.mesh, self.cut))
        sizes = {weight.name: float(weight.size / shards(weight, self.cut)) for weight in norms_first}
        grads = {name: self.narrow * size for name, size in sizes.items()}
        words = ("tokens",) if self.is_cut and not self.model.tied_embedding else ()
        return _Group(
            grads=grads,
            sums={name: self.wide * size for name, size in sizes.items()},
            made={name: size * self.tp if name in words else size for name, size in grads.items()},
            over_tp=tuple(
                name for name, part in parts.items() if tp_sums(part.weights[0], self.cut) or name in words
            ),
            local={
                name: self.wide * float(part.local_size(self.mesh, self.cut)) for name, part in parts.items()
            },
            whole=self.narrow * padded,
            wide=self.wide * padded,
            shard=self.wide * padded / float(unit.sharing(self.mesh)),
        )

    # --- a step --------------------------------------------------------------------------------

    def step(self) -> Changes:
        """Forward and backward of all microbatches."""
        last = int(self.mesh.num_microbatches) - 1
        found: Changes = []
        for number in range(last + 1):
            found += self.forward(is_first=number == 0)
            found += self.backward(is_first=number == 0, is_last=number == last)
        return [*found, *[-self.wide] * (last + 1)]  # the losses

    def forward(self, *, is_first: bool) -> Changes:
        """From tokens to the gradient of the logits; under ZeRO 1 and 2 weights stay gathered."""
        found: Changes = []
        flat = 0.0
        block_forward = self.block_forward()
        for number, group in enumerate(self.groups):
            if is_first or self.is_freed:
                found += [*group.gather, group.whole, -flat]
                flat = group.whole
            if group is self.block:
                # what is done again later is more than here, so its peak is there
                found += [self.x] if number <= self.num_redone else block_forward
                found.append(-group.whole * self.is_freed)
            elif group is self.embedding:
                found += self.embedding_forward()
        if self.is_in_chunks:
            return [*found, self.scales, self.x, *self.loss_in_chunks(flat)]
        loss = self.split_loss(flat) if self.is_cut else self.loss(flat)
        return [*found, self.scales, self.x, *self.enter, self.logits, *loss]

    def backward(self, *, is_first: bool, is_last: bool) -> Changes:
        """From the gradient of the logits to those of all weights, reduced if `is_last` or under ZeRO 2."""
        found: Changes = []
        buffer = late = 0.0  # what the reduction before read, and the last gradient that it took
        is_tied = self.head is self.embedding
        if is_tied:
            found += [*self.block.gather * self.is_freed, *self.head_backward()]
        again = [*self.enter, *self.block_forward(), -self.x, *self.block_backward(is_redone=True)]
        block_backward = [*self.enter, *self.block_backward(is_redone=False)]
        for number, group in reversed(list(enumerate(self.groups))):
            found.append(-late)
            if group is self.block and self.is_freed:
                found += [group.whole, -group.whole]
            if number > 1 and self.is_freed:
                found += self.block.gather
            if group is self.block:
                found += again if number <= self.num_redone else block_backward
            elif group is self.embedding:
                found += self.embedding_backward()
            else:
                found += self.head_backward()
            is_summed = not is_first and self.mesh.zero != 2
            if is_summed:
                found += [-grad for grad in group.made.values()]  # added to those before
            if not is_last and self.mesh.zero != 2:
                found.append(-group.whole * self.is_freed)
                late = [*group.made.values()][-1] * is_first
                found += self.widened(group) if is_first else []
                continue
            grads = group.sums if is_summed else group.grads
            for name in group.over_tp if self.is_cut else ():
                found += [grads[name], -grads[name] * group.made[name] / group.grads[name]]
            *early, late = grads.values()
            found += [-group.whole * is_last, -buffer, group.wide, *(-grad for grad in early), group.shard]
            buffer, late = group.wide, late + group.shard * (not is_first and self.mesh.zero == 2)
        return [*found, -late, -buffer, -self.wide]

    def widened(self, group: _Group) -> Changes:
        """Gradients that wait for those of other microbatches, in the type of the sums."""
        made, wider = list(group.made.values()), self.wide / self.narrow
        pairs = zip(made, [0.0, *made], strict=False)
        return [change for one, before in pairs for change in (-before, wider * one)]

    # --- modules -------------------------------------------------------------------------------

    def block_forward(self) -> Changes:
        """From a block's input, which it keeps, to its output."""
        x, q, kv, ffn, scales = self.x, self.q, self.kv, self.ffn, self.scales
        turned = [*_turned(q), *_turned(kv), -q, -kv] if self.is_rotary else []
        mlp = [ffn, ffn, ffn, ffn, -ffn] if self.model.gated else [ffn, ffn]
        core = [self.lse, -self.lse * self.redoes_core]
        return [
            *[scales, x, *self.enter, q, kv, kv, *turned, q, *core, *self.leave("o"), x, -x],
            *[scales, x, *self.enter, *mlp, *self.leave("down"), x, -x],
        ]

    @property
    def enter(self) -> Changes:
        """A rank's part of the tokens becomes all of them, which stay."""
        copied = [] if self.is_single else [self.whole, -self.whole]
        return [self.whole, *copied] if self.is_cut else []

    def leave(self, name: str) -> Changes:
        """A partial result of all tokens is made and summed to the rank's part of them; their norm goes.

        Each rank adds its part of a bias.
        """
        bias = self.block.grads.get(f"{name}_bias", 0.0)
        return [bias, self.whole, -bias, *self.scattered, -self.x] if self.is_cut else [self.x]

    @property
    def scattered(self) -> Changes:
        """A tensor of all tokens becomes the sum of the rank's part, by way of a copy."""
        whole = self.whole
        return [whole, self.x, -whole, -whole] if self.is_cut else []

    def embedding_forward(self) -> Changes:
        """Rows of the table; where it is cut, a mask says which tokens are elsewhere."""
        found = [self.x]
        if self.is_cut:
            flag, number = self.tokens, 8.0 * self.tokens
            mask = [3.0 * flag, -2.0 * flag, 2.0 * number, -number]
            found = [*mask, self.whole, -number, -flag, *self.scattered]
        return [*found, *([self.places, self.x, -self.x, -self.places] if self.places else [])]

    def loss(self, flat: float) -> Changes:
        """Softmax and its gradient; `flat` is what the last weights came in."""
        one, softmax = self.wide, self.softmax
        cast = softmax * (self.narrow < self.wide)
        back = [self.logits, -softmax] if cast else []
        return [
            *[cast, softmax, one, one, -cast, -self.logits, -flat, one, -one, one],
            *[one, softmax, -one, -one, softmax, -softmax, -softmax, *back],
        ]

    def loss_in_chunks(self, flat: float) -> Changes:
        """Logits, loss and gradients of one chunk of tokens after the other, then times those of the loss."""
        number, scalar, x, table = self.cut.loss_chunks, self.wide, self.x, self.embedding.grads["tokens"]
        logits, softmax, part = self.logits / number, self.softmax / number, x / number
        cast, back = (softmax, [logits, -softmax]) if self.narrow < self.wide else (0.0, [])
        chunk = [
            *[logits, cast, softmax, 2.0 * scalar, -logits, -cast, scalar, -scalar, 2.0 * scalar, softmax],
            *[-2.0 * scalar, softmax, -2.0 * softmax, *back, table, part, -logits, -scalar, -part],
        ]
        return [
            *[x, *chunk, *[*chunk, -table] * (number - 1), number * scalar, scalar, -2.0 * number * scalar],
            *[-x, -flat, scalar, -scalar, 2.0 * scalar, x, table, -scalar, -x, -table],
        ]

    def split_loss(self, flat: float) -> Changes:
        """The same of a vocabulary that tp cuts: masked targets, three numbers of each token summed."""
        scalar, wide, flag, number = self.wide, self.wide * self.tokens, self.tokens, 8.0 * self.tokens
        softmax, cast = self.softmax, self.softmax * (self.narrow < self.wide)
        back = [self.logits, -softmax] if cast else []
        elsewhere = [3.0 * flag, -2.0 * flag, 2.0 * number, -number, 8.0, -8.0]
        return [
            *[-self.x, cast, wide, wide, -wide, softmax, softmax, wide, -softmax, wide, -wide, wide, softmax],
            *[
                -softmax,
                -3.0 * wide,
                flag,
                number,
                -flag,
                *elsewhere,
                wide,
                scalar,
                -scalar,
                -flag,
                wide,
                wide,
            ],
            *[flag, wide, -flag, -wide, flag, 8.0, -flag, scalar, -8.0, 2.0 * scalar, -scalar],
            *[-3.0 * wide, -2.0 * number, -cast, -self.logits, -flat, scalar, -scalar, 3.0 * scalar],
            *[
                flag,
                number,
                -flag,
                softmax,
                *elsewhere,
                wide,
                wide,
                -wide,
                number,
                flag,
                wide,
                -flag,
                -scalar,
            ],
            *[softmax, softmax, -softmax, softmax, -softmax, -2.0 * wide, -3.0 * number, -softmax, -flag],
            *[-2.0 * scalar, -softmax, *back],
        ]

    def head_backward(self) -> Changes:
        """From the gradient of the logits to that of the last block's output."""
        if self.is_in_chunks:
            return self.norm_backward(self.head, "final_norm")
        table = self.embedding.grads["tokens"]
        return [
            *[table, self.whole, -self.logits, -self.whole, *self.scattered],
            *self.norm_backward(self.head, "final_norm"),
        ]

    def norm_backward(self, group: _Group, name: str) -> Changes:
        """To the gradient of a norm's input, after which that input and that of its result are gone."""
        one = group.grads[name]
        no_bias = -one if f"{name}_bias" not in group.grads else 0.0
        return [self.scales, self.x, one, one, -self.scales, no_bias, -self.x, -self.x, -self.scales]

    def block_backward(self, *, is_redone: bool) -> Changes:
        """From the gradient of a block's output, of all tokens, to that of its input."""
        linear = partial(self.block.linear, is_redone=is_redone)
        group, x, ffn, whole, gone = self.block, self.x, self.ffn, self.whole, -self.whole * self.is_cut
        if self.model.gated:
            mlp = [
                *[*linear("down", ffn, ffn), gone, ffn, ffn, -ffn, ffn, ffn, -ffn, -ffn, -ffn, -ffn],
                *[
                    *linear("up", whole, 0.0),
                    -ffn,
                    *linear("gate", whole, whole),
                    -ffn,
                    whole,
                    -whole,
                    -whole,
                ],
            ]
        else:
            mlp = [*linear("down", ffn, ffn), gone, ffn, -ffn, -ffn, *linear("up", whole, whole), -ffn]
        return [
            *[*mlp, *self.scattered, *self.norm_backward(group, "norm2"), x, -x, -x],
            *[*self.attention_backward(linear), *self.norm_backward(group, "norm1"), x, -x, -x],
        ]

    def attention_backward(self, linear: Callable[[str, float, float], Changes]) -> Changes:
        """From the gradient of attention's output to that of the norm before it."""
        x, q, kv = self.whole, self.q, self.kv
        again = [q, self.lse] if self.redoes_core else []
        found = [*self.enter, *linear("o", q, q * self.redoes_core), -x * self.is_cut, *again]
        found += [q, kv, kv, -q, -q, -kv, -kv, -q, -self.lse]
        if self.is_rotary:
            found += [self.sine, *_turned(kv), -self.sine, -kv, self.sine, *_turned(q), -self.sine, -q]
        to_v = [kv, -kv] if self.model.num_kv_heads > self.tp else []  # one head lies in order
        to_k, to_q = ([], []) if self.is_rotary else (to_v, [q, -q] * (self.model.num_heads > self.tp))
        return [
            *[*found, *to_v, *linear("v", x, 0.0), -kv],
            *[*to_k, *linear("k", x, 0.0), -kv, x, -x, -x],
            *[*to_q, *linear("q", x, x), -q, x, -x, -x, *self.scattered],
        ]

    def embedding_backward(self) -> Changes:
        """Gradients of the tables; that of a tied one is added to the head's."""
        table, x = self.embedding.grads["tokens"], self.x
        found = [self.places, self.embedding.grads["positions"], -self.places] if self.places else []
        words = table * self.tp
        found += [*self.enter, -x, words, -self.whole] if self.is_cut else [table, -x]
        if not self.model.tied_embedding:
            return found
        return [*found, *([table, table, -words] if self.is_cut else [table]), -table, -table]

    # --- the optimizer -------------------------------------------------------------------------

    def optimizer(self, *, is_first: bool) -> Changes:
        """AdamW, weight by weight; the first time it makes its two states; then gradients go."""
        named = [one for group in self.groups for one in group.local.items()]
        local = [size for _, size in sorted(named, key=lambda one: _place(one[0]))]
        found = [size for size in local for _ in range(2)] if is_first else []
        for before, size in pairwise([0.0, *local]):
            found += [size, size, -before, -size]
        return [*found, -local[-1], *(-group.shard for group in self.groups)]


def _place(name: str) -> int:
    """Of a weight among those that the optimizer takes in turn."""
    return 0 if name == "positions" else 2 if name == "logits" or name.startswith("final_norm") else 1


def _turned(width: float) -> Changes:
    """Rotary positions of queries or keys of `width` bytes: halves by cosines and sines, put together."""
    half = width / 2.0
    once = [half, half, half, -half, -half]
    return [*once, *once, width, -half, -half]

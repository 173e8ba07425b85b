"""The most bytes that all tensors of a training step on PyTorch's own parts hold at once, by a walk through.

What is kept for the backward is `estimate.fsdp2_memory`'s; this is everything: shards, whole weights, what
FSDP2 moves them through, gradients, temporaries of each op, the optimizer's. The step is written down as
changes of what is alive, in the order in which ops make tensors and the last of their readers lets go.

Known for dense models on ranks that are all replicas (`is_known`): no other axis, states over all of them,
recomputation of whole blocks or none, and several microbatches in narrow types or under ZeRO 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import DEFAULTS
from meshwise.plan.stages import stages_of
from meshwise.program.cut import Cut
from meshwise.program.fsdp2 import Unit, units

Changes = list[float]
"""Bytes that come (positive) and go (negative), one after the other."""


OTHERS = (
    *("attention", "lora_rank", "optimizer", "grad_dtype", "offload_optimizer", "offload_activations"),
    *("recompute_every", "loss_chunks"),
)
"""Keys of a plan that are walked by their defaults only."""


def is_known(model: Model, mesh: Mesh) -> bool:
    """Whether the walk states this model and plan."""
    is_alone = mesh.tp == mesh.pp == mesh.cp == 1 < mesh.zero_group == mesh.dp and mesh.zero >= 1
    is_dense = model.moe is None and model.mla is None and mesh.plan.act_input_dtype == "bf16"
    is_default = all(getattr(mesh.plan, key) == DEFAULTS[key] for key in OTHERS)
    is_summed = mesh.num_microbatches == 1 or mesh.zero == 2 or mesh.plan.dtype in ("bf16", "fp16")
    return bool(is_alone and is_dense and is_default and is_summed and mesh.plan.recompute != "selective")


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
    rank's part of each in fp32. `whole`: bytes of all gathered; `wide`: of what is reduced; `shard`: of a
    rank's part of that.
    """

    grads: dict[str, float]
    sums: dict[str, float]
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
        tokens, positions = float(mesh.microbatch * mesh.seq), float(mesh.seq)
        self.sine = positions * model.head_dim / 2.0 * self.narrow
        self.places = positions * model.hidden * self.narrow * (model.positions == "learned")
        self.x = tokens * model.hidden * self.narrow
        self.q = tokens * model.num_heads * model.head_dim * self.narrow
        self.kv = tokens * model.num_kv_heads * model.head_dim * self.narrow
        self.ffn = tokens * model.ffn_hidden * self.narrow
        self.lse = tokens * model.num_heads * self.wide
        self.scales = tokens * (1.0 + (model.norm == "layernorm")) * self.wide
        self.logits, self.softmax = tokens * model.vocab * self.narrow, tokens * model.vocab * self.wide
        self.is_freed, self.is_rotary = bool(mesh.zero >= 3), model.positions == "rotary"
        (stage,) = stages_of(model, mesh)
        *ends, block = (self.group(unit) for unit in units(model, stage, mesh) if unit.count)
        self.embedding, self.block, self.head = ends[0], block, ends[-1]
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
        sizes = {weight.name: float(weight.size) for weight in norms_first}
        return _Group(
            grads={name: self.narrow * size for name, size in sizes.items()},
            sums={name: self.wide * size for name, size in sizes.items()},
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
                found += [self.x, self.places, self.x, -self.x, -self.places] if self.places else [self.x]
        return [*found, self.scales, self.x, self.logits, *self.loss(flat)]

    def backward(self, *, is_first: bool, is_last: bool) -> Changes:
        """From the gradient of the logits to those of all weights, reduced if `is_last` or under ZeRO 2."""
        found: Changes = []
        buffer = late = 0.0  # what the reduction before read, and the last gradient that it took
        is_tied = self.head is self.embedding
        if is_tied:
            found += [*self.block.gather * self.is_freed, *self.head_backward()]
        again = [*self.block_forward(), -self.x, *self.block_backward(is_redone=True)]
        block_backward = self.block_backward(is_redone=False)
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
                found += [-grad for grad in group.grads.values()]  # added to those before
            if not is_last and self.mesh.zero != 2:
                found.append(-group.whole * self.is_freed)
                late = [*group.grads.values()][-1] * is_first
                found += self.widened(group) if is_first else []
                continue
            *early, late = group.sums.values() if is_summed else group.grads.values()
            found += [-group.whole * is_last, -buffer, group.wide, *(-grad for grad in early), group.shard]
            buffer, late = group.wide, late + group.shard * (not is_first and self.mesh.zero == 2)
        return [*found, -late, -buffer, -self.wide]

    def widened(self, group: _Group) -> Changes:
        """Gradients that wait for those of other microbatches, in the type of the sums."""
        before = [0.0, *group.grads.values()]
        pairs = zip(group.sums.values(), before, strict=False)
        return [change for wide, narrow in pairs for change in (-narrow, wide)]

    # --- modules -------------------------------------------------------------------------------

    def block_forward(self) -> Changes:
        """From a block's input, which it keeps, to its output."""
        x, q, kv, ffn, scales = self.x, self.q, self.kv, self.ffn, self.scales
        turned = [*_turned(q), *_turned(kv), -q, -kv] if self.is_rotary else []
        mlp = [ffn, ffn, ffn, ffn, -ffn] if self.model.gated else [ffn, ffn]
        return [scales, x, q, kv, kv, *turned, q, self.lse, x, x, -x, scales, x, *mlp, x, x, -x]

    def loss(self, flat: float) -> Changes:
        """Softmax and its gradient; `flat` is what the last weights came in."""
        one, softmax = self.wide, self.softmax
        cast = softmax * (self.narrow < self.wide)
        back = [self.logits, -softmax] if cast else []
        return [
            *[cast, softmax, one, one, -cast, -self.logits, -flat, one, -one, one],
            *[one, softmax, -one, -one, softmax, -softmax, -softmax, *back],
        ]

    def head_backward(self) -> Changes:
        """From the gradient of the logits to that of the last block's output."""
        table = self.embedding.grads["tokens"]
        return [table, self.x, -self.logits, -self.x, *self.norm_backward(self.head, "final_norm")]

    def norm_backward(self, group: _Group, name: str) -> Changes:
        """To the gradient of a norm's input, after which that input and that of its result are gone."""
        one = group.grads[name]
        no_bias = -one if f"{name}_bias" not in group.grads else 0.0
        return [self.scales, self.x, one, one, -self.scales, no_bias, -self.x, -self.x, -self.scales]

    def block_backward(self, *, is_redone: bool) -> Changes:
        """From the gradient of a block's output to that of its input."""
        linear = partial(self.block.linear, is_redone=is_redone)
        group, x, ffn = self.block, self.x, self.ffn
        if self.model.gated:
            mlp = [
                *[*linear("down", ffn, ffn), ffn, ffn, -ffn, ffn, ffn, -ffn, -ffn, -ffn, -ffn],
                *[*linear("up", x, 0.0), -ffn, *linear("gate", x, x), -ffn, x, -x, -x],
            ]
        else:
            mlp = [*linear("down", ffn, ffn), ffn, -ffn, -ffn, *linear("up", x, x), -ffn]
        return [
            *[*mlp, *self.norm_backward(group, "norm2"), x, -x, -x],
            *[*self.attention_backward(linear), *self.norm_backward(group, "norm1"), x, -x, -x],
        ]

    def attention_backward(self, linear: Callable[[str, float, float], Changes]) -> Changes:
        """From the gradient of attention's output to that of the norm before it."""
        x, q, kv = self.x, self.q, self.kv
        found = [*linear("o", q, 0.0), q, kv, kv, -q, -q, -kv, -kv, -q, -self.lse]
        if self.is_rotary:
            found += [self.sine, *_turned(kv), -self.sine, -kv, self.sine, *_turned(q), -self.sine, -q]
        to_k, to_q = ([], []) if self.is_rotary else ([kv, -kv], [q, -q])
        return [
            *[*found, kv, -kv, *linear("v", x, 0.0), -kv],
            *[*to_k, *linear("k", x, 0.0), -kv, x, -x, -x],
            *[*to_q, *linear("q", x, x), -q, x, -x, -x],
        ]

    def embedding_backward(self) -> Changes:
        """Gradients of the tables; that of a tied one is added to the head's."""
        table, x = self.embedding.grads["tokens"], self.x
        found = [self.places, self.embedding.grads["positions"], -self.places] if self.places else []
        found += [table, -x]
        return [*found, table, -table, -table] if self.model.tied_embedding else found

    # --- the optimizer -------------------------------------------------------------------------

    def optimizer(self, *, is_first: bool) -> Changes:
        """AdamW, weight by weight; the first time it makes its two states; then gradients go."""
        named = [one for group in self.groups for one in group.local.items()]
        head_last = sorted(named, key=lambda one: one[0].startswith("final_norm") or one[0] == "logits")
        local = [size for _, size in head_last]
        found = [size for size in local for _ in range(2)] if is_first else []
        for before, size in pairwise([0.0, *local]):
            found += [size, size, -before, -size]
        return [*found, -local[-1], *(-group.shard for group in self.groups)]


def _turned(width: float) -> Changes:
    """Rotary positions of queries or keys of `width` bytes: halves by cosines and sines, put together."""
    half = width / 2.0
    once = [half, half, half, -half, -half]
    return [*once, *once, width, -half, -half]

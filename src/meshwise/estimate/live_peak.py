"""The most bytes that all tensors of a training step on PyTorch's own parts hold at once, by a walk through.

What is kept for the backward is `estimate.fsdp2_memory`'s; this is everything: shards, whole weights, what
FSDP2 moves them through, gradients, temporaries of each op, the optimizer's. The step is walked with tensors
that are nothing but their bytes (`estimate.live_tensors`), op by op (`estimate.live_decoder`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise

from meshwise.cost.simulate import KINDS, rank_order
from meshwise.estimate.live_decoder import Modules, Weights
from meshwise.estimate.live_fsdp2 import Exchange, Group
from meshwise.estimate.live_tensors import Graph, Leaf, Memory, Node, Storage, Tensor
from meshwise.model.architecture import Model, layer_kind
from meshwise.model.weights import block_weights, embedding_weights, head_weights
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import DEFAULTS
from meshwise.plan.stages import Stage, chunks_of_rank
from meshwise.program.cut import Cut
from meshwise.program.fsdp2 import STATES

OTHERS = (
    *("attention", "lora_rank", "offload_optimizer", "offload_activations"),
    *("recompute_every", "dispatch_dtype", "head_dtype", "frozen_dtype", "imbalance"),
)
"""Keys of a plan that are walked by their defaults only."""


def is_known(model: Model, mesh: Mesh) -> bool:
    """Whether the walk states this model and plan."""
    is_in_context = mesh.ulysses == 1 or (mesh.microbatch == 1 and mesh.ring == 1)
    is_alone = is_in_context and (mesh.pp == 1 or mesh.plan.schedule in ("gpipe", "1f1b"))
    is_dense = not model.mtp_layers and mesh.plan.act_input_dtype == "bf16"
    is_plain = mesh.plan.dtype != "fp8" and (mesh.plan.sequence_parallel or mesh.tp == 1)
    is_default = all(getattr(mesh.plan, key) == DEFAULTS[key] for key in OTHERS)
    is_apart = mesh.tp == 1 or mesh.plan.loss_chunks == 1
    is_core = set(mesh.plan.recompute_modules) <= {"core_attn", "mlp", "shared_experts"}
    is_torchs = mesh.plan.optimizer in ("adam", "adam-fp32", "adam-bf16", "sgd", "none")
    return all(map(bool, (is_alone, is_dense, is_plain, is_default, is_apart, is_core, is_torchs)))


def live_peak_bytes(model: Model, mesh: Mesh, cut: Cut, rank: int, steps: int) -> float:
    """The peak of `steps` steps on rank `rank` (a third is like the second)."""
    step = _Step(model, mesh, cut, int(rank // mesh.stride("pp") % mesh.pp))
    for number in range(min(steps, 2)):
        step.run()
        step.optimizer(is_first=number == 0)
    return step.memory.peak


@dataclass(slots=True, eq=False)
class _Pass:
    """A microbatch between its forward and its backward: the graph, what it ends in, what it entered as."""

    nodes: list[Node]
    result: Storage
    entered: Leaf | None


class _Piece:
    """Some layers of the model, with the ends of it that are theirs; a pipeline rank may have several."""

    def __init__(
        self, model: Model, mesh: Mesh, cut: Cut, modules: Modules, chunk: Stage, layers: range
    ) -> None:
        self.modules, self.graph, self.memory = modules, modules.graph, modules.graph.memory
        self.exchange = Exchange()
        of = partial(Group, self.memory, mesh=mesh, cut=cut, exchange=self.exchange)
        is_first, is_last = bool(chunk.embeddings), bool(chunk.heads)
        first, last = embedding_weights(model), head_weights(model)
        self.first = {weight.name for weight in first} if is_first else set()
        self.is_tied = model.tied_embedding and is_first and is_last
        table = first[:1] if model.tied_embedding and not is_first else ()
        self.embedding = of(first + last * self.is_tied, is_tied=self.is_tied) if is_first else None
        kinds = [block_weights(model, layer_kind(model, layer)) for layer in layers]
        self.blocks = [of(tuple(one for one in block if not one.is_expert)) for block in kinds]
        experts = [tuple(one for one in block if one.is_expert) for block in kinds]
        self.experts = [of(weights) if weights else None for weights in experts]
        self.head = self.embedding if self.is_tied else of(last + table) if is_last else None
        ends = [self.head] if self.head is not None and not self.is_tied else []
        inner = [one for pair in zip(self.blocks, self.experts, strict=True) for one in pair if one]
        self.groups = [*([self.embedding] if self.embedding else []), *inner, *ends]
        for group in inner:
            group.is_freed = bool(mesh.pp == 1 and mesh.zero >= 3)
        self.num_redone = float(mesh.recompute_layers / mesh.vpp) * (mesh.plan.recompute == "full")
        numbers = range(int(mesh.num_microbatches))
        new, x = self.memory.new, modules.x
        self.received = [new(x) for _ in numbers if not is_first]
        self.returned = [new(x) for _ in numbers if not is_last]

    def forward(self, number: int) -> _Pass:
        """From tokens, or what came, to what is handed on, or the loss."""
        modules = self.modules
        if self.embedding is not None:
            entered = None
            self.embedding.before_forward()
            x = modules.embedding(self.embedding.weights)
            if not self.is_tied:
                self.embedding.after_forward()
        else:
            entered = Leaf(self.memory)
            x = Tensor(self.received[number], entered)
        for place, group in enumerate(self.blocks):
            x = self._within(group, partial(self._block, place), x)
        if self.head is not None:
            self.head.before_forward()
            x = self._loss(x if self.is_tied else self._entering(self.head, x))
        self.exchange.gathered = None
        return _Pass(self.graph.taken(), x.storage, entered)

    def _block(self, place: int, weights: Weights, x: Tensor) -> Tensor:
        """Computed again in the backward, or not."""
        group = self.experts[place]
        experts = None if group is None else partial(self._within, group, self.modules.experts)
        run = partial(self.modules.block, weights, experts)
        return self.graph.again(run, x) if place < self.num_redone else run(x)

    def _within(self, group: Group, run: Callable[[Weights, Tensor], Tensor], x: Tensor) -> Tensor:
        """What a group's modules make of x; its weights are there till then."""
        group.before_forward()
        return self._used(group, run(group.weights, self._entering(group, x)))

    def scaled(self, one: _Pass) -> Storage:
        """The loss over the number of microbatches."""
        found = self.graph.op(self._number(), lambda _: (self._number(),), Tensor(one.result, one.nodes[-1]))
        one.nodes += self.graph.taken()
        return found.storage

    def _number(self) -> Storage:
        return self.memory.new(self.modules.number)

    def _loss(self, x: Tensor) -> Tensor:
        """Of the last block's output."""
        assert self.head is not None
        weights = self.head.weights
        return self.modules.loss(weights, self._used(self.head, self.modules.head(weights, x)))

    def _used(self, group: Group, x: Tensor) -> Tensor:
        """A group has made `x`; when the gradient of this is there, its weights are needed again."""
        if self.graph.is_again:  # all that was gathered last is this
            self.exchange.gathered = None
            return x
        group.after_forward()
        assert isinstance(x.origin, Node)
        x.origin.before = group.before_backward
        return x

    def _entering(self, group: Group, x: Tensor) -> Tensor:
        """When the gradient of what enters a group is there, those of its weights are complete."""

        def back(grad: Storage) -> tuple[Storage]:
            group.after_backward()
            return (grad,)

        return self.graph.op(x.storage, back, x)

    def backward(self, one: _Pass, grad: Storage) -> Storage | None:
        """From the gradient of the result to those of all weights, and of what came."""
        for group in self.groups:
            group.is_done = False
        if not one.nodes and one.entered is not None:  # a stage of no layers
            return self.memory.new(grad.size)
        one.nodes[-1].take(grad, 0)
        self.graph.backward(one.nodes)
        for group in self.groups:
            if not group.is_done:  # no gradient leaves it
                group.after_backward()
        return None if one.entered is None else one.entered.grad

    def local_sizes(self) -> list[float]:
        """Bytes of this rank's part of each weight, in the order in which the optimizer takes them."""
        named = [(name, group, size) for group in self.groups for name, size in group.local.items()]
        return [size for *_, size in sorted(named, key=lambda one: self._turn(one[0], one[1]))]

    def _turn(self, name: str, group: Group) -> int:
        """Positions come before tokens, and what is the head's alone at the end."""
        is_last = group is self.head and name not in self.first
        return 0 if name == "positions" else 1 + is_last

    def finish(self) -> None:
        """The last backward is through."""
        for group in self.groups:
            group.finish()
        self.exchange.order.clear()
        self.exchange.reduced = None


class _Step:
    """Forward and backward of all microbatches, and the optimizer, on a rank of the pipeline."""

    def __init__(self, model: Model, mesh: Mesh, cut: Cut, rank: int) -> None:
        self.mesh, self.rank, self.memory = mesh, rank, Memory()
        self.modules = Modules(model, mesh, cut, Graph(self.memory, is_lasting=bool(mesh.pp > 1)))
        held = chunks_of_rank(model, int(mesh.pp), int(mesh.vpp), mesh.plan.schedule, mesh.plan.stages, rank)
        self.pieces = [_Piece(model, mesh, cut, self.modules, *chunk) for chunk in held]
        tokens = float(mesh.num_microbatches) * self.modules.tokens
        choices = 3.0 * self.modules.own * model.moe.top_k if model.moe else 0.0
        numbers = 8.0 * (
            2.0 * tokens + self.modules.tokens / float(mesh.microbatch) * float(cut.ulysses) + choices
        )
        self.fixed = self.memory.new(numbers + 2.0 * self.modules.sine)
        self.losses: list[Storage] = []

    def run(self) -> None:
        """All microbatches."""
        if self.mesh.pp == 1:
            self._one_by_one()
        else:
            self._pipeline()
        self.losses.clear()

    def _one_by_one(self) -> None:
        """Without a pipeline: the backward of a microbatch follows its forward."""
        (piece,), last = self.pieces, int(self.mesh.num_microbatches) - 1
        for number in range(last + 1):
            for group in piece.groups:
                group.is_reduced = number == last or bool(self.mesh.zero == 2)
                group.is_let_go = number == last or bool(self.mesh.zero >= 3)
            done = piece.forward(number)
            done.result = piece.scaled(done)
            piece.backward(done, self._number())
            piece.finish()
            self.losses.append(done.result)
            del done

    def _number(self) -> Storage:
        return self.memory.new(self.modules.number)

    def _pipeline(self) -> None:
        """A stage in the order of its schedule; what it has sent last stays until there is more to send."""
        (piece,), mesh = self.pieces, self.mesh
        for group in piece.groups:
            group.is_reduced, group.is_let_go = bool(mesh.zero == 2), False
        in_flight: deque[_Pass] = deque()
        sent: dict[str, Storage | None] = {}
        numbers = {"F": count(), "B": count()}
        for kind in rank_order(mesh.plan.schedule, self.rank, int(mesh.pp), int(mesh.num_microbatches))[0]:
            name = KINDS[kind]
            number = next(numbers[name])
            if name == "F":
                done = piece.forward(number)
                if piece.head is not None:
                    self.losses.append(piece.scaled(done))
                sent[name] = done.result
                in_flight.append(done)
            else:
                if mesh.plan.schedule == "gpipe":
                    sent.pop(name, None)
                done = in_flight.popleft()
                sent[name] = piece.backward(done, self._number() if piece.head else piece.returned[number])
            del done
        for group in piece.groups:
            group.is_reduced = group.is_let_go = True
            group.after_backward()
        piece.finish()

    def optimizer(self, *, is_first: bool) -> None:
        """AdamW, weight by weight, which first makes two states, or SGD, which makes nothing."""
        local = [size for piece in self.pieces for size in piece.local_sizes()]
        kind = self.mesh.plan.optimizer
        if is_first and STATES[kind]:
            self.states = [self.memory.new(STATES[kind] * size) for size in local]
        if STATES[kind] and local:
            for before, size in pairwise([0.0, *local]):
                self.memory.play(size, size, -before, -size)
            self.memory.play(-local[-1])
        for piece in self.pieces:
            for group in piece.groups:
                group.grad = None

"""The most bytes that all tensors of a training step on PyTorch's own parts hold at once, by a walk through.

What is kept for the backward is `estimate.fsdp2_memory`'s; this is everything: shards, whole weights, what
FSDP2 moves them through, gradients, temporaries of each op, the optimizer's. The step is walked with tensors
that are nothing but their bytes (`estimate.live_tensors`), op by op (`estimate.live_decoder`), piece by piece
of a pipeline (`estimate.live_piece`).
"""

from __future__ import annotations

from functools import partial

from meshwise.estimate.live_decoder import Modules
from meshwise.estimate.live_optimizer import optimizer_step
from meshwise.estimate.live_piece import Piece
from meshwise.estimate.live_pipeline import PipelineRank
from meshwise.estimate.live_tensors import Graph, Memory, Storage
from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh, splits_backward
from meshwise.plan.plan import NARROW_DTYPES
from meshwise.plan.stages import chunks_of_rank
from meshwise.program.cut import Cut


def is_known(model: Model, mesh: Mesh) -> bool:
    """Whether the walk states this model and plan."""
    further = model.mtp_layers and (model.tied_embedding or mesh.plan.lora_rank)
    # The half of a backward that waits holds more of several sequences whose heads are exchanged in few bits.
    waiting = mesh.ulysses > 1 and mesh.microbatch > 1 and splits_backward(mesh)
    return not (further or (waiting and mesh.plan.dtype in NARROW_DTYPES))


def live_peak_bytes(model: Model, mesh: Mesh, cut: Cut, rank: int, steps: int) -> float:
    """The peak of `steps` steps on rank `rank` (a third is like the second)."""
    step = _Step(model, mesh, cut, int(rank // mesh.stride("pp") % mesh.pp))
    for _ in range(min(steps, 2)):
        step.run()
        step.optimizer()
    return step.memory.peak


class _Step:
    """Forward and backward of all microbatches, and the optimizer, on a rank of the pipeline."""

    def __init__(self, model: Model, mesh: Mesh, cut: Cut, rank: int) -> None:
        self.mesh, self.memory = mesh, Memory()
        plan, both = mesh.plan, partial(Modules, model, mesh, cut, Graph(self.memory))
        self.modules = both(plan.recompute_modules if plan.recompute == "selective" else ())
        tokens = self.modules.tokens
        places = tokens / float(mesh.microbatch) * float(cut.ulysses)
        numbers = places + self.modules.num_routes
        self.constants = self.memory.new(8.0 * numbers + 2.0 * self.modules.sine)
        held = chunks_of_rank(model, int(mesh.pp), int(mesh.vpp), mesh.plan.schedule, mesh.plan.stages, rank)
        self.pieces = [Piece(model, mesh, cut, self.modules, both(), *chunk) for chunk in held]
        self.pipeline = PipelineRank(mesh, rank, self.pieces) if mesh.pp > 1 else None
        self.tokens = self.memory.new(8.0 * (2.0 + model.mtp_layers) * float(mesh.num_microbatches) * tokens)
        shards = [shard for piece in self.pieces for shard in piece.shards()]
        self._optimizer = optimizer_step(self.memory, mesh.plan, shards)
        self.losses: list[Storage] = []

    def run(self) -> None:
        """All microbatches."""
        if self.pipeline is None:
            self._one_by_one()
        else:
            self.pipeline.run(self.losses)
        self.losses.clear()

    def _one_by_one(self) -> None:
        """Without a pipeline: the backward of a microbatch follows its forward."""
        (piece,), last = self.pieces, int(self.mesh.num_microbatches) - 1
        for number in range(last + 1):
            for group in piece.groups:
                group.is_reduced = number == last or bool(self.mesh.zero == 2)
                group.is_let_go = number == last or bool(self.mesh.zero >= 3)
            one = piece.forward(None)
            one.result = loss = piece.scaled(one)
            one.grad = self.modules.losses.one()
            done = one  # the pass before was there till now
            piece.backward(done)
            piece.finish()
            self.losses.append(loss)

    def optimizer(self) -> None:
        """New weights; the gradients go."""
        self._optimizer()
        for piece in self.pieces:
            for group in piece.groups:
                group.grad = None

"""A rank of a pipeline through a step, in the order of its schedule, as torch.distributed.pipelining runs it.

Buffers for what comes from the neighbours are there from the first step on, one a microbatch. With one piece
a rank, whole groups of weights are gathered where they are first used, and what was sent last stays until
there is more to send; with several, the weights of the next three pieces are gathered ahead. A backward in
two halves (`estimate.live_halves`) keeps what the second one reads, and the gradient that it hands on.
"""

from __future__ import annotations

from collections import deque

from meshwise.cost.simulate import KINDS, rank_order
from meshwise.estimate.live_piece import Pass, Piece
from meshwise.estimate.live_tensors import Storage
from meshwise.plan.mesh import Mesh
from meshwise.plan.stages import V_SHAPED
from meshwise.program.order import ACTIVE_CHUNKS, next_chunks


class _Stage:
    """A piece, and its microbatches on their way: what each came with, and the gradient that comes back."""

    def __init__(self, piece: Piece, number: int) -> None:
        new, x = piece.memory.new, piece.modules.x
        self.piece, self.number = piece, number
        self.came = [None if piece.is_first else new(x) for _ in range(number)]
        self.returned = [None if piece.is_last else new(x) for _ in range(number)]
        self.handed_on: list[Storage | None] = []
        self.is_arrived = False

    def start(self, *, is_reduced: bool) -> None:
        """A step."""
        self.num_forward = self.num_backward = 0
        self.forwarded: deque[Pass] = deque()
        self.halved: deque[Pass] = deque()
        self.handed_on.clear()
        for group in self.piece.groups:
            group.is_reduced, group.is_let_go = is_reduced, False

    def forward(self, losses: list[Storage]) -> Storage | None:
        """The next microbatch; what it leaves with."""
        one = self.piece.forward(self.came[self.num_forward])
        self.num_forward += 1
        if self.piece.is_last:
            losses.append(self.piece.scaled(one))
        self.forwarded.append(one)
        return one.result

    def backward(self, kind: str) -> Storage | None:
        """Of the microbatch whose turn it is, or half of it: the gradient of what it came with."""
        if kind == "W":
            self.piece.backward_to_weights(self.halved.popleft())
            for group in self.piece.groups:
                group.after_backward()
            return None
        number, one = self.num_backward, self.forwarded.popleft()
        self.num_backward += 1
        one.grad = self.returned[number] or self.piece.modules.losses.one()
        if kind == "B":
            return self.piece.backward(one)
        self.halved.append(one)
        found = self.piece.backward_to_what_entered(one)
        self.handed_on.append(found)
        return found

    @property
    def is_through(self) -> bool:
        """Whether no microbatch is on its way, nor is one to come."""
        return self.num_backward == self.number and not self.halved


class PipelineRank:
    """The stages of a rank, and the kinds and chunks of what it does with them."""

    def __init__(self, mesh: Mesh, rank: int, pieces: list[Piece]) -> None:
        name, pp, num = mesh.plan.schedule, int(mesh.pp), int(mesh.num_microbatches)
        self.zero, self.is_gpipe, self.is_single = mesh.zero, name == "gpipe", name in ("gpipe", "1f1b")
        self.stages = [_Stage(piece, num // 2 if name == "dualpipe" else num) for piece in pieces]
        kinds, chunks = rank_order(name, rank, pp, num, int(mesh.vpp))
        self.kinds, self.chunks = [KINDS[kind] for kind in kinds], chunks.tolist()
        self.turns_back = name in V_SHAPED and rank == pp - 1

    def run(self, losses: list[Storage]) -> None:
        """A step."""
        sent: dict[str, Storage | None] = {}
        self.gathered: set[int] = set()
        for stage in self.stages:
            stage.start(is_reduced=bool(self.zero == 2))
        for place, (kind, chunk) in enumerate(zip(self.kinds, self.chunks, strict=True)):
            stage = self.stages[chunk]
            if not self.is_single:
                self._gather(place)
                stage.piece.arrive()
            if self.is_gpipe and kind == "B":
                sent.pop(kind, None)
            found = stage.forward(losses) if kind == "F" else stage.backward(kind)
            if self.is_single:
                sent[kind] = found
            elif self.turns_back:
                self._turn_back(kind, chunk, found)
            del found
            if stage.is_through:
                stage.piece.reduce()

    def _turn_back(self, kind: str, chunk: int, found: Storage | None) -> None:
        """The last rank hands on to itself."""
        down, up = self.stages
        if (kind, chunk) == ("F", 0):
            up.came[down.num_forward - 1] = found
        elif kind in "BI" and chunk == 1:
            down.returned[up.num_backward - 1] = found

    def _gather(self, place: int) -> None:
        """The weights of the next pieces; under ZeRO-3 those of others go."""
        if place and len(self.stages) <= ACTIVE_CHUNKS:
            return
        near = next_chunks(self.chunks, place).keys()
        for chunk in self.gathered - near:
            if self.zero >= 3:
                self.stages[chunk].piece.let_go()
        for chunk in near:
            if chunk not in self.gathered:
                self.stages[chunk].piece.gather()
        self.gathered = {*near}

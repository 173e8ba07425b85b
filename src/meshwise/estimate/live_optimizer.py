"""A step of an optimizer, as tensors that are nothing but their bytes: weight after weight of a rank's parts.

States stay: AdamW makes those of all weights first, in 8 bits and under Muon each has its own when it is
first moved. All else that is made goes with the weight's turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshwise.estimate.live_tensors import Memory, Storage
from meshwise.model.weights import Weight
from meshwise.plan.plan import Plan
from meshwise.plan.stages import num_on_host
from meshwise.program.muon import BYTES, ITERATIONS
from meshwise.program.optimizer_states import BLOCK, LEAST, STATES, by_muon


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank has of a trained weight: `number` elements of `elem_bytes`.

    Of the whole, as a tensor-parallel rank has it, `ranks` have some of its `rows` of `width` elements each;
    there are so many `matrices`, one of each expert.
    """

    weight: Weight
    number: float
    elem_bytes: float
    rows: float
    width: float
    ranks: float
    matrices: float

    @property
    def size(self) -> float:
        """Bytes."""
        return self.number * self.elem_bytes


def optimizer_step(memory: Memory, plan: Plan, shards: Sequence[Shard]) -> Callable[[], None]:
    """A function that walks through a step; the first one makes the states."""
    if plan.optimizer == "muon":
        others = AdamW(memory, [one for one in shards if not by_muon(one.weight)], STATES["adam"])
        return Muon(memory, [one for one in shards if by_muon(one.weight)], others).step
    here = _on_device(shards, plan.offload_optimizer)
    if plan.optimizer == "adam-8bit":
        return Adam8bit(memory, here).step
    return AdamW(memory, here, STATES[plan.optimizer]).step


def _on_device(shards: Sequence[Shard], share_on_host: float) -> list[Shard]:
    """What is left of each where the host has a share of all, the first ones."""
    left, here = float(num_on_host(share_on_host, sum(one.number for one in shards))), []
    for one in shards:
        there = min(one.number, left)
        left -= there
        here.append(replace(one, number=one.number - there))
    return here


class AdamW:
    """Keeps `num_states` numbers for each; SGD, which keeps none, makes nothing."""

    def __init__(self, memory: Memory, shards: Sequence[Shard], num_states: float) -> None:
        self.memory, self.sizes, self.num_states = memory, [one.size for one in shards], num_states
        self._states: list[Storage] = []

    def step(self) -> None:
        """The second moment's root, and its quotient, which is there till the next one is."""
        if not self.num_states or not self.sizes:
            return
        self._states = self._states or [self.memory.new(self.num_states * size) for size in self.sizes]
        for before, size in pairwise([0.0, *self.sizes]):
            self.memory.play(size, size, -before, -size)
        self.memory.play(-self.sizes[-1])


class Adam8bit:
    """Moments of a byte an element, in fp32 for small weights; a step computes in fp32."""

    def __init__(self, memory: Memory, shards: Sequence[Shard]) -> None:
        self.new, self.shards = memory.new, shards
        self._moments: dict[tuple[int, str], list[Storage]] = {}

    def step(self) -> None:
        """Each weight's moments, and what it moves by."""
        for place, shard in enumerate(self.shards):
            self._move(place, 4.0 * shard.number, is_wide=shard.elem_bytes == 4.0)

    def _move(self, place: int, size: float, *, is_wide: bool) -> None:
        _numbers = None if is_wide else self.new(size)
        _first = self._moved((place, "first"), size)
        square = self.new(size)
        _second = self._moved((place, "second"), size)
        del square
        _deviation = self.new(size)

    def _moved(self, key: tuple[int, str], size: float) -> Storage:
        """The moment in fp32; what is kept of it, codes and scales, takes the place of the last ones."""
        kept = self._moments.setdefault(key, [])
        is_small = size < 4.0 * LEAST
        before = kept[0] if kept and is_small else self.new(size)
        moment = self.new(size)
        kept[:1] = [moment]
        del before
        if not is_small:
            kept[:] = self.new(size / 4.0), self.new(4.0 * math.ceil(size / 4.0 / BLOCK))
        return moment


class Muon:
    """Of `matrices`, whose whole momenta are made orthogonal in bf16, and AdamW of the `others`."""

    def __init__(self, memory: Memory, matrices: Sequence[Shard], others: AdamW) -> None:
        self.new, self.matrices, self.others = memory.new, matrices, others
        self._momenta: dict[int, Storage] = {}

    def step(self) -> None:
        """Matrix after matrix, then the others."""
        for place, shard in enumerate(self.matrices):
            self._momenta.setdefault(place, self.new(shard.size))
            self._move(shard)
        self.others.step()

    def _move(self, shard: Shard) -> None:
        towards = self.new(shard.size)
        part = self.new(BYTES * shard.number)
        del towards
        _whole = self._gathered(shard, part)
        del part
        _moved = self._orthogonal(shard)
        _wide = self.new(shard.size)

    def _gathered(self, shard: Shard, part: Storage) -> Storage:
        """From all ranks, in order; parts of experts lie behind one another."""
        if shard.ranks == 1:
            return part
        padded = self.new(BYTES * math.ceil(shard.rows / shard.ranks) * shard.width)
        came = self.new(padded.size * shard.ranks)
        return self.new(came.size) if shard.weight.is_expert else came

    def _orthogonal(self, shard: Shard) -> Storage:
        """By Newton and Schulz: products with itself, and what they make of it."""
        size, short = BYTES * shard.rows * shard.width, min(shard.rows, shard.width / shard.matrices)
        norm = self.new(BYTES * shard.matrices)
        norm = self.new(BYTES * shard.matrices)
        found, gram = self.new(size), None
        del norm
        for _ in range(ITERATIONS):
            for _ in range(2):
                gram = self.new(BYTES * shard.matrices * short**2)
            found = self.new(size)
        del gram
        return found

"""The running account of a program: its ops in order, the tensors alive, and named steps.

A closed form writes a tape by hand, a recorder writes one while the torch program runs. Both call the
same four methods, so that the two agree wherever the program is what the closed form says:

    tape.allocate(name, size_bytes), tape.release(name)     a tensor's storage comes and goes
    tape.op(...)                                            one ledger row
    tape.step(name, tensors)                                what the program prints at this point

`live_bytes` of a row is what is alive after its op, `peak_bytes` the most that was alive up to then; both
are sums of tensors. Steps carry the same two as the machine books them: with a caching allocator, its
rounding and the cuBLAS workspace come on top.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from meshwise.core.ledger import Ledger
from meshwise.core.units import Num
from meshwise.cost.allocator import WORKSPACE_BYTES, CachingAllocator
from meshwise.machine.hardware import Chip
from meshwise.machine.overheads import find_overheads

VERDICT = ("memory_bytes", "reserved_bytes", "fits", "out_of_memory")
"""What a dry run says of its chip: memory, the most that the allocator reserves of it, whether that suffices
(None of no chip), and the request that failed first (`CachingAllocator`)."""

_PLACE = ("phase", "module", "op")
_MERGED_BY = (
    *("module", "op", "phase", "shape", "dtype", "flop", "read_bytes", "write_bytes", "saved_bytes"),
    *("weight_bytes", "collective", "axis", "group_size", "payload_bytes", "sent_bytes"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One tensor of one step of a program; the step's FLOP, of all ranks, stand with its last tensor."""

    step: str
    name: str
    symbols: str
    shape: tuple[int, ...]
    elements: int
    bytes: float
    flop: float
    flop_per_rank: float
    current_bytes: float
    peak_bytes: float

    def to_json(self) -> dict[str, Any]:
        """The step as JSON values."""
        return asdict(self) | {"shape": list(self.shape)}


@dataclass(slots=True, eq=False)
class Tape:
    """Rows, steps and live bytes of one rank.

    `allocator` and `workspace_bytes` are what the machine adds to the tensors, `memory_bytes` what it has and
    `context_bytes` what the process takes of it before its first tensor; `measure` returns the bytes that a
    real device says are booked, now and at most. `is_partial`: a closed form states only some of the ops, and
    not what is alive at each. `launches`: of a recorder, the rows that each row begins after, those that
    the host has waited for before it, and how far apart the ranks of a collective are.
    """

    origin: str
    rank: int = 0
    world_size: int = 1
    allocator: CachingAllocator | None = None
    workspace_bytes: int = 0
    memory_bytes: float | None = None
    context_bytes: float = 0.0
    measure: Callable[[], tuple[float, float]] | None = None
    is_partial: bool = False
    live_bytes: float = 0.0
    peak_bytes: float = 0.0
    steps: list[Step] = field(default_factory=list)
    launches: dict[int, tuple[list[int], list[int], int]] = field(default_factory=dict)
    _rows: list[dict[str, Any]] = field(default_factory=list)
    _sizes: dict[object, float] = field(default_factory=dict)
    _flop_since_step: float = 0.0
    _workspace_booked: bool = False

    def allocate(self, name: object, size_bytes: float) -> None:
        """A storage of `size_bytes` comes alive under `name`."""
        self._sizes[name] = size_bytes
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self.allocator is not None:
            self.allocator.allocate(name, int(size_bytes))

    def release(self, name: object) -> None:
        """The storage of `name` is given back."""
        self.live_bytes -= self._sizes.pop(name)
        if self.allocator is not None:
            self.allocator.release(name)

    def op(self, op: str, *, is_matmul: bool = False, count: float = 1, **row: Any) -> dict[str, Any]:
        """`count` alike ops, after their outputs came alive; `row` has columns of the ledger. Returns it."""
        if is_matmul and self.allocator is not None and not self._workspace_booked:
            self._workspace_booked = True
            self.allocator.allocate("cublas workspace", self.workspace_bytes)
        full = {"phase": "forward", **row, "op": op, "count": count}
        full |= {"live_bytes": self.live_bytes, "peak_bytes": self.peak_bytes}
        self._rows.append(full)
        if self.allocator is not None and self.allocator.out_of_memory:
            self.allocator.out_of_memory.setdefault("place", {name: full.get(name, "") for name in _PLACE})
        self._flop_since_step += count * (row.get("flop") or 0.0)
        return full

    def priced(self, ledger: Ledger, times: float) -> None:
        """The rows that an estimate says, so many `times` over; tensors of tf32 matmuls are fp32.

        The memory that it says, without what a GPU's driver takes, is a peak that no row reaches by itself.
        """
        rows = [*ledger.rows()]
        for row in rows:
            dtype = "fp32" if row["dtype"] == "tf32" else row["dtype"]
            own = {name: value for name, value in row.items() if name not in ("op", "live_bytes")}
            if row["module"] != "memory":
                self.op(row["op"], **own | {"count": row["count"] * times, "dtype": dtype})
        kept = [row["live_bytes"] for row in rows if row["module"] == "memory" and row["op"] != "overhead"]
        self.peak_bytes = max(self.peak_bytes, sum(kept))

    def states(self, held: Mapping[str, Num]) -> None:
        """What a rank holds between passes, in bytes."""
        for name, size_bytes in held.items():
            self.op(name, module="states", phase="step", weight_bytes=float(size_bytes))

    def step(self, step: str, tensors: Mapping[str, tuple[tuple[int, ...], float]]) -> list[Step]:
        """The program has come to `step` and shows `tensors`; FLOP are those since the last step.

        Shape and bytes by what is printed: `{"q [h, N/P, d/h]": ((128, 3750, 128), 122_880_000)}`.
        """
        booked, entries = (self.current_booked_bytes, self.peak_booked_bytes), []
        for number, (label, (shape, size_bytes)) in enumerate(tensors.items(), start=1):
            name, _, symbols = label.partition(" [")
            flop = self._flop_since_step if number == len(tensors) else 0.0
            work = flop * self.world_size, flop
            named = step, name, symbols and f"[{symbols}", shape, prod(shape), size_bytes
            entries.append(Step(*named, *work, *booked))
        self._flop_since_step = 0.0
        self.steps += entries
        return entries

    @property
    def current_booked_bytes(self) -> float:
        """Bytes the machine has booked now; without a caching allocator the sum of the live tensors."""
        if self.measure is not None:
            return self.measure()[0]
        return self.live_bytes if self.allocator is None else float(self.allocator.booked_bytes)

    @property
    def peak_booked_bytes(self) -> float:
        """The most bytes the machine had booked so far."""
        if self.measure is not None:
            return self.measure()[1]
        return self.peak_bytes if self.allocator is None else float(self.allocator.peak_bytes)

    def verdict(self) -> dict[str, Any]:
        """Whether the chip holds what was booked beside the process itself, as `VERDICT` lists it."""
        replay, fits = self.allocator or CachingAllocator(), None
        if self.memory_bytes is not None:
            needed_bytes = self.peak_booked_bytes + self.context_bytes
            fits = needed_bytes <= self.memory_bytes and not replay.out_of_memory
        found = self.memory_bytes, replay.peak_reserved_bytes or None, fits, replay.out_of_memory
        return dict(zip(VERDICT, found, strict=True))

    @property
    def num_rows(self) -> int:
        """How many ops it has."""
        return len(self._rows)

    def launched(self, start: int, end: int) -> list[tuple[int, list[int], list[int], int]]:
        """The launches of the rows from `start` to `end`: each with its row in the ledger of these."""
        keys = list(map(_identity, self._rows[start:end]))
        places = {key: place for place, key in enumerate(dict.fromkeys(keys))}

        def inside(numbers: list[int]) -> list[int]:
            return [number - start for number in numbers if number >= start]

        found = []
        for number, key in enumerate(keys, start):
            after, waited, stride = self.launches[number]
            found.append((places[key], inside(after), inside(waited), stride))
        return found

    def ledger(self) -> Ledger:
        """The rows so far; equal ones are one row with a count, in the order of their first."""
        merged: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in self._rows:
            key = _identity(row)
            first = merged.setdefault(key, row | {"count": 0, "origin": self.origin, "rank": self.rank})
            first["count"] += row["count"]
            for name in ("live_bytes", "peak_bytes"):
                first[name] = max(first[name], row[name])
            if "time_s" in row and first["count"] > 1:  # the mean over the occurrences
                first["time_s"] += (row["time_s"] - first["time_s"]) * row["count"] / first["count"]
        return Ledger.from_rows([*merged.values(), *self._machine_rows()])

    def _machine_rows(self) -> list[dict[str, Any]]:
        """What the machine books beyond the program's tensors, named."""
        if self.allocator is None:
            return []
        workspace_bytes = self.workspace_bytes if self._workspace_booked else 0
        rounding_bytes = self.allocator.peak_bytes - self.peak_bytes - workspace_bytes
        beyond = {"cublas_workspace": workspace_bytes, "allocator_rounding": rounding_bytes}
        rank = {"origin": self.origin, "rank": self.rank, "module": "machine", "phase": "step"}
        return [{**rank, "op": op, "peak_bytes": size_bytes} for op, size_bytes in beyond.items()]


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What rows have in common that are one row of a ledger."""
    return tuple(row.get(name) for name in _MERGED_BY)


def booked_by(chip: Chip) -> dict[str, Any]:
    """The fields of a tape that say what `chip` has, and what PyTorch books on it beyond the tensors."""
    context_bytes = find_overheads(chip).context_bytes
    fields = {"memory_bytes": chip.memory_bytes, "context_bytes": context_bytes}
    if chip.vendor not in ("nvidia", "amd"):  # what others book is not known
        return fields
    allocator = CachingAllocator(chip.memory_bytes - context_bytes)
    return fields | {"allocator": allocator, "workspace_bytes": WORKSPACE_BYTES.get(chip.generation, 0)}

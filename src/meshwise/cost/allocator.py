"""What a caching allocator books for the tensors that a program holds.

PyTorch's CUDA allocator asks the driver for segments and cuts blocks from them. A request is rounded up
to 512 bytes. Small ones (up to 1 MiB) share segments of 2 MiB, middling ones (below 10 MiB) segments of
20 MiB, large ones get a segment of their own, rounded up to 2 MiB. A free block is cut only where the
rest is worth keeping: 512 bytes or more in a small segment, more than 1 MiB in a large one; else the whole
block is booked. A freed block joins its free neighbours and stays cached. So a program's tensors may
book more than their sum, and how much depends on the order in which they come and go.

Where the device does not hold a new segment, segments of which no block is booked go back to the driver.
If that is not enough, the program is out of memory: the replay notes the request that failed first, and
goes on as on a device that holds anything.

The first matrix multiplication also books a cuBLAS workspace that stays.

Source: c10/cuda/CUDACachingAllocator.cpp and aten/src/ATen/cuda/CublasHandlePool.cpp of PyTorch 2.13
(expandable segments off, the default).
"""

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Any

from meshwise.core.files import read_catalog

MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
MIDDLE_SEGMENT_BYTES = 20 << 20
LARGE_REQUEST_BYTES = 10 << 20
SEGMENT_ROUND_BYTES = 2 << 20

WORKSPACE_BYTES: dict[str, int] = read_catalog("software.toml")["cublas_workspace_bytes"]
"""Default cuBLAS workspace by chip generation."""


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment."""

    address: int
    size_bytes: int
    small: bool
    free: bool = True

    @property
    def order(self) -> tuple[int, int]:
        """Best fit first: the smallest, then the lowest address."""
        return self.size_bytes, self.address


@dataclass(slots=True, eq=False)
class CachingAllocator:
    """A replay of PyTorch's allocator: `allocate` and `release` by name; bytes booked now and at most.

    `limit_bytes`: what the device has for segments. `out_of_memory`: `wanted_bytes` of the request that
    failed first, with limit, reserved and booked bytes as they were then; empty where none did.
    """

    limit_bytes: float = math.inf
    booked_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    peak_reserved_bytes: int = 0
    out_of_memory: dict[str, Any] = field(default_factory=dict)
    _blocks: dict[object, _Block] = field(default_factory=dict)
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _by_address: dict[int, _Block] = field(default_factory=dict)
    _by_end: dict[int, _Block] = field(default_factory=dict)
    _next_address: int = 0

    def allocate(self, name: object, size_bytes: int) -> None:
        """Book a block of at least `size_bytes` under `name`; nothing is booked for zero bytes."""
        if size_bytes == 0:
            return
        wanted = _round_up(size_bytes, MIN_BLOCK_BYTES)
        small = wanted <= SMALL_REQUEST_BYTES
        block = self._best_fit(wanted, small) or self._new_segment(wanted, small)
        rest = block.size_bytes - wanted
        if rest >= MIN_BLOCK_BYTES if small else rest > SMALL_REQUEST_BYTES:
            left = self._place(block.address + wanted, rest, small)
            insort(self._free[small], left.order)
            block = self._place(block.address, wanted, small)
        block.free = False
        self._blocks[name] = block
        self.booked_bytes += block.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.booked_bytes)

    def release(self, name: object) -> None:
        """Give the block of `name` back to the cache; a name without a block is none of ours."""
        block = self._blocks.pop(name, None)
        if block is None:
            return
        self.booked_bytes -= block.size_bytes
        block.free = True
        after = self._by_address.get(block.address + block.size_bytes)
        for neighbour in (self._by_end.get(block.address), after):
            if neighbour is not None and neighbour.free:
                free = self._free[neighbour.small]
                del free[bisect_left(free, neighbour.order)]
                del self._by_address[max(block.address, neighbour.address)]
                first = min(block.address, neighbour.address)
                block = self._place(first, block.size_bytes + neighbour.size_bytes, block.small)
        insort(self._free[block.small], block.order)

    def empty_cache(self) -> None:
        """Give the segments of which no block is booked back to the driver."""
        for free in self._free.values():
            for size_bytes, address in tuple(free):
                end = address + size_bytes
                if address not in self._by_end and end not in self._by_address:  # a whole segment
                    free.remove((size_bytes, address))
                    del self._by_address[address], self._by_end[end]
                    self.reserved_bytes -= size_bytes

    def _best_fit(self, wanted: int, small: bool) -> _Block | None:
        free = self._free[small]
        place = bisect_left(free, (wanted, -1))
        return None if place == len(free) else self._by_address[free.pop(place)[1]]

    def _new_segment(self, wanted: int, small: bool) -> _Block:
        size = _round_up(wanted, SEGMENT_ROUND_BYTES)
        if wanted < LARGE_REQUEST_BYTES:
            size = SMALL_SEGMENT_BYTES if small else MIDDLE_SEGMENT_BYTES
        if self.reserved_bytes + size > self.limit_bytes:
            self.empty_cache()
        if self.reserved_bytes + size > self.limit_bytes:
            state = {name: getattr(self, name) for name in ("limit_bytes", "reserved_bytes", "booked_bytes")}
            self.out_of_memory, self.limit_bytes = {"wanted_bytes": wanted} | state, math.inf
        block = self._place(self._next_address, size, small)
        self._next_address += size + MIN_BLOCK_BYTES  # no block is the neighbour of one of another segment
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _place(self, address: int, size_bytes: int, small: bool) -> _Block:
        """A new block, found by where it begins and ends."""
        block = _Block(address, size_bytes, small)
        self._by_address[address] = self._by_end[address + size_bytes] = block
        return block

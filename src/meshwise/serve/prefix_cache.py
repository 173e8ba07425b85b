"""The prefix cache of an engine: blocks that the beginnings of several requests share.

A request is a chain of blocks, its prompt's first. Blocks of running requests are *pinned*, once for all that
use them. When the last of these ends, a block stays *idle* as long as nothing else needs its room: the least
recently used goes first, the end of a chain before its beginning. Where the engine offloads its cache, what
goes moves to the host's memory, and from there to a disk; it comes back over their links, one request after
the other. Writing is hidden behind compute, in the other direction of the link.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from meshwise.core.errors import WorkloadError
from meshwise.core.units import quantity
from meshwise.plan.fields import Field, read_words

Blocks = tuple[int, ...]
"""Names of the blocks of a request, from its beginning."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A place below the chip's memory: the `tokens` it has room for, `token_s` to bring one of them back."""

    name: str
    tokens: float
    token_s: float


@dataclass(frozen=True, slots=True)
class Offload:
    """Memory below that of a chip: bytes for each chip, and bytes/s in which each reads them back.

    None: no such memory; of `host_bytes_per_s` the rate of the chip's link to its host.
    """

    host_bytes: float | None = None
    host_bytes_per_s: float | None = None
    disk_bytes: float | None = None
    disk_bytes_per_s: float | None = None

    def tiers(self, token_bytes: float, link_bytes_per_s: float) -> tuple[Tier, ...]:
        """Its tiers for a dp rank, of whose chips each holds `token_bytes` of a token."""
        host_bytes_per_s = self.host_bytes_per_s or link_bytes_per_s
        if self.host_bytes and not host_bytes_per_s:
            raise WorkloadError("offload: the chip's link to its host is not in the catalog; state host_rate")
        found = (
            ("host", self.host_bytes, host_bytes_per_s),
            ("disk", self.disk_bytes, self.disk_bytes_per_s),
        )
        return tuple(
            Tier(name, room_bytes / token_bytes, token_bytes / bytes_per_s)
            for name, room_bytes, bytes_per_s in found
            if room_bytes and bytes_per_s
        )


def parse_offload(text: str) -> Offload:
    """`host=64GiB` or `host=64GiB,disk=1TB,disk_rate=3GB`: for each chip; rates in bytes a second."""
    names = ("host", "host_rate", "disk", "disk_rate")
    table = {name: Field("bytes", partial(quantity, what=f"offload {name}"), "of a chip") for name in names}
    stated = read_words(text, table, WorkloadError, "offload")
    for one, other in (("disk", "disk_rate"), ("disk_rate", "disk"), ("host_rate", "host")):
        if one in stated and other not in stated:
            raise WorkloadError(f"offload: {one} needs {other}, as in host=64GiB,disk=1TB,disk_rate=3GB")
    return Offload(*map(stated.get, table))


class PrefixCache:
    """Blocks that a dp rank holds, by where they are; `kept` are idle on the chip at the start."""

    def __init__(
        self, block_tokens: Mapping[int, int] | int, tiers: Sequence[Tier], kept: Iterable[int]
    ) -> None:
        of_all = block_tokens
        self.size: Mapping[int, int] = defaultdict(lambda: of_all) if isinstance(of_all, int) else of_all
        self.tiers = tiers
        self.pinned: dict[int, int] = {}  # how many use a block
        self.idle = [OrderedDict.fromkeys(kept), *(OrderedDict[int, None]() for _ in tiers)]  # by place
        self.idle_tokens = [sum(map(self.size.__getitem__, of_place)) for of_place in self.idle]

    def _place(self, block: int) -> int:
        """0: on the chip; 1, 2: the tiers below it; -1: nowhere."""
        if block in self.pinned:
            return 0
        return next((place for place, idle in enumerate(self.idle) if block in idle), -1)

    def found(self, blocks: Blocks) -> list[int]:
        """The place of each block from the first, up to one that is nowhere."""
        return list(takewhile(lambda place: place >= 0, map(self._place, blocks)))

    def found_tokens(self, blocks: Blocks) -> int:
        """Tokens from the first that are in any place."""
        num, size, pinned, on_chip, below = 0, self.size, self.pinned, self.idle[0], self.tiers
        for block in blocks:
            if block not in pinned and block not in on_chip and (not below or self._place(block) < 0):
                break
            num += size[block]
        return num

    def tokens_in_use(self, blocks: Blocks) -> int:
        """Tokens from the first that other requests hold already."""
        return sum(map(self.size.__getitem__, takewhile(self.pinned.__contains__, blocks)))

    def pin(self, blocks: Blocks) -> int:
        """Hold blocks on the chip, wherever they are; the tokens for which that takes room."""
        taken = 0
        for block in blocks:
            if block in self.pinned:
                self.pinned[block] += 1
                continue
            size, place = self.size[block], self._place(block)
            if place >= 0:
                del self.idle[place][block]
                self.idle_tokens[place] -= size
            self.pinned[block] = 1
            taken += size
        return taken

    def unpin(self, blocks: Blocks) -> int:
        """Let go of blocks, the last first; the tokens of those that nobody holds any more."""
        idle = 0
        for block in reversed(blocks):
            self.pinned[block] -= 1
            if not self.pinned[block]:
                del self.pinned[block]
                self.idle[0][block] = None
                idle += self.size[block]
        self.idle_tokens[0] += idle
        return idle

    def trim(self, room: float) -> None:
        """Move the idle blocks that have been used least recently down, until the others have `room`."""
        for place, most in enumerate((room, *(tier.tokens for tier in self.tiers))):
            while self.idle_tokens[place] > most and self.idle[place]:
                block, _ = self.idle[place].popitem(last=False)
                self.idle_tokens[place] -= self.size[block]
                if place < len(self.tiers):
                    self.idle[place + 1][block] = None
                    self.idle_tokens[place + 1] += self.size[block]

    def load_s(self, blocks: Blocks, places: Sequence[int]) -> float:
        """Seconds to bring those blocks back that are below the chip."""
        return sum(
            self.size[block] * self.tiers[place - 1].token_s
            for block, place in zip(blocks, places, strict=False)
            if place
        )

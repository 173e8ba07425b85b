"""Chips and clusters: how fast they compute, how much they remember, how they are linked.

A `Cluster` is one kind of chip, a number of them, and the links between them as nested *levels*,
innermost first: level 0 joins the ranks of a node (NVLink), level 1 the nodes (InfiniBand), and so
on. A level's `ranks` is the size of one of its domains; the outermost level spans the cluster.

The ranks of a level are joined by switches, or they are wired to their neighbours along the axes of a
*torus* (TPU); rank 1 is then the neighbour of rank 0 along the first axis. Switches may give the ranks of
a domain less than their links together need (*oversubscription*), or join only ranks that have the same
place in the domains inside (*rails*).

Bandwidth is per rank and per direction. The numbers are data: `catalog/chips.toml` and
`catalog/clusters.toml`, each entry with its source and the date it was checked.
"""

from __future__ import annotations

import datetime
import itertools
import math
import operator
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwise.core.errors import ClusterError, did_you_mean
from meshwise.core.files import read_catalog
from meshwise.core.toml import parse_toml, read_toml, toml_text
from meshwise.core.units import DTYPE_BYTES, Num

MAX_CHIPS = 10**9
"""No cluster is larger: a count above this is a typing error, and the cost model stays exact below it."""

RANGE = (1e-30, 1e30)
"""Every rate, size and latency lies between these, so that products and ratios of them stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Level:
    """One kind of link. `ranks`: ranks in one domain of this level (infinite: the whole cluster).

    `bytes_per_s` is what is left for a rank when all ranks use the level at once. `torus`: the chips along
    each axis (empty: switches); an axis closes to a ring where its size is a multiple of `ring_multiple`.
    `rails`: switches join only ranks of the same place in their domains of the level inside.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    ranks: float = math.inf
    torus: tuple[int, ...] = ()
    ring_multiple: int = 1
    rails: bool = False


ReduceScatter = Literal["reduce_scatter", "all_reduce"]
"""What a library of collectives does to reduce and scatter."""

MEASURED = "measured"
"""The vendor of a chip whose rates are those that its kernels reach, not a maker's: `meshwise calibrate`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chip:
    """One accelerator as its maker describes it: dense peaks, memory, power, and its usual links.

    `matrix_flop_per_s` are the peaks of the matrix units by dtype, without sparsity;
    `vector_flop_per_s` those of the ordinary units. `generation` names the family whose fitted
    efficiencies the chip shares. `num_cores` counts SMs, CUs or their like. `op_host_s`, of ranks that
    compute on their host: what comes with each matmul or attention (dispatch, small operators, late ranks).
    """

    name: str
    vendor: str
    generation: str
    memory_bytes: float
    memory_bytes_per_s: float
    matrix_flop_per_s: dict[str, float]
    vector_flop_per_s: dict[str, float]
    levels: tuple[Level, ...]
    num_cores: int = 0
    cache_bytes: float = 0.0
    power_watts: float = 0.0
    host_bytes_per_s: float = 0.0
    op_host_s: float = 0.0
    aliases: tuple[str, ...] = ()
    source: str = ""
    checked: str = ""

    def matrix_peak(self, dtype: str) -> float:
        """Dense peak [FLOP/s] of the matrix units for `dtype`; a dtype they lack runs on the vector units."""
        peak = self.matrix_flop_per_s.get(dtype) or self.vector_flop_per_s.get(dtype)
        if not peak:
            known = ", ".join(self.matrix_flop_per_s | self.vector_flop_per_s)
            raise ClusterError(f"chip {self.name} has no {dtype} units; choose a dtype among {known}")
        return peak

    def vector_peak(self, dtype: str) -> float:
        """Peak [FLOP/s] of the vector units for `dtype`; narrower types run at the fp32 rate at least."""
        return self.vector_flop_per_s.get(dtype) or self.vector_flop_per_s["fp32"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredCollective:
    """Seconds of one kind of collective by its payload, of a group of `ranks`, `ranks_inside` of them in a
    domain of the innermost links; sizes ascend. `source`: the file that says so."""

    kind: str
    ranks: float
    ranks_inside: float
    sizes_bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    source: str

    def __str__(self) -> str:
        sizes = f"{self.sizes_bytes[0]:,.0f} to {self.sizes_bytes[-1]:,.0f} bytes"
        group = f"{self.kind} among {self.ranks:.0f} ranks, {self.ranks_inside:.0f} in a node, {sizes}"
        return f"measured, not predicted ({self.source}): {group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`num_chips` of `chip`, joined by `levels` (innermost first).

    `reduce_scatter`: the collective that the library does for it: gloo has none, and reduces all to all.
    `collectives`: what was measured on it, which takes the place of a prediction where it has points.
    """

    name: str
    chip: Chip
    num_chips: int
    levels: tuple[Level, ...]
    reduce_scatter: ReduceScatter = "reduce_scatter"
    collectives: tuple[MeasuredCollective, ...] = ()
    source: str = ""
    checked: str = ""

    def to_json(self) -> dict[str, Any]:
        """What an answer says of the cluster that it is about."""
        return {"name": self.name, "chip": self.chip.name, "num_chips": self.num_chips}


HOST_LINK_FRAC = 25.0 / 32.0
"""Share of a host link that large copies from pinned memory reach: 25 of the 32 GB/s of PCIe 4.0 x16."""


def host_bytes_per_s(chip: Chip) -> float:
    """What copies to the host or back reach, per direction; 0 where the catalog does not say."""
    return HOST_LINK_FRAC * chip.host_bytes_per_s


# --- reading -----------------------------------------------------------------------------------


class _LevelEntry(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    bytes_per_s: float
    latency_s: float
    ranks: int | None = None
    oversubscription: float = 1.0
    torus: list[int] = []
    ring_multiple: int = 1
    rails: bool = False


class _ChipEntry(msgspec.Struct, forbid_unknown_fields=True):
    vendor: str
    generation: str
    memory_bytes: float
    memory_bytes_per_s: float
    matrix_flop_per_s: dict[str, float]
    vector_flop_per_s: dict[str, float]
    levels: list[_LevelEntry] = []
    name: str = ""
    num_cores: int = 0
    cache_bytes: float = 0.0
    power_watts: float = 0.0
    host_bytes_per_s: float = 0.0
    op_host_s: float = 0.0
    aliases: list[str] = []
    source: str = ""
    checked: datetime.date | None = None


class _ClusterEntry(msgspec.Struct, forbid_unknown_fields=True):
    num_chips: int
    chip: str | _ChipEntry
    levels: list[_LevelEntry] | None = None
    name: str = ""
    reduce_scatter: ReduceScatter = "reduce_scatter"
    aliases: list[str] = []
    source: str = ""
    checked: datetime.date | None = None


def _positive(value: float, what: str, *, zero: bool = False) -> float:
    least, most = RANGE
    if not (least <= value <= most or (value == 0 and zero)):
        kind = f"{'0 or ' * zero}a number from {least:g} to {most:g}"
        raise ClusterError(f"{what} is {value}; it must be {kind}")
    return float(value)


def _count(value: int, what: str) -> int:
    if not 1 <= value <= MAX_CHIPS:
        raise ClusterError(f"{what} is {_short(value)}; it must be from 1 to {MAX_CHIPS:,}")
    return value


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**18 else f"a number of {value.bit_length()} bits"


def _levels(entries: list[_LevelEntry], where: str) -> tuple[Level, ...]:
    if not entries:
        raise ClusterError(f"{where}: levels is empty; give at least one link level")
    levels: list[Level] = []
    for entry in entries:
        at = f"{where}, level {entry.name!r}"
        if levels and not math.isfinite(levels[-1].ranks):
            raise ClusterError(
                f"{where}, level {levels[-1].name!r}: ranks is missing; only the last may lack it"
            )
        ranks = math.inf if entry.ranks is None else _count(entry.ranks, f"{at}: ranks")
        if entry.torus:
            ranks = _torus_ranks(entry, at)
        if levels and ranks <= levels[-1].ranks:
            raise ClusterError(f"{at}: ranks must grow outward; list the innermost level first")
        if levels and entry.torus:
            raise ClusterError(f"{at}: only the innermost level can be a torus")
        if entry.rails and not levels:
            raise ClusterError(f"{at}: the innermost level has no rails; list the links of a node before it")
        if not 1.0 <= entry.oversubscription <= 1e6:
            raise ClusterError(f"{at}: oversubscription is {entry.oversubscription}; it must be 1 or more")
        levels.append(
            Level(
                name=entry.name,
                bytes_per_s=_positive(entry.bytes_per_s, f"{at}: bytes_per_s") / entry.oversubscription,
                latency_s=_positive(entry.latency_s, f"{at}: latency_s", zero=True),
                ranks=ranks,
                torus=tuple(entry.torus),
                ring_multiple=_count(entry.ring_multiple, f"{at}: ring_multiple"),
                rails=entry.rails,
            )
        )
    levels[-1] = replace(levels[-1], ranks=math.inf)
    return tuple(levels)


def _torus_ranks(entry: _LevelEntry, at: str) -> float:
    """The chips of the torus of `entry`; its `ranks`, where it is given too, must say the same."""
    ranks = math.prod(_count(size, f"{at}: torus") for size in entry.torus)
    if entry.ranks not in (None, ranks):
        shape = " x ".join(map(str, entry.torus))
        raise ClusterError(f"{at}: ranks is {entry.ranks}, but torus {shape} has {ranks}; leave ranks out")
    return float(ranks)


def _check_rates(table: dict[str, float], what: str) -> None:
    for dtype, rate in table.items():
        if dtype not in DTYPE_BYTES:
            raise ClusterError(f"{what} names the unknown dtype {dtype!r}; use {', '.join(DTYPE_BYTES)}")
        _positive(rate, f"{what}.{dtype}")


def _chip_from_entry(name: str, entry: _ChipEntry, where: str) -> Chip:
    at = f"{where}, chip {name!r}"
    _check_rates(entry.matrix_flop_per_s, f"{at}: matrix_flop_per_s")
    _check_rates(entry.vector_flop_per_s, f"{at}: vector_flop_per_s")
    if "fp32" not in entry.vector_flop_per_s:
        raise ClusterError(f"{at}: vector_flop_per_s lacks fp32; every chip needs that rate")
    values = msgspec.structs.asdict(entry)
    for what in ("memory_bytes", "memory_bytes_per_s"):
        values[what] = _positive(values[what], f"{at}: {what}")
    for what in ("cache_bytes", "power_watts", "host_bytes_per_s", "op_host_s"):
        values[what] = _positive(values[what], f"{at}: {what}", zero=True)
    if entry.num_cores:
        _count(entry.num_cores, f"{at}: num_cores")
    values |= {"levels": _levels(entry.levels, at), "aliases": tuple(entry.aliases)}
    return Chip(**values | {"name": entry.name or name, "checked": _iso(entry.checked)})


def _iso(date: datetime.date | None) -> str:
    return date.isoformat() if date else ""


def _cluster_from_entry(name: str, entry: _ClusterEntry, where: str) -> Cluster:
    at = f"{where}, cluster {name!r}"
    if isinstance(entry.chip, str):
        try:
            chip = find_chip(entry.chip)
        except ClusterError as error:
            raise ClusterError(f"{at}: {error}") from None
    else:
        own_levels = entry.chip.levels or entry.levels or []
        chip = _chip_from_entry(name, msgspec.structs.replace(entry.chip, levels=own_levels), where)
    return Cluster(
        name=entry.name or name,
        chip=chip,
        num_chips=_count(entry.num_chips, f"{at}: num_chips"),
        levels=_levels(entry.levels, at) if entry.levels is not None else chip.levels,
        reduce_scatter=entry.reduce_scatter,
        source=entry.source,
        checked=_iso(entry.checked),
    )


def _convert(raw: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ClusterError(f"{where}: {' '.join(str(error).split())}") from None


@cache
def chips() -> dict[str, Chip]:
    """All chips of the catalog by name."""
    entries = _convert(read_catalog("chips.toml"), dict[str, _ChipEntry], "chips.toml")
    return {name: _chip_from_entry(name, entry, "chips.toml") for name, entry in entries.items()}


@cache
def _cluster_entries() -> dict[str, _ClusterEntry]:
    return _convert(read_catalog("clusters.toml"), dict[str, _ClusterEntry], "clusters.toml")


def cluster_names() -> list[str]:
    """The names of the cluster presets."""
    return list(_cluster_entries())


def _by_name_or_alias(table: dict[str, Any], name: str) -> str | None:
    wanted = name.strip().lower()
    if wanted in table:
        return wanted
    return next((key for key, value in table.items() if wanted in value.aliases), None)


def _suggestion(name: str, table: dict[str, Any]) -> str:
    """The end of an error message: the names and aliases closest to `name`, or all names."""
    aliases = (alias for value in table.values() for alias in value.aliases)
    return did_you_mean(name, (*table, *aliases), f"known are {', '.join(table)}")


def num_cores(chip: Chip) -> int:
    """Cores of `chip`; where its entry names none, the most that a catalog chip of its generation has, or 1.

    Efficiencies are shared by a generation and count a kernel's waves in cores, so both must come together.
    """
    like = (one.num_cores for one in chips().values() if one.generation == chip.generation)
    return chip.num_cores or max(like, default=0) or 1


def find_chip(name: str) -> Chip:
    """The chip of the catalog called `name` (or one of its aliases)."""
    key = _by_name_or_alias(chips(), name)
    if key is None:
        raise ClusterError(f"no chip is called {name!r}; {_suggestion(name, chips())}")
    return chips()[key]


def find_cluster(text: str) -> Cluster:
    """The cluster that `text` names: a preset, `preset:count`, `chip:count`, or the path of a TOML file.

    A text with a `/` or the ending `.toml` is a path. The file holds the fields of one entry of
    `catalog/clusters.toml` at its top level; its `chip` is a name of the catalog or a table with the
    fields of `catalog/chips.toml`.
    """
    if text.endswith(".toml") or "/" in text:
        return _read_cluster_file(Path(text))
    name, colon, count = text.partition(":")
    entries = _cluster_entries()
    if (preset := _by_name_or_alias(entries, name)) is not None:
        cluster = _cluster_from_entry(preset, entries[preset], "clusters.toml")
    elif (chip_name := _by_name_or_alias(chips(), name)) is not None:
        if not colon:
            raise ClusterError(f"{text!r} is a chip; say how many, as in {chip_name}:8")
        cluster = _one_chip(chips()[chip_name])
    else:
        known = _suggestion(name, {**entries, **chips()})
        raise ClusterError(f"no cluster or chip is called {name!r} (chips are written name:count); {known}")
    if not colon:
        return cluster
    return replace(cluster, name=text, num_chips=_parse_count(count, f"cluster {text!r}"))


def _one_chip(chip: Chip) -> Cluster:
    return Cluster(
        name=chip.name, chip=chip, num_chips=1, levels=chip.levels, source=chip.source, checked=chip.checked
    )


def _parse_count(text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 12):
        raise ClusterError(f"{where}: {text!r} is not a number of chips; write one as in dgx-h100:512")
    return _count(int(text), f"{where}: the number of chips")


def _read_cluster_file(path: Path) -> Cluster:
    raw = _convert(read_toml(path, ClusterError), _ClusterEntry, str(path))
    return _cluster_from_entry(path.stem, raw, str(path))


def parse_cluster(text: str, name: str = "cluster") -> Cluster:
    """The cluster that the text of a TOML file describes; ClusterError says what is wrong with it."""
    tables = parse_toml(text, name, ClusterError)
    return _cluster_from_entry(name, _convert(tables, _ClusterEntry, name), name)


def cluster_text(cluster: Cluster, digits: int | None = None) -> str:
    """`cluster` as the text that `parse_cluster` turns back into it, with its chip and links written out.

    Floats have all their digits, or so many.
    """
    chip = cluster.chip
    tables = [
        ("", _stated(cluster, "chip", "levels", "collectives")),
        *_level_tables("[[levels]]", cluster.levels),
        ("[chip]", _stated(chip, "levels")),
        *_level_tables("[[chip.levels]]", chip.levels if repr(chip.levels) != repr(cluster.levels) else ()),
    ]
    return toml_text(tables, digits)


def _level_tables(head: str, levels: tuple[Level, ...]) -> list[tuple[str, dict[str, Any]]]:
    return [(head, _stated(replace(one, ranks=math.inf if one.torus else one.ranks))) for one in levels]


def _stated(record: Any, *without: str) -> dict[str, Any]:
    """The fields of a record that have not their default."""
    names = [item.name for item in fields(record) if getattr(record, item.name) != item.default]
    return {name: getattr(record, name) for name in names if name not in without}


# --- numbers for the cost model ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rates:
    """The rates of a chip at one dtype.

    The fields `link_*` hold one entry per level, innermost first; a torus has one for each of its axes, with
    `link_ways` 2 where the axis closes to a ring, else 1 (switches: 0). `node_ranks` is the size of a domain
    of the innermost level, the whole torus.
    """

    matrix_flop_per_s: Num
    vector_flop_per_s: Num
    memory_bytes_per_s: Num
    memory_bytes: Num
    link_bytes_per_s: tuple[Num, ...]
    link_latency_s: tuple[Num, ...]
    link_ranks: tuple[Num, ...]
    link_ways: tuple[Num, ...] = ()
    link_rails: tuple[Num, ...] = ()
    node_ranks: Num = math.inf


@lru_cache(maxsize=256)
def sliced(levels: tuple[Level, ...], num_chips: int) -> tuple[Level, ...]:
    """The levels as a job of `num_chips` meets them: a part of a torus is the most cubic box of that size."""
    inner = levels[0]
    whole = math.prod(inner.torus)
    if not inner.torus or num_chips == whole:
        return levels
    if num_chips > whole:
        if len(levels) == 1:
            shape = " x ".join(map(str, inner.torus))
            raise ClusterError(
                f"the torus {shape} has {whole} chips, not {num_chips}; add a level that joins several"
            )
        return levels
    return (replace(inner, torus=_most_cubic(num_chips, len(inner.torus))), *levels[1:])


def _most_cubic(num_chips: int, num_axes: int) -> tuple[int, ...]:
    """The box of `num_chips` with the smallest sum of its sides, the shortest first."""
    if num_axes == 1:
        return (num_chips,)
    boxes = (
        tuple(sorted((side, *_most_cubic(num_chips // side, num_axes - 1))))
        for side in range(1, math.isqrt(num_chips) + 1)
        if num_chips % side == 0
    )
    return min(boxes, key=sum)


def _axes(level: Level) -> list[tuple[Level, float]]:
    """The links of a level with their ways: switches as they are, a torus axis by axis."""
    if not level.torus:
        return [(level, 0.0)]
    sizes = itertools.accumulate(level.torus, operator.mul)
    one_way = level.bytes_per_s / (2 * len(level.torus))
    return [
        (
            replace(level, bytes_per_s=one_way, ranks=float(ranks)),
            2.0 if size > 1 and size % level.ring_multiple == 0 else 1.0,
        )
        for size, ranks in zip(level.torus, sizes, strict=True)
    ]


def rates(cluster: Cluster, dtype: str) -> Rates:
    """The numbers of `cluster` that the cost model computes with, for matrix work in `dtype`."""
    levels = sliced(cluster.levels, cluster.num_chips)
    links, ways = zip(*(axis for level in levels for axis in _axes(level)), strict=True)
    return Rates(
        matrix_flop_per_s=cluster.chip.matrix_peak(dtype),
        vector_flop_per_s=cluster.chip.vector_peak(dtype),
        memory_bytes_per_s=cluster.chip.memory_bytes_per_s,
        memory_bytes=cluster.chip.memory_bytes,
        link_bytes_per_s=tuple(link.bytes_per_s for link in links),
        link_latency_s=tuple(link.latency_s for link in links),
        link_ranks=tuple(link.ranks for link in links),
        link_ways=ways,
        link_rails=tuple(float(link.rails) for link in links),
        node_ranks=levels[0].ranks,
    )

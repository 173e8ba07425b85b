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

import datetime
import itertools
import math
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from meshwise.core.errors import ClusterError, did_you_mean
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse
from meshwise.core.toml import check_fields, parse_toml, read_toml, toml_text
from meshwise.core.units import DTYPE_BYTES, Num

MAX_CHIPS = 10**9
"""No cluster is larger: a count above this is a typing error, and the cost model stays exact below it."""

_LEAST, _MOST = 1e-30, 1e30
_Positive = Annotated[float, msgspec.Meta(ge=_LEAST, le=_MOST)]
_FromZero = Annotated[float, msgspec.Meta(ge=0, le=_MOST)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHIPS)]
"""Every rate, size and latency lies between these, so that products and ratios of them stay finite."""


BOX_LINKS = ("nvlink", "pcie", "infinity-fabric", "xgmi", "neuronlink", "ici")
"""How names of links begin that join chips inside a node; all others beyond the innermost are networks."""

NETWORKS = ("infiniband", "roce", "ethernet", "efa", "slingshot", "omnipath", "connectx", "tcp", "dcn")
"""How names of networks begin: where one is the only level, every node has one chip."""

WITHOUT_PEERS = "-host"
"""How the name of a level of PCIe ends whose GPUs have no peer access: all they exchange passes the host."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Level:
    """One kind of link. `ranks`: ranks in one domain of this level (infinite: the whole cluster).

    `bytes_per_s` is what is left for a rank when all ranks use the level at once. `torus`: the chips along
    each axis (empty: switches); an axis closes to a ring where its size is a multiple of `ring_multiple`.
    `rails`: switches join only ranks of the same place in their domains of the level inside. `mesh`: in place
    of switches every two ranks have a link of their own, so that few ranks use few of them.
    """

    name: str
    bytes_per_s: _Positive
    latency_s: _FromZero
    ranks: float = math.inf
    torus: tuple[_Count, ...] = ()
    ring_multiple: _Count = 1
    rails: bool = False
    mesh: bool = False

    @property
    def box_link(self) -> str:
        """Which of BOX_LINKS joins the ranks; empty of any other link."""
        return next((kind for kind in BOX_LINKS if self.name.lower().startswith(kind)), "")

    @property
    def peer_ranks(self) -> float:
        """The most ranks whose sums engines make by reading the peers' memory over these links.

        On PCIe two with peer access, over a network none. Source: `custom_all_reduce.py` of vLLM and SGLang.
        """
        if self.name.endswith(WITHOUT_PEERS) or (not self.box_link and self.ranks == math.inf):
            return 1.0
        return 2.0 if self.box_link == "pcie" else math.inf


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
    `flop_per_joule`: matrix FLOP for a joule, as a multiple of what its generation does.
    `host_chips`: the most that one host has, which may be fewer than the innermost links join.
    """

    name: str
    vendor: str
    generation: str
    memory_bytes: _Positive
    memory_bytes_per_s: _Positive
    matrix_flop_per_s: dict[str, float]
    vector_flop_per_s: dict[str, float]
    levels: tuple[Level, ...]
    num_cores: Annotated[int, msgspec.Meta(ge=0, le=MAX_CHIPS)] = 0
    cache_bytes: _FromZero = 0.0
    power_watts: _FromZero = 0.0
    flop_per_joule: _Positive = 1.0
    host_bytes_per_s: _FromZero = 0.0
    op_host_s: _FromZero = 0.0
    host_chips: _Count = 8
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

    @property
    def training_dtype(self) -> str:
        """bf16 where the matrix units have it, else the faster of fp16 and fp32."""
        peaks = {"fp16": 0.0} | self.vector_flop_per_s | self.matrix_flop_per_s
        return "bf16" if "bf16" in self.matrix_flop_per_s else max("fp16", "fp32", key=peaks.__getitem__)

    def vector_peak(self, dtype: str) -> float:
        """Peak [FLOP/s] of the vector units for `dtype`; narrower types run at the fp32 rate at least."""
        return self.vector_flop_per_s.get(dtype) or self.vector_flop_per_s["fp32"]


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredCollective:
    """Seconds of one kind of collective by its payload, of a group of `ranks`, `ranks_inside` of them on one
    host of `host_ranks`; sizes ascend. `source`: the files that say so. Smaller ones take as long as
    the smallest, larger ones go at the rate of the largest."""

    kind: str
    ranks: float
    ranks_inside: float
    host_ranks: float
    sizes_bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    source: str

    def __str__(self) -> str:
        sizes = f"{self.sizes_bytes[0]:,.0f} to {self.sizes_bytes[-1]:,.0f} bytes"
        group = f"{self.kind} among {self.ranks:.0f} ranks, {self.ranks_inside:.0f} in a node, {sizes}"
        beyond = "smaller ones take as long as the smallest, larger ones go at the rate of the largest"
        return f"measured, not predicted ({self.source}): {group}; {beyond}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`num_chips` of `chip`, joined by `levels` (innermost first).

    `reduce_scatter`: the collective that the library does for it: gloo has none, and reduces all to all.
    `collectives`: what was measured on it, which takes the place of a prediction.
    """

    name: str
    chip: Chip
    num_chips: _Count
    levels: tuple[Level, ...]
    reduce_scatter: ReduceScatter = "reduce_scatter"
    collectives: tuple[MeasuredCollective, ...] = ()
    source: str = ""
    checked: str = ""

    @property
    def chips_per_host(self) -> int:
        """Chips of one host: those of its largest level of links that the hosts of the chip can hold."""
        nodes = [int(level.ranks) for level in self.levels if level.ranks <= self.chip.host_chips]
        return max(nodes, default=self.chip.host_chips)

    @property
    def num_hosts(self) -> int:
        """Hosts that hold equal parts of the cluster: 12 chips on hosts of 8 are three of 4."""
        return self.num_chips // math.gcd(self.num_chips, self.chips_per_host)

    def to_json(self) -> dict[str, Any]:
        """What an answer says of the cluster that it is about."""
        return {"name": self.name, "chip": self.chip.name, "num_chips": self.num_chips}


HOST_LINK_FRAC = 25.0 / 32.0
"""Share of a host link that large copies from pinned memory reach: 25 of the 32 GB/s of PCIe 4.0 x16."""


def host_bytes_per_s(chip: Chip) -> float:
    """What copies to the host or back reach, per direction; 0 where the catalog does not say."""
    return HOST_LINK_FRAC * chip.host_bytes_per_s


# --- reading -----------------------------------------------------------------------------------


_Record = TypeVar("_Record", Level, Chip, Cluster)


def _record(kind: type[_Record], stated: dict[str, Any], at: str) -> _Record:
    """The level, chip or cluster whose fields are `stated`; tables in them are read already."""
    _check_fields(kind, stated, at)
    return _converted(kind, stated, at)


def _converted(kind: type[_Record], stated: dict[str, Any], at: str) -> _Record:
    """The same of fields that are checked by name."""
    try:
        return msgspec.convert(stated | {"checked": _date(stated)} if "checked" in stated else stated, kind)
    except msgspec.ValidationError as error:
        text, _, place = " ".join(str(error).split()).replace("`", "").partition(" - at $.")
        where = f"{place} is {stated[place]!r}; " if place in stated else f"{place}: " * bool(place)
        raise ClusterError(f"{at}: {where}{text.replace('Expected', 'expected')}") from None


def _check_fields(kind: type[_Record], stated: dict[str, Any], at: str) -> None:
    """ClusterError names all fields that `kind` does not have, or all that are missing."""
    known = fields(kind)
    needed = (item.name for item in known if item.default is item.default_factory is MISSING)
    given = (name for name, value in stated.items() if value is not None)
    others = ["oversubscription"] * (kind.__name__ == "Level")
    check_fields(given, [item.name for item in known] + others, needed, at, ClusterError)


def _date(stated: dict[str, Any]) -> str:
    try:
        return datetime.date.fromisoformat(str(stated["checked"])).isoformat()
    except ValueError:
        raise msgspec.ValidationError("checked is no date; write one as in 2026-11-20") from None


def _shape(level: Level) -> str:
    return " x ".join(map(str, level.torus))


def _levels(tables: Any, where: str) -> tuple[Level, ...]:
    """The levels of a file, innermost first; `oversubscription` divides the bandwidth of one."""
    refuse("tables of levels", ClusterError, f"{where}: ", tables=tables, is_list=isinstance(tables, list))
    levels: list[Level] = []
    for table in tables:
        stated = dict(table) if isinstance(table, dict) else {}
        at, shared = f"{where}, level {stated.get('name')!r}", stated.pop("oversubscription", 1.0)
        level = _record(Level, stated, at)
        level = replace(level, ranks=float(math.prod(level.torus))) if level.torus else level
        refuse(
            "level", ClusterError, f"{at}: ", levels=levels, level=level, shared=shared, stated=stated,
            is_number=isinstance(shared, int | float), shape=_shape(level),
        )  # fmt: skip
        if "ranks" in stated:
            refuse("count", ClusterError, f"{at}: ranks is ", value=level.ranks)
        levels.append(replace(level, bytes_per_s=level.bytes_per_s / shared))
    refuse("levels", ClusterError, f"{where}: ", last=levels[-1])
    levels[-1] = replace(levels[-1], ranks=math.inf)
    is_network = len(levels) == 1 and levels[0].name.lower().startswith(NETWORKS)
    return (*[replace(levels[0], name="node of one", ranks=1.0)] * is_network, *levels)


def _chip(name: str, stated: dict[str, Any], levels: Any, where: str) -> Chip:
    """The chip of a table of a file; `levels` join it where it states none."""
    at = f"{where}, chip {name!r}"
    _check_fields(Chip, {"name": name, "levels": levels} | stated, at)
    links = _levels(stated.get("levels") or levels, at)
    chip = _converted(Chip, {"name": name} | stated | {"levels": links}, at)
    for what in ("matrix_flop_per_s", "vector_flop_per_s"):
        for dtype, rate in getattr(chip, what).items():
            known = {"types": DTYPE_BYTES, "known": ", ".join(DTYPE_BYTES), "within": _LEAST <= rate <= _MOST}
            refuse("rate of a chip", ClusterError, f"{at}: ", what=what, dtype=dtype, rate=rate, **known)
    refuse("chip", ClusterError, f"{at}: ", chip=chip)
    return chip


def _cluster(name: str, table: dict[str, Any], where: str) -> Cluster:
    """The cluster of a table of a file, whose chip is a name of the catalog or a table."""
    at, stated = f"{where}, cluster {name!r}", dict(table)
    stated.pop("aliases", None)
    chip, levels = stated.get("chip"), stated.get("levels")
    if isinstance(chip, str):
        chip = find_chip(chip, f"{at}: ")
    elif isinstance(chip, dict):
        if levels is None and "levels" not in chip and "host_bytes_per_s" in chip:  # more go through the host
            levels = [{"name": "pcie-host", "bytes_per_s": chip["host_bytes_per_s"], "latency_s": 1.4e-6}]
            stated.setdefault("num_chips", 1)
        chip = _chip(name, chip, levels, where)
    stated |= {"name": stated.get("name") or name} | ({"chip": chip} if chip else {})
    if isinstance(chip, Chip):
        stated["levels"] = chip.levels if levels is None else _levels(levels, at)
        joined, num = float((levels or [{}])[-1].get("ranks", math.inf)), stated.get("num_chips")
        refuse("cluster", ClusterError, f"{at}: ", joined=joined, num=num, is_count=isinstance(num, int))
    stated.setdefault("levels", ())  # those of the chip that is missing
    return _record(Cluster, stated, at)


@cache
def chips() -> dict[str, Chip]:
    """All chips of the catalog by name."""
    entries = read_catalog("chips.toml")
    return {name: _chip(name, entry, None, "chips.toml") for name, entry in entries.items()}


@cache
def _clusters() -> dict[str, dict[str, Any]]:
    return read_catalog("clusters.toml")


def cluster_names() -> list[str]:
    """The names of the cluster presets."""
    return list(_clusters())


@cache
def _names() -> dict[str, str]:
    """Chips and cluster presets by their names and aliases."""
    aliases = {name: chip.aliases for name, chip in chips().items()}
    aliases |= {name: entry.get("aliases", ()) for name, entry in _clusters().items()}
    return {known: name for name, others in aliases.items() for known in (name, *others)}


def _suggestion(name: str, kinds: Collection[str]) -> str:
    """The end of an error message: the names and aliases closest to `name`, or all names."""
    known = [known for known, named in _names().items() if named in kinds]
    return did_you_mean(name, known, f"known are {', '.join(kinds)}")


def num_cores(chip: Chip) -> int:
    """Cores of `chip`; where its entry names none, the most that a catalog chip of its generation has, or 1.

    Efficiencies are shared by a generation and count a kernel's waves in cores, so both must come together.
    """
    like = (one.num_cores for one in chips().values() if one.generation == chip.generation)
    return chip.num_cores or max(like, default=0) or 1


def find_chip(name: str, at: str = "") -> Chip:
    """The chip of the catalog called `name` (or one of its aliases); `at`: where it is named."""
    found = chips().get(_names().get(name.strip().lower(), ""))
    if found is None:
        raise ClusterError(f"{at}no chip is called {name!r}; {_suggestion(name, chips())}")
    return found


def find_device(text: str) -> Chip:
    """The chip of the catalog called `text`, or that of a cluster's TOML file."""
    return find_cluster(text).chip if text.endswith(".toml") else find_chip(text)


def find_cluster(text: str) -> Cluster:
    """The cluster that `text` names: a preset, a TOML file, or either or a chip with `:count` behind it.

    A text with a `/` or the ending `.toml` is a path. The file holds the fields of one entry of
    `catalog/clusters.toml` at its top level; its `chip` is a name of the catalog or a table with the
    fields of `catalog/chips.toml`. Without `levels` it is one card, and more of them exchange over what
    joins each to its host (`host_bytes_per_s`).
    """
    path, colon, count = text.rpartition(".toml:")
    if colon:
        return _resized(find_cluster(f"{path}.toml"), text, count)
    if text.endswith(".toml") or "/" in text:
        return _cluster(Path(text).stem, read_toml(Path(text), ClusterError), text)
    name, colon, count = text.partition(":")
    found = _names().get(name.strip().lower(), "")
    if found in _clusters():
        cluster = _cluster(found, _clusters()[found], "clusters.toml")
    elif chip := chips().get(found):
        refuse("chip alone", ClusterError, colon=colon, text=text, found=found)
        cluster = Cluster(
            name=text, chip=chip, num_chips=1, levels=chip.levels, source=chip.source, checked=chip.checked
        )
    else:
        known = _suggestion(name, [*_clusters(), *chips()])
        raise ClusterError(f"no cluster or chip is called {name!r} (chips are written name:count); {known}")
    return _resized(cluster, text, count) if colon else cluster


def _resized(cluster: Cluster, text: str, count: str) -> Cluster:
    """`cluster` with `count` chips, as `text` asks for."""
    refuse("number of chips", ClusterError, text=text, count=count)
    refuse("count", ClusterError, f"cluster {text!r}: the number of chips is ", value=int(count))
    return replace(cluster, name=text, num_chips=int(count))


def parse_cluster(text: str, where: str = "cluster") -> Cluster:
    """The cluster that the text of a TOML file describes; ClusterError says where and what is wrong."""
    return _cluster("cluster", parse_toml(text, where, ClusterError), where)


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


class Link(NamedTuple):
    """One level of links, or one axis of a torus, whose `ways` are 2 where it closes to a ring, else 1.

    `job_ranks`: of the `ranks` of a domain those that a job has (`of_job`); 0 where that is not said.
    `box`: the links of a box of chips that it is, beyond the innermost ones ("": a network).
    `peer_ranks`: the most ranks that add up by reading each other's memory (`Level`).
    """

    bytes_per_s: Num
    latency_s: Num
    ranks: Num
    ways: Num = 0.0
    rails: Num = 0.0
    mesh: bool = False
    job_ranks: int = 0
    box: str = ""
    peer_ranks: float = 1.0

    def among(self, ranks: Num) -> Num:
        """What `ranks` ranks of a domain have of the links of one [bytes/s]."""
        share: Num = np.maximum(ranks - 1.0, 1.0) / (self.ranks - 1.0) if self.mesh else 1.0
        return self.bytes_per_s * share

    def of_job(self, num_chips: int) -> "Link":
        """The link as a job of `num_chips` meets it that needs several of its domains.

        It has all of a domain where that divides the job; else an even share, as large as can be, that leaves
        a group whole wherever a full domain does (256 ranks have 64 in each of four domains of 72).
        """
        if self.ways or self.ranks >= num_chips:
            return self
        even = math.gcd(num_chips, int(self.ranks))
        sizes = range(even, int(self.ranks) + 1, even)
        return self._replace(job_ranks=max(size for size in sizes if num_chips % size == 0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rates:
    """The rates of a chip at one dtype.

    `links`: one for each level, innermost first, or for each axis of a torus. `node_ranks` is the size of a
    domain of the innermost level, the whole torus.
    """

    matrix_flop_per_s: Num
    vector_flop_per_s: Num
    memory_bytes_per_s: Num
    links: tuple[Link, ...]
    node_ranks: Num = math.inf


@lru_cache(maxsize=256)
def sliced(levels: tuple[Level, ...], num_chips: int) -> tuple[Level, ...]:
    """The levels as a job of `num_chips` meets them: a part of a torus is the most cubic box of that size."""
    inner, whole = levels[0], math.prod(levels[0].torus)
    if not inner.torus or num_chips == whole:
        return levels
    box = min(_boxes(num_chips, sorted(inner.torus)), key=sum, default=())
    known = {"whole": whole, "num_chips": num_chips, "is_alone": len(levels) == 1, "shape": _shape(inner)}
    refuse("part of a torus", ClusterError, box=box, **known)
    return (replace(inner, torus=tuple(sorted(box))), *levels[1:]) if box else levels


def _boxes(num_chips: int, axes: list[int]) -> Iterator[tuple[int, ...]]:
    """The boxes of `num_chips` that fit into a torus with `axes`, which ascend."""
    if len(axes) == 1:
        yield from [(num_chips,)] * (num_chips <= axes[0])
        return
    for side in range(1, min(axes[0], math.isqrt(num_chips)) + 1):
        if num_chips % side == 0:
            yield from ((side, *others) for others in _boxes(num_chips // side, axes[1:]))


def _axes(level: Level) -> list[Link]:
    """The links of a level: switches as they are, a torus axis by axis."""
    if not level.torus:
        link = Link(level.bytes_per_s, level.latency_s, level.ranks, rails=float(level.rails))
        return [link._replace(mesh=level.mesh, box=level.box_link, peer_ranks=level.peer_ranks)]
    sizes = itertools.accumulate(level.torus, operator.mul)
    one_way = level.bytes_per_s / (2 * len(level.torus))
    ways = [2.0 if size > 1 and size % level.ring_multiple == 0 else 1.0 for size in level.torus]
    axes = zip(map(float, sizes), ways, strict=True)
    return [Link(one_way, level.latency_s, ranks, both) for ranks, both in axes]


def links_of(levels: Sequence[Level]) -> tuple[Link, ...]:
    """The links of levels, innermost first."""
    return tuple(link for level in levels for link in _axes(level))


def rates(chip: Chip, levels: Sequence[Level], dtype: str) -> Rates:
    """The numbers that the cost model computes with, of `chip` on the levels of a job (`sliced`)."""
    return Rates(
        matrix_flop_per_s=chip.matrix_peak(dtype),
        vector_flop_per_s=chip.vector_peak(dtype),
        memory_bytes_per_s=chip.memory_bytes_per_s,
        links=links_of(levels),
        node_ranks=levels[0].ranks,
    )

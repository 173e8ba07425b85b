"""How much of a chip's promise its kernels keep: the fitted constants of `catalog/efficiency.toml`.

A data sheet gives peaks; kernels reach a share of them and pay fixed times on top. Each class of op has
a formula in `cost/` and a handful of constants, one set per chip (and dtype), which `meshwise fit`
computes from public measurements and writes with their source and error; links beyond the node have
theirs by the kind of network. A chip without measurements
*inherits* the geometric mean of the chips of its generation, or of all chips where the generation has
none; `Efficiency.inherited_from` says which. In fp4, a generation that was measured in fp8 alone, and a chip
whose peak in fp4 is that of fp8 (its units are the same), reach their share of the peak there; what feeds and
ends the tiles is that of fp4 elsewhere. `IDEAL` is the chip of the data sheet: every formula falls back to
max(FLOP / peak, bytes / bandwidth) and the bare wire.

Shares (`_frac`) are of the chip's published peak. `_latency` of a link is a multiple of the latency
that the catalog gives for that link, so that a user's own cluster keeps its meaning. The overhead of a
matmul's tile is work of one core; a chip inherits it as a share of that work, whatever its own core can do.
The matrix unit of a TPU or of Gaudi is a few large systolic arrays, fed from memory through a scratchpad: a
block that fills it has sides that grow with its root, and so does the FLOP per byte fed (`cache_speedup`).
Theirs are stated in `catalog/matrix_engines.toml`, those of AMD's kernels in `catalog/rocm.toml`; only chips
of the same generation inherit from either.
"""

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from typing import Any, TypeVar

from meshwise.core.columns import grouped
from meshwise.core.errors import ClusterError
from meshwise.core.files import catalog_text
from meshwise.machine.hardware import MEASURED, WITHOUT_PEERS, Chip, Level, chips, num_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmEfficiency:
    """Constants of `cost.gemm`. The defaults are the ideal chip.

    launch_s: kernel launch until the first tile starts, and drain of the last.
    peak_frac: share of peak that a core reaches inside a tile, short kernels.
    throttle_frac: share by which the core slows per decade of kernel duration beyond 0.1 ms (two decades
        at most), as power limits the clock.
    cache_speedup: bandwidth that feeds the tiles (last cache), as a multiple of memory bandwidth.
    memory_frac: share of memory bandwidth.
    tile_s: prologue and epilogue of one tile.
    split_s: extra time when the sum over k is split among cores.
    by_rows: tile_s and split_s are of a tile of 256 rows and in proportion to the rows, down to 16 (AITER).
    overlap_power: how well compute hides memory: (compute^p + memory^p)^(1/p); 1: not at all.
    weight_copies: processors of the chip, each of which moves the weights of all experts.
    shared_rows: rows of a tile that two neighbouring groups share: it is computed for each.
    masked_frac: more compute where a weight has a dimension that is no multiple of 128 lanes: it is masked.
    """

    launch_s: float = 0.0
    peak_frac: float = 1.0
    throttle_frac: float = 0.0
    cache_speedup: float = math.inf
    memory_frac: float = 1.0
    tile_s: float = 0.0
    split_s: float = 0.0
    tiled: bool = False
    by_rows: bool = False
    overlap_power: float = 2.5
    weight_copies: float = 1.0
    shared_rows: float = 0.0
    masked_frac: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionEfficiency:
    """Constants of `cost.attention_kernel`. The defaults are the ideal chip.

    softmax_dim: the work of the exponentials, as an equivalent extra head dimension.
    tail: lengths of the longest tile that the last wave adds, on top of an even share.
    backward_frac: rate of the backward relative to the forward.
    tile: rows of a query tile (the diagonal tiles of a causal mask are computed whole).
    unit_dim: side of the systolic array, which heads of fewer dimensions do not fill (1: they do).
    """

    launch_s: float = 0.0
    peak_frac: float = 1.0
    softmax_dim: float = 0.0
    tail: float = 0.0
    memory_frac: float = math.inf
    backward_frac: float = 1.0
    tile: float = 0.0
    unit_dim: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEfficiency:
    """Constants of `cost.memory_kernel` for streaming kernels: launch and share of memory bandwidth."""

    launch_s: float = 0.0
    memory_frac: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeEfficiency(MemoryEfficiency):
    """Constants of decode attention in `cost.attention_kernel`. The defaults are the ideal chip."""

    peak_frac: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CastEfficiency(MemoryEfficiency):
    """Constants of `cost.memory_kernel` for casts with a scale, to fp8 or fp4.

    passes: how often the bytes are moved (once to find the scale, once to cast). row_s: time of one row
    on one core.
    """

    passes: float = 1.0
    row_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsEfficiency:
    """Constants of `cost.experts`: how a library's grouped matmuls differ from plain ones of their dtype.

    launch_s: sorting tokens by expert and launching it all. peak_frac, memory_frac: multiples of the
    matmul's own. passes: how often all tokens are moved whatever their experts (routing, casts).
    activation_passes: how often the activation's rows are moved: one that reads a byte at a time is slow.
    """

    launch_s: float = 0.0
    peak_frac: float = 1.0
    memory_frac: float = 1.0
    passes: float = 0.0
    activation_passes: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchEfficiency:
    """Constants of `cost.dispatch` for one library and direction. The defaults are the ideal machine.

    launch_s: an exchange of nothing. rank_s, node_s: more of that for each doubling of the ranks of a node,
    and of the nodes; expert_s: for each expert. token_s: time of one core for one token.
    inner_frac, outer_frac: shares of the links' bandwidth. core_bytes_per_s: what one core forwards inside
    a node of what comes from other nodes.
    crowded_frac: share of the bandwidth between nodes that is left among more than four.
    """

    launch_s: float = 0.0
    rank_s: float = 0.0
    node_s: float = 0.0
    expert_s: float = 0.0
    token_s: float = 0.0
    inner_frac: float = 1.0
    outer_frac: float = 1.0
    core_bytes_per_s: float = math.inf
    crowded_frac: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEfficiency:
    """Constants of an all-reduce by reading the peers' memory (`cost.collective.peer_all_reduce_s`).

    host_s: least time of a call that no graph replays. launch_s: kernel launch; wait_s: one wait for all
    peers; link_frac: share of the link's bandwidth. coded_launch_s, coded_bytes_per_s: launch and rate of a
    sum whose parts travel in 8 bits; a rank encodes and decodes as much whatever its peers (0: none such).
    """

    host_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    link_frac: float = 1.0
    coded_launch_s: float = 0.0
    coded_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEfficiency:
    """Constants of one kind of link in `cost.collective`. The defaults are the ideal link.

    NCCL has a *quick* protocol (LL, LL128: flags travel with the data; low latency, a share of the
    bandwidth) and a *bulk* one (Simple: full bandwidth, but neighbours synchronise); the faster is taken.
    quick_latency: delay of a hop. bulk_latency: delay that each synchronisation of the bulk protocol adds.
    tree_latency: a hop of a tree takes that many hops of a ring; None: no trees.
    switch_frac: share of the bandwidth when the switch adds up (NVLS, SHARP); None: it cannot.
    switch_latency: delay until a sum in the switch flows.
    own_part: a rank's own part is copied through memory: that many parts' worth of wire time.
    host_frac: share of the bandwidth on a way through the host, which more than two GPUs on PCIe take.
    host_shared_frac: share of what the links of a whole domain carry that its host passes on for all; in a
        box whose GPUs cannot reach each other's memory (no peer access) little, as all passes its memory.
    """

    launch_s: float = 0.0
    quick_latency: float = 1.0
    quick_frac: float = 1.0
    bulk_latency: float = 0.0
    bulk_frac: float = 1.0
    own_part: float = 0.0
    all_to_all_own_part: float = 0.0
    tree_latency: float | None = None
    switch_frac: float | None = None
    switch_latency: float = 0.0
    host_frac: float = 1.0
    host_shared_frac: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """All constants of one chip: `inner` for links of a node, `outer` for networks.

    `pcie` is for PCIe that joins what the innermost links of a node do not.
    `gemms` and `casts` go by dtype, `experts` by dtype and library (`fp8_block-triton`), `dispatches` by
    library and direction (`deepep-normal-combine`).
    """

    gemms: Mapping[str, GemmEfficiency] = field(default_factory=dict)
    attention: AttentionEfficiency = AttentionEfficiency()
    decode: DecodeEfficiency = DecodeEfficiency()
    latent_decode: DecodeEfficiency = DecodeEfficiency()
    memory: MemoryEfficiency = MemoryEfficiency()
    casts: Mapping[str, CastEfficiency] = field(default_factory=dict)
    experts: Mapping[str, ExpertsEfficiency] = field(default_factory=dict)
    dispatches: Mapping[str, DispatchEfficiency] = field(default_factory=dict)
    peer: PeerEfficiency = PeerEfficiency()
    inner: LinkEfficiency = LinkEfficiency()
    pcie: LinkEfficiency = LinkEfficiency()
    outer: LinkEfficiency = LinkEfficiency()
    inherited_from: Mapping[str, str] = field(default_factory=dict)

    def inherited(self, used: set[str]) -> dict[str, list[str]]:
        """Whose efficiencies stand for those of this chip, and which of `used`."""
        return grouped(sorted(used & set(self.inherited_from)), self.inherited_from.__getitem__)

    def nearest(self, kind: str, names: Sequence[str]) -> str:
        """The first of the variants `names` measured on this chip, else on its generation, else anywhere."""
        of = {name: self.inherited_from.get(f"{kind}.{name}", "") for name in names}
        return min(names, key=lambda name: (of[name] != "", of[name].startswith(ALL_CHIPS)), default="")

    def gemm_name(self, dtype: str, *, in_blocks: bool = False, grouped: bool = False) -> str:
        """The constants for matmuls in `dtype`, whose weights may be scaled `in_blocks` or of experts."""
        name = AS_MEASURED.get(dtype, dtype)
        kinds = [kind for kind, is_it in (("grouped", grouped), ("block", in_blocks)) if is_it]
        names = [f"{own}-{kind}" for kind in kinds for own in (name, "bf16")]
        return next((own for own in names if own in self.gemms), name)

    def gemm(self, dtype: str, *, in_blocks: bool = False, grouped: bool = False) -> GemmEfficiency:
        """The constants for matmuls in `dtype`; a dtype without its own shares those of bf16."""
        shared = self.gemms.get("bf16", _IDEAL_GEMM)
        return self.gemms.get(self.gemm_name(dtype, in_blocks=in_blocks, grouped=grouped), shared)

    def cast(self, dtype: str) -> CastEfficiency:
        """The constants for casts with a scale to `dtype`."""
        return self.casts.get(AS_MEASURED.get(dtype, dtype), _IDEAL_CAST)


def inherited_notes(chip: Chip, found: Mapping[str, Sequence[str]]) -> list[str]:
    """What an answer about `chip` says of efficiencies that are of others (`Efficiency.inherited`)."""
    named = ((", ".join(names), origin) for origin, names in found.items())
    return [f"{chip.name}: efficiency of {names} inherited from {origin}" for names, origin in named]


AS_MEASURED = {"fp16": "bf16", "int8": "fp8"}
"""Types that were not measured, and the type of the same width that was."""

_IDEAL_GEMM = GemmEfficiency()
_IDEAL_CAST = CastEfficiency()
IDEAL = Efficiency()


CLASSES: dict[str, type] = {
    "gemm": GemmEfficiency,
    "attention": AttentionEfficiency,
    "decode": DecodeEfficiency,
    "memory": MemoryEfficiency,
    "cast": CastEfficiency,
    "experts": ExpertsEfficiency,
    "dispatch": DispatchEfficiency,
    "peer": PeerEfficiency,
    "inner": LinkEfficiency,
    "outer": LinkEfficiency,
}
"""The classes of op in efficiency.toml: `[class.chip.variant]`, for `outer` `[outer.network.link]`."""

Constants = TypeVar("Constants")


def read(text: str) -> dict[str, dict[str, Any]]:
    """The tables of an efficiency catalog: `[class.chip.variant]` as `{class.variant: {chip: constants}}`."""
    tables: dict[str, dict[str, Any]] = {}
    for name, by_chip in tomllib.loads(text).items():
        if name == "about":
            continue
        for chip, variants in by_chip.items():
            for variant, entry in variants.items():
                values = {key: value for key, value in entry.items() if key not in ("fit", "source")}
                try:
                    tables.setdefault(f"{name}.{variant}", {})[chip] = CLASSES[name](**values)
                except TypeError as error:
                    raise ClusterError(f"efficiency.toml: {name}.{variant} of {chip}: {error}") from None
    return tables


STATED = ("matrix_engines.toml", "rocm.toml")
"""Catalogs of constants that chips of other generations do not inherit."""


@cache
def _tables(name: str) -> dict[str, dict[str, Any]]:
    """The tables of a file of the catalog."""
    return read(catalog_text(name))


@cache
def _catalog(generation: str) -> dict[str, dict[str, Any]]:
    """The fitted tables, and what is stated of chips of `generation`."""
    tables = dict(_tables("efficiency.toml"))
    for key, stated in (item for name in STATED for item in _tables(name).items()):
        if own := {chip: entry for chip, entry in stated.items() if _generation(chip) == generation}:
            tables[key] = tables.get(key, {}) | own
    return tables


def mean(entries: list[Constants]) -> Constants:
    """The geometric mean of sets of constants, field by field; a field that one lacks is lacking."""
    first = entries[0]
    values: dict[str, Any] = {}
    for item in fields(first):  # type: ignore[arg-type]
        column = [getattr(entry, item.name) for entry in entries]
        if isinstance(column[0], bool) or None in column or 0.0 in column:
            values[item.name] = next((value for value in column if not value), column[0])
        else:
            values[item.name] = math.exp(sum(map(math.log, column)) / len(column))
    return type(first)(**values)


def _generation(chip: str) -> str:
    return chips()[chip].generation if chip in chips() else ""


def network(levels: Sequence[Level]) -> str:
    """The kind of network beyond the node: the first letters of its name (`infiniband-ndr`, `rocev2`)."""
    names = [level.name.lower() for level in levels[1:] if not level.box_link][:1]
    return "".join(re.match(r"[a-z]*?(?=v?\d|[^a-z]|$)", name)[0] or name for name in names)  # type: ignore[index]


SAME_VERBS = {"roce": "infiniband"}
"""Networks that a library drives by the verbs of another one, so that its protocols cost the same."""


def _network_lookup(table: Mapping[str, Constants], name: str) -> tuple[Constants, str]:
    if name in table:
        return table[name], ""
    if SAME_VERBS.get(name) in table:
        return table[SAME_VERBS[name]], SAME_VERBS[name]
    known = f"all networks ({', '.join(sorted(table))}), as none is called {name!r}"
    return mean([table[key] for key in sorted(table)]), known if name else ""


def lookup(table: Mapping[str, Constants], chip: Chip) -> tuple[Constants, str]:
    """The constants of `chip` and where they come from: "" (its own), its generation, or "all chips"."""
    if chip.name in table:
        return table[chip.name], ""
    family = [name for name in sorted(table) if _generation(name) == chip.generation]
    donors = family or sorted(table)
    source = chip.generation if family else ALL_CHIPS
    found: Any = mean([table[name] for name in donors])
    if isinstance(found, GemmEfficiency):
        if not family:
            found = replace(found, tile_s=found.tile_s / _ratio(chip, donors, _core_flop_per_s))
        if family:
            found = replace(found, throttle_frac=_throttle_frac(found, chip, donors))
        if family and chip.name in chips() and num_cores(chips()[chip.name]) <= LARGE_CORES:
            larger = _ratio(chip, donors, lambda one: one.cache_bytes / num_cores(one))
            found = replace(found, cache_speedup=found.cache_speedup * math.sqrt(larger))
    return found, f"{source} ({', '.join(donors)})"


ALL_CHIPS = "all chips"
"""Whose constants a chip inherits where no chip of its generation was measured."""

CLOCK_POWER = 1.0 / 3.0
"""Exponent of the clock over power, where voltage follows the clock (Horowitz, ISSCC 2014: P = C V^2 f)."""


def _throttle_frac(found: GemmEfficiency, chip: Chip, donors: Sequence[str]) -> float:
    """The share by which a kernel of `chip` slows per decade, of what its donors' watts sustain.

    A core of the donors slows to what its share of their watts sustains; a core of `chip` that computes less
    at its peak, or has more watts, slows less (GeForce halves the peak of one generation's cores).
    Without a statement of its watts, a core has those of the donors'.
    """
    slowest = 1.0 + THROTTLE_DECADES * found.throttle_frac
    slowest *= _ratio(chip, donors, _core_flop_per_s) / chip.flop_per_joule
    if chip.power_watts:
        watts = _ratio(chip, donors, lambda one: (one.power_watts or chip.power_watts) / num_cores(one))
        slowest /= watts**CLOCK_POWER
    return max(slowest - 1.0, 0.0) / THROTTLE_DECADES


THROTTLE_DECADES = 2.0
"""Decades of duration over which power slows a kernel."""

LARGE_CORES = 32
"""Cores up to which a chip is a few systolic arrays, fed from a scratchpad that software manages."""


def _ratio(chip: Chip, donors: Sequence[str], of: Callable[[Chip], float]) -> float:
    """What `chip` has more of than its `donors`, in the geometric mean."""
    ratios = [of(chip) / of(chips()[name]) for name in donors if name in chips()]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _core_flop_per_s(chip: Chip) -> float:
    """Peak of one core in the dtype that the chip trains in."""
    return chip.matrix_peak(chip.training_dtype) / num_cores(chip)


def on_pcie(levels: Sequence[Level]) -> bool:
    """Whether the chips of a node exchange over PCIe."""
    return bool(levels) and levels[0].box_link == "pcie"


def _box(levels: Sequence[Level], entry: Any = None) -> str:
    """The kind of box of `levels`, or of what was measured on them (`entry`): PCIe with or without peers."""
    if not on_pcie(levels):
        return ""
    alone = levels[0].name.endswith(WITHOUT_PEERS) if entry is None else entry.host_shared_frac < 0.5
    return f"pcie{WITHOUT_PEERS}" if alone else "pcie"


def _of_its_links(table: Mapping[str, Constants], levels: Sequence[Level]) -> Mapping[str, Constants]:
    """The constants of chips in the same kind of box: PCIe, or links that their maker builds for them."""
    box = _box(levels)
    alike = {name: entry for name, entry in table.items() if _box(chips()[name].levels, entry) == box}
    return alike or table


def constants(
    chip: Chip,
    levels: Sequence[Level] | None = None,
    *,
    tables: Mapping[str, Mapping[str, Any]] | None = None,
) -> Efficiency:
    """The efficiency of `chip` on links of `levels` (None: its usual ones), from the catalog or `tables`.

    `tables` are as `read` returns them. What the chip or its network lacks it inherits; `inherited_from`
    names the source of each class that it inherits. From a chip whose own rates were measured nothing is
    taken off.
    """
    if chip.vendor == MEASURED:
        return IDEAL
    links = tuple(chip.levels if levels is None else levels)
    return _known_constants(chip, links) if tables is None else _constants(chip, links, tables)


def without(keep: Callable[[str, str], bool], generation: str) -> dict[str, dict[str, Any]]:
    """The entries for `generation` that `keep(key, chip)` says; `constants` takes them as `tables`."""
    return {
        key: kept
        for key, table in _catalog(generation).items()
        if (kept := {chip: entry for chip, entry in table.items() if keep(key, chip)})
    }


@lru_cache(maxsize=1024)
def _known_constants(chip: Chip, levels: tuple[Level, ...]) -> Efficiency:
    return _constants(chip, levels, _catalog(chip.generation))


def _constants(chip: Chip, levels: tuple[Level, ...], tables: Mapping[str, Mapping[str, Any]]) -> Efficiency:
    found: dict[str, Any] = {}
    inherited: dict[str, str] = {}
    beyond = [level for level in levels[1:] if on_pcie([level])]
    boxes = {"inner.link": levels, "pcie.link": beyond}
    for key, table in [*tables.items(), *[("pcie.link", tables.get("inner.link", {}))] * bool(beyond)]:
        if key == "outer.link":
            found[key], origin = _network_lookup(table, network(levels))
        else:
            found[key], origin = lookup(_of_its_links(table, boxes[key]) if key in boxes else table, chip)
        if origin:
            inherited[key] = origin
    of_fp4, of_fp8 = (inherited.get(f"gemm.{dtype}", "") for dtype in ("fp4", "fp8"))
    wider, peaks = found.get("gemm.fp8"), chip.matrix_flop_per_s
    is_as_wide = not of_fp8.startswith(ALL_CHIPS) or peaks.get("fp4") == peaks.get("fp8")
    if wider and "fp4" in peaks and of_fp4.startswith(ALL_CHIPS) and is_as_wide:
        shares = {"peak_frac": wider.peak_frac, "throttle_frac": wider.throttle_frac}
        found["gemm.fp4"] = replace(found["gemm.fp4"], **shares)
        inherited["gemm.fp4"] = f"{of_fp4}, shares of the peak of {of_fp8 or chip.name} in fp8"

    variants: dict[str, Any] = {
        field: {key[len(name) + 1 :]: entry for key, entry in found.items() if key.startswith(f"{name}.")}
        for field, name in _BY_VARIANT.items()
    }
    single = {field: found[key] for field, key in _SINGLE.items() if key in found}
    return Efficiency(**variants, **single, inherited_from=inherited)


LINK_CONSTANTS = ("inner.link", "pcie.link", "outer.link")
_BY_VARIANT = {"gemms": "gemm", "casts": "cast", "experts": "experts", "dispatches": "dispatch"}
_SINGLE = {
    **{"attention": "attention.flash", "decode": "decode.flash", "latent_decode": "decode.mla"},
    **{"peer": "peer.all_reduce", "memory": "memory.kernel", "inner": "inner.link", "outer": "outer.link"},
    "pcie": "pcie.link",
}
"""Fields of `Efficiency` by the tables of the catalog: all variants of a class, or one."""

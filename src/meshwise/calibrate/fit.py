"""Fits the constants of `efficiency` to measured ops, and says how well they predict rows they never saw.

Two thirds of the rows fit, one third judges; which is which depends on a hash of the shape alone, so
that a shape measured with several libraries or chips is on one side. Each set of constants (one chip,
one class of op, one dtype) minimises

    mean of min(|log(predicted / measured)|, 0.4)  +  pull x sum of log(constant / start)^2 / rows

by the Nelder-Mead simplex: the cap keeps a few odd kernels from deciding, the pull keeps constants that
the rows do not determine at their start, which is the chip of the same generation (or else the chip)
with the most rows. Rows beyond the cap do not say where they would be met: a second search begins where
one without a cap ended, and the lower end counts. Rows shorter than 10 µs or 1 MiB weigh less: launches
are not the point. The same data give the same file.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.calibrate.microdata import BEST, Measurement, read
from meshwise.calibrate.ops import Array, batches, constants_name, links, predict_s
from meshwise.calibrate.table import BadRow
from meshwise.core.columns import grouped
from meshwise.core.each import tell
from meshwise.core.errors import DataError
from meshwise.core.extras import import_extra
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse
from meshwise.core.toml import catalog_toml
from meshwise.cost.experts import ACTIVATES_ALL
from meshwise.machine.efficiency import CLASSES, Efficiency, constants, lookup, on_pcie
from meshwise.machine.hardware import Chip, find_chip

CAP = 0.4
FLASH_TILE = 128.0
PULL = 0.05
MIN_ROWS = 25

BOXES = read_catalog("search_boxes.toml")
"""Constants by kind and where their search starts: (start, least, most)."""


# --- fitting -----------------------------------------------------------------------------------

Boxes = Mapping[str, Mapping[str, tuple[float, float, float]]]
"""What a search moves: constants by the key of their entry in the catalog (`gemm.bf16`)."""

Entries = dict[str, Any]
"""Entries of the catalog, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How a set of constants predicts the rows it never saw (of at least 10 µs, or 1 MiB)."""

    name: str
    chip: str
    rows: int
    held_out_rows: int
    median_abs_frac: float
    mean_abs_frac: float
    p90_abs_frac: float
    bias_frac: float
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FitReport:
    """The scores of the fitted tables, the rows that could not be used, the catalog as text, and what speaks
    against its constants, a sentence each."""

    scores: list[Score]
    problems: list[BadRow]
    toml: str
    unbounded: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """What `meshwise fit --json` prints of kernels and collectives."""
        unread = [asdict(problem) for problem in self.problems]
        scores = [asdict(score) for score in self.scores]
        return {"scores": scores, "unread": unread, "problems": self.unbounded}


_NOT_OF_THE_SHAPE = ("cast", "active", "local_topk", "moved_topk", "uneven")
"""What varies with the library and the routing: the same shape stays on one side all the same."""


def held_out(row: Measurement) -> bool:
    """Whether `row` judges (one third) or fits: by a hash of its shape."""
    shape = sorted((key, value) for key, value in row.shape.items() if key not in _NOT_OF_THE_SHAPE)
    text = ",".join(f"{key}={value:g}" for key, value in shape)
    return zlib.crc32(f"{row.op} {text}".encode()) % 3 == 0


_BY_SIZE = ("collective", "peer_all_reduce")


def counts_in_full(row: Measurement) -> bool:
    """Whether `row` is long enough to count in the scores: 10 µs, or 1 MiB of a collective."""
    return row.shape["bytes"] >= 2**20 if row.op in _BY_SIZE else row.seconds >= 10e-6


def minimise(loss: Callable[[Array], float], start: Array) -> Array:
    """The minimum of `loss` near `start` by the Nelder-Mead simplex, begun four times.

    Source: Nelder and Mead, The Computer Journal 7, 1965.
    """
    minimize = import_extra("scipy.optimize", "dev").minimize
    best = np.asarray(start, float)
    limits = {"maxiter": 401, "maxfev": np.inf, "fatol": 1e-7, "xatol": np.inf}
    for size in (0.4, -0.25, 0.4, -0.25):
        simplex = np.vstack([best, best + size * np.eye(len(best))])
        best = minimize(loss, best, method="Nelder-Mead", options=limits | {"initial_simplex": simplex}).x
    return best


def fit(
    rows: Sequence[Measurement],
    chip: Chip,
    boxes: Boxes,
    build: Callable[[Entries], Efficiency],
    start: Entries,
) -> Entries:
    """The entries that make `build(entries)` predict `rows` best.

    The search moves the constants of `boxes`, each within its limits, from those of `start`.
    """
    groups = batches(rows)
    weights = [np.array([1.0 if counts_in_full(row) else 0.3 for row in group.rows]) for group in groups]
    total = sum(weight.sum() for weight in weights)
    names = [(key, name) for key, box in boxes.items() for name in box]
    low, high = (np.log([boxes[key][name][side] for key, name in names]) for side in (1, 2))
    origin = np.clip(np.log([getattr(start[key], name) for key, name in names]), low, high)

    def entries(point: Array) -> Entries:
        values = dict(zip(names, np.exp(np.clip(point, low, high)).tolist(), strict=True))
        return {key: replace(start[key], **{name: values[key, name] for name in boxes[key]}) for key in boxes}

    def miss(efficiency: Efficiency, cap: float) -> float:
        logs = [np.abs(np.log(predict_s(group, chip, efficiency) / group.seconds)) for group in groups]
        return sum(float(w @ np.minimum(log, cap)) for w, log in zip(weights, logs, strict=True)) / total

    def loss(point: Array, cap: float = CAP) -> float:
        outside = float(np.abs(point - np.clip(point, low, high)).sum())
        pull = PULL * float(((point - origin) ** 2).sum()) / len(rows)
        return miss(build(entries(point)), cap) + pull + outside

    ends = minimise(loss, origin), minimise(loss, minimise(lambda point: loss(point, np.inf), origin))
    best = np.exp(np.clip(min(ends, key=loss), low, high))
    return entries(np.log([float(f"{value:.4g}") for value in best]))


def score(
    name: str, rows: Sequence[Measurement], chip: Chip, efficiency: Efficiency, *, label: str, few: bool
) -> Score:
    """How `efficiency` predicts the part of `rows` that judges; `few`: all of them, which also fitted it."""
    judged = [row for row in rows if (few or held_out(row)) and counts_in_full(row)]
    errors = [predict_s(group, chip, efficiency) / group.seconds - 1.0 for group in batches(judged)]
    frac = np.concatenate(errors) if errors else np.array([np.nan])
    return Score(
        name=name,
        chip=label,
        rows=len(rows),
        held_out_rows=0 if few else len(judged),
        median_abs_frac=float(np.median(np.abs(frac))),
        mean_abs_frac=float(np.mean(np.abs(frac))),
        p90_abs_frac=float(np.quantile(np.abs(frac), 0.9)),
        bias_frac=float(np.median(frac)),
        sources=tuple(sorted({row.source for row in rows})),
    )


@dataclass(slots=True)
class _Bench:
    """The rows at hand, and what has been fitted so far: tables as `machine.efficiency.read` returns them.

    `unbounded`: the constants that ended where their search ends, with no other chip to take them from.
    """

    rows: list[Measurement]
    tables: dict[str, dict[str, Any]]
    scores: list[Score]
    unbounded: list[str]

    def by_chip(self, keep: Callable[[Measurement], bool]) -> list[tuple[Chip, list[Measurement]]]:
        """The rows to keep, per chip; the chip with the most rows first."""
        chips = grouped(filter(keep, self.rows), lambda row: row.chip)
        ranked = sorted(chips.items(), key=lambda item: (-len(item[1]), item[0]))
        return [(find_chip(name), rows) for name, rows in ranked if len(rows) >= MIN_ROWS]

    def each(self, op: str) -> Iterator[tuple[str, Chip, list[Measurement]]]:
        """Name of the constants, chip and rows of `op`, by library and dtype."""
        for name in sorted({constants_name(row) for row in self.rows if row.op == op}):
            for chip, rows in self.by_chip(_named(op, name)):
                yield name, chip, rows

    def donor(self, key: str, chip: Chip) -> Any:
        """Where the search for `chip` starts: the first fitted chip of its generation, or of all; or None."""
        fitted = self.tables.get(key, {})
        of_chips = key != "outer.link"
        kin = [name for name in fitted if of_chips and find_chip(name).generation == chip.generation]
        return fitted[(kin or list(fitted))[0]] if fitted else None

    def fit(
        self, chip: Chip, rows: Sequence[Measurement], boxes: Boxes, bases: Entries | None = None,
        *, name: str = "", keep_as: str = "",
    ) -> Any:  # fmt: skip
        """Fit the entries of `boxes`, keep them with the score of the first, and return that one.

        A constant that ends where its search ends is not seen in the rows: it stays where the search starts,
        at that of a chip fitted before, and the others are fitted again. `bases` hold the constants that do
        not move. The entries are those of `chip`, or of the network `name`; `keep_as` is the first one's key,
        where it is kept under another than it is used.
        """
        key, name = next(iter(boxes)), name or chip.name
        few = len(rows) < MIN_ROWS
        levels = links(batches(rows)[0], chip)
        known = {
            other: table if other == "outer.link" else {chip.name: lookup(table, chip)[0]}
            for other, table in self.tables.items()
        }

        def build(entries: Entries) -> Efficiency:
            return constants(chip, levels, tables=known | {key: {name: entries[key]} for key in entries})

        training = rows if few else [row for row in rows if not held_out(row)]
        start = {key: self._start(key, chip, box, (bases or {}).get(key)) for key, box in boxes.items()}
        fitted = fit(training, chip, boxes, build, start)
        free = boxes
        while (unseen := _at_limit(fitted, free)) and self.donor(key, chip) is not None:
            free = {
                key: {constant: limits for constant, limits in box.items() if (key, constant) not in unseen}
                for key, box in free.items()
            }
            for each, constant in unseen:
                fitted[each] = replace(fitted[each], **{constant: getattr(start[each], constant)})
            fitted = fit(training, chip, free, build, fitted)
        self.unbounded += [f"{constant} of {each} on {name} ends at its limit" for each, constant in unseen]
        for each, entry in fitted.items():
            self.tables.setdefault(keep_as or each, {})[name] = entry
        self.scores.append(score(keep_as or key, rows, chip, build(fitted), label=name, few=few))
        tell(sum(one.rows for one in self.scores), len(self.rows))
        return fitted[key]

    def _start(self, key: str, chip: Chip, box: Mapping[str, tuple[float, float, float]], base: Any) -> Any:
        donor = self.donor(key, chip)
        values = {name: getattr(donor, name, None) or start for name, (start, _, _) in box.items()}
        return replace(base or CLASSES[key.partition(".")[0]](), **values)


def _at_limit(fitted: Entries, boxes: Boxes) -> list[tuple[str, str]]:
    """The constants that end where their search ends, unless at all of what the hardware has."""
    return [
        (key, name)
        for key, box in boxes.items()
        for name, (_, least, most) in box.items()
        if not least * 1.01 < getattr(fitted[key], name) < (np.inf if most == 1.0 else most / 1.01)
    ]


def _named(op: str, name: str) -> Callable[[Measurement], bool]:
    return lambda row: row.op == op and constants_name(row) == name


def fit_all(paths: Sequence[Path], *, checked: str) -> FitReport:
    """Fits every class of op to the measurements of `paths`.

    `checked` is the date that the catalog states. Bad rows are reported, good ones count.
    """
    found = [read(path) for path in paths]
    rows, bad = [row for good, _ in found for row in good], [row for _, others in found for row in others]
    refuse("rows of a fit", DataError, rows=rows, names=", ".join(map(str, paths)))
    bench = _Bench(rows, {}, [], [])
    for fit_class in (_fit_gemms, _fit_attention, _fit_links, _fit_libraries):
        fit_class(bench)
    text = to_toml(bench, checked=checked, data=[path.name for path in paths])
    return FitReport(bench.scores, bad, text, tuple(bench.unbounded))


def _fit_gemms(bench: _Bench) -> None:
    """bf16 first: its launch and memory bandwidth hold for streaming kernels, casts and other dtypes too."""
    for chip, rows in bench.by_chip(_plain_gemm("bf16")):
        gemm = bench.fit(chip, rows, {"gemm.bf16": BOXES["gemm"]}, {"gemm.bf16": CLASSES["gemm"](tiled=True)})
        streaming = CLASSES["memory"](launch_s=gemm.launch_s, memory_frac=gemm.memory_frac)
        bench.tables.setdefault("memory.kernel", {})[chip.name] = streaming
    for name in ("fp8", "fp4", "fp8-trtllm"):
        for chip, rows in bench.by_chip(_plain_gemm(name)):
            _fit_narrow_gemm(bench, name, chip, rows)
    best = (row for row in bench.rows if row.software == BEST)
    for row in sorted(best, key=lambda row: row.variant, reverse=True):  # fp8's own before bf16's ratio
        known = bench.tables.get(f"gemm.{row.variant}", {})
        if known and row.chip not in known:
            _fit_best_gemm(bench, row)


def _fit_best_gemm(bench: _Bench, row: Measurement) -> None:
    """A chip of which no more than its best matmul is known: what share of the peak it reaches.

    All else is what it inherits, and so is the ratio of this share to those of narrower dtypes.
    """
    chip, key = find_chip(row.chip), f"gemm.{row.variant}"
    inherited = lookup(bench.tables[key], chip)[0]
    fitted = bench.fit(chip, [row], {key: {"peak_frac": BOXES["gemm"]["peak_frac"]}}, {key: inherited})
    for dtype in ("fp8", "fp4") if row.variant == "bf16" else ():
        table = bench.tables.get(f"gemm.{dtype}")
        if table and chip.name not in table and dtype in chip.matrix_flop_per_s:
            narrow = lookup(table, chip)[0]
            reached_frac = narrow.peak_frac * fitted.peak_frac / inherited.peak_frac
            table[chip.name] = replace(narrow, peak_frac=reached_frac)


def _plain_gemm(name: str) -> Callable[[Measurement], bool]:
    plain = _named("gemm", name)
    return lambda row: plain(row) and row.shape["batch"] == 1 and row.software != BEST


def _fit_narrow_gemm(bench: _Bench, name: str, chip: Chip, rows: Sequence[Measurement]) -> None:
    """The matmuls of one dtype below bf16 and, where the rows include it, the cast of their left operand."""
    own = bench.tables["gemm.bf16"].get(chip.name, CLASSES["gemm"](launch_s=BOXES["gemm"]["launch_s"][0]))
    streaming = bench.tables["memory.kernel"].get(chip.name, CLASSES["memory"]())
    bases: Entries = {f"gemm.{name}": CLASSES["gemm"](tiled=True, launch_s=own.launch_s)}
    bases[f"cast.{name}"] = CLASSES["cast"](memory_frac=streaming.memory_frac)
    searched = {key: box for key, box in BOXES["gemm"].items() if key != "launch_s"}
    boxes: dict[str, Any] = {f"gemm.{name}": searched}
    if rows[0].shape["cast"]:
        boxes[f"cast.{name}"] = BOXES["cast"]
    bench.fit(chip, rows, boxes, bases)


_NATIVE_FLASH = {"ampere": "fa2", "hopper": "fa3"}
"""The FlashAttention that a generation runs by default; an older one has constants of its own."""


def _fit_attention(bench: _Bench) -> None:
    def native(row: Measurement) -> bool:
        return row.software in ("", _NATIVE_FLASH.get(find_chip(row.chip).generation))

    for chip, rows in bench.by_chip(lambda row: row.op == "attention" and native(row)):
        _fit_flash(bench, "flash", chip, rows)
    for chip, rows in bench.by_chip(lambda row: row.op == "attention" and not native(row)):
        _fit_flash(bench, rows[0].software, chip, rows)
    for name, chip, rows in bench.each("decode"):
        bench.fit(chip, rows, {f"decode.{name}": BOXES["decode"]})


def _fit_flash(bench: _Bench, name: str, chip: Chip, rows: Sequence[Measurement]) -> None:
    """A chip without rows of the backward keeps the backward of the chip where its search starts."""
    donor = bench.donor("attention.flash", chip)
    backward_frac = donor.backward_frac if donor else BOXES["backward"]["backward_frac"][0]
    base = CLASSES["attention"](tile=FLASH_TILE, backward_frac=backward_frac)
    box = BOXES["attention"] | (BOXES["backward"] if any(row.shape["passes"] > 1 for row in rows) else {})
    bench.fit(chip, rows, {"attention.flash": box}, {"attention.flash": base}, keep_as=f"attention.{name}")


_WITHOUT_SWITCH_SUMS = ("volta", "ampere", "ada")


def _fit_links(bench: _Bench) -> None:
    """Links of a node, then networks.

    Slingshot has a sweep over nodes; the other networks start there and move only what their few rows show.
    """
    link = BOXES["link"]
    for chip, rows in bench.by_chip(lambda row: row.op == "collective" and not row.software):
        can_add = chip.generation not in _WITHOUT_SWITCH_SUMS
        own = BOXES["host"] if on_pcie(chip.levels) else BOXES["switch"] if can_add else {}
        bench.fit(chip, rows, {"inner.link": link | BOXES["own_part"] | own})
    base = None
    for network, box in (
        ("slingshot", link | BOXES["slow_start"] | BOXES["tree"]),
        ("efa", {name: link[name] for name in ("launch_s", "quick_frac", "bulk_latency", "bulk_frac")}),
        ("infiniband", {"bulk_frac": link["bulk_frac"]}),
    ):
        if rows := [row for row in bench.rows if row.software == network]:
            rows = [row for row in rows if row.chip == rows[0].chip]
            chip, boxes = find_chip(rows[0].chip), {"outer.link": box}
            fitted = bench.fit(chip, rows, boxes, {"outer.link": base}, name=network)
            base = base or fitted


def _fit_libraries(bench: _Bench) -> None:
    """Experts per dtype and library: how its grouped matmuls differ from the plain ones, known by now.

    Exchanges of tokens per library and direction; and custom all-reduces, between the collectives of the
    library that they leave large tensors to.
    """
    for name, chip, rows in bench.each("experts"):
        box = BOXES["experts"] | (BOXES["activation"] if name in ACTIVATES_ALL else {})
        bench.fit(chip, rows, {f"experts.{name}": box})
    for name, chip, rows in bench.each("dispatch"):
        bench.fit(chip, rows, {f"dispatch.{name}": _dispatch_box(rows)})
    for chip, rows in bench.by_chip(lambda row: row.op == "peer_all_reduce"):
        bench.fit(chip, rows, {"peer.all_reduce": BOXES["peer"]})


def _dispatch_box(rows: Sequence[Measurement]) -> dict[str, tuple[float, float, float]]:
    """What the rows of a chip exercise of the constants of an exchange of tokens."""
    node_ranks, experts, cores = (
        {row.shape[name] for row in rows} for name in ("ranks_per_node", "experts", "cores")
    )
    cross = len({row.shape["ranks"] / row.shape["ranks_per_node"] for row in rows}) > 1
    seen = {"dispatch": True, "ranks": len(node_ranks) > 1, "local_experts": len(experts) > 2}
    seen |= {"nodes": cross, "cores": cross and cores != {0.0}}
    return {name: box for kind, is_seen in seen.items() if is_seen for name, box in BOXES[kind].items()}


# --- writing -----------------------------------------------------------------------------------


def to_toml(bench: _Bench, *, checked: str, data: Sequence[str]) -> str:
    """The catalog as text: one table per class, chip and variant, with its score and sources."""
    scores = {(score.name, score.chip): score for score in bench.scores}
    sections: dict[str, dict[str, Any]] = {"about": {"data": data, "checked": checked}}
    for key, table in bench.tables.items():
        name, _, variant = key.partition(".")
        for chip, entry in table.items():
            ideal = asdict(type(entry)())
            values = {field: one for field, one in asdict(entry).items() if one not in (None, ideal[field])}
            if found := scores.get((key, chip)):
                values |= {"fit": _rounded(found), "source": found.sources}
            sections[f"{name}.{chip}.{variant}"] = values
    return catalog_toml("efficiency.toml", sections)


def _rounded(score: Score) -> dict[str, float]:
    names = ("median_abs_frac", "mean_abs_frac", "bias_frac")
    counts = {"rows": score.rows, "held_out_rows": score.held_out_rows}
    return counts | {name: round(getattr(score, name), 4) for name in names}

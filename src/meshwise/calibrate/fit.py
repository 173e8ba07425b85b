"""Fits the constants of `efficiency` to measured ops, and says how well they predict rows they never saw.

Two thirds of the rows fit, one third judges; which is which depends on a hash of the shape alone, so
that a shape measured with several libraries or chips is on one side. Each set of constants (one chip,
one class of op, one dtype) minimises

    mean of min(|log(predicted / measured)|, 0.4)  +  pull x sum of log(constant / start)^2 / rows

by the Nelder-Mead simplex: the cap keeps a few odd kernels from deciding, the pull keeps constants that
the rows do not determine at their start, which is the chip of the same generation (or else the chip)
with the most rows. Rows shorter than 10 µs or 1 MiB weigh less: launches are not the point. The same
data give the same file.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshwise.calibrate.microdata import Measurement, Problem, read
from meshwise.calibrate.ops import Array, batches, constants_name, predict_s
from meshwise.core.files import write_text
from meshwise.machine.efficiency import (
    AttentionEfficiency,
    CastEfficiency,
    DecodeEfficiency,
    DispatchEfficiency,
    Efficiency,
    ExpertsEfficiency,
    GemmEfficiency,
    LinkEfficiency,
    MemoryEfficiency,
    PeerEfficiency,
    constants,
)
from meshwise.machine.hardware import Chip, find_chip

CAP = 0.4
FLASH_TILE = 128.0
PULL = 0.05
MIN_ROWS = 25

# Constants and where their search starts: (start, least, most).
GEMM = {
    "launch_s": (2e-6, 5e-7, 2e-5),
    "peak_frac": (0.85, 0.2, 1.1),
    "throttle_frac": (0.05, 1e-3, 0.4),
    "cache_speedup": (6.0, 2.0, 30.0),
    "memory_frac": (0.85, 0.4, 1.0),
    "tile_s": (1e-6, 1e-8, 1e-5),
    "split_s": (4e-6, 1e-7, 3e-5),
}
CAST = {"launch_s": (3e-6, 1e-7, 2e-5), "passes": (1.8, 0.5, 8.0), "row_s": (5e-7, 1e-9, 5e-6)}
ATTENTION = {
    "launch_s": (1e-5, 1e-7, 5e-5),
    "peak_frac": (0.75, 0.2, 1.1),
    "softmax_dim": (20.0, 1.0, 80.0),
    "tail": (0.5, 0.01, 2.0),
    "memory_frac": (0.5, 0.1, 1.0),
}
BACKWARD = {"backward_frac": (0.8, 0.3, 1.2)}
DECODE = {"launch_s": (1e-5, 1e-6, 5e-5), "memory_frac": (0.85, 0.3, 1.0), "peak_frac": (0.15, 0.01, 1.0)}
LINK = {
    "launch_s": (6e-6, 1e-6, 5e-5),
    "quick_latency": (0.3, 0.02, 5.0),
    "quick_frac": (0.35, 0.02, 1.0),
    "bulk_latency": (8.0, 0.1, 60.0),
    "bulk_frac": (0.8, 0.1, 1.0),
}
OWN_PART = {"own_part": (0.5, 0.01, 2.0), "all_to_all_own_part": (1.0, 0.01, 4.0)}
EXPERTS = {
    "launch_s": (1e-5, 1e-7, 1e-4),
    "peak_frac": (0.8, 0.1, 1.5),
    "memory_frac": (0.8, 0.1, 1.2),
    "passes": (1.0, 0.01, 30.0),
}
DISPATCH = {
    "launch_s": (1e-5, 1e-6, 1e-4),
    "token_s": (1e-5, 1e-9, 1e-4),
    "inner_frac": (0.6, 0.05, 1.0),
}
PEER = {
    "host_s": (2e-5, 1e-6, 2e-4),
    "launch_s": (3e-6, 1e-7, 3e-5),
    "wait_s": (1e-6, 1e-7, 2e-5),
    "link_frac": (0.6, 0.1, 1.0),
}
SWITCH = {"switch_frac": (0.6, 0.2, 1.0), "switch_latency": (80.0, 1.0, 300.0)}
TREE = {"tree_latency": (3.0, 0.2, 20.0)}


# --- fitting -----------------------------------------------------------------------------------


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
    worst: tuple[tuple[str, float], ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """The fitted tables, their scores, the rows that could not be used, and the catalog as text."""

    scores: list[Score]
    problems: list[Problem]
    toml: str


_NOT_OF_THE_SHAPE = ("cast", "active", "local_topk", "moved_topk")
"""What varies with the library and the routing: the same shape stays on one side all the same."""


def held_out(row: Measurement) -> bool:
    """Whether `row` judges (one third) or fits: by a hash of its shape."""
    shape = sorted((key, value) for key, value in row.shape.items() if key not in _NOT_OF_THE_SHAPE)
    text = ",".join(f"{key}={value:g}" for key, value in shape)
    return zlib.crc32(f"{row.op} {text}".encode()) % 3 == 0


def training_part(rows: Sequence[Measurement]) -> list[Measurement]:
    """The rows that fit."""
    return [row for row in rows if not held_out(row)]


_BY_SIZE = ("collective", "peer_all_reduce")


def counts_in_full(row: Measurement) -> bool:
    """Whether `row` is long enough to count in the scores: 10 µs, or 1 MiB of a collective."""
    return row.shape["bytes"] >= 2**20 if row.op in _BY_SIZE else row.seconds >= 10e-6


def minimise(loss: Callable[[Array], float], start: Array, *, rounds: int = 4, steps: int = 400) -> Array:
    """The minimum of `loss` near `start` by the Nelder-Mead simplex, restarted `rounds` times.

    Source: Nelder and Mead, The Computer Journal 7, 1965, with their coefficients.
    """
    best = np.asarray(start, float)
    for turn in range(rounds):
        size = 0.4 if turn % 2 == 0 else -0.25
        points = np.vstack([best, best + size * np.eye(len(best))])
        values = np.array([loss(point) for point in points])
        for _ in range(steps):
            order = np.argsort(values, kind="stable")
            points, values = points[order], values[order]
            if values[-1] - values[0] < 1e-7:
                break
            centre = points[:-1].mean(axis=0)
            for factor in _moves(loss, centre, points, values):
                points[-1], values[-1] = factor
                break
            else:
                points[1:] = points[0] + 0.5 * (points[1:] - points[0])
                values[1:] = [loss(point) for point in points[1:]]
        best = points[np.argmin(values)]
    return best


def _moves(
    loss: Callable[[Array], float], centre: Array, points: Array, values: Array
) -> list[tuple[Array, float]]:
    """The accepted move of the worst point (reflect, expand or contract), or none."""
    reflected = centre + (centre - points[-1])
    value = loss(reflected)
    if value < values[0]:
        expanded = centre + 2.0 * (centre - points[-1])
        further = loss(expanded)
        return [(expanded, further)] if further < value else [(reflected, value)]
    if value < values[-2]:
        return [(reflected, value)]
    contracted = centre + 0.5 * ((reflected if value < values[-1] else points[-1]) - centre)
    nearer = loss(contracted)
    return [(contracted, nearer)] if nearer < min(value, values[-1]) else []


Box = Mapping[str, tuple[float, float, float]]


def fit(
    training: Sequence[Measurement],
    chip: Chip,
    box: Box,
    build: Callable[[dict[str, float]], Efficiency],
    start: Mapping[str, float],
) -> dict[str, float]:
    """The constants of `box` that make `build(constants)` predict the rows of `training` best."""
    groups = batches(training)
    weights = [np.array([1.0 if counts_in_full(row) else 0.3 for row in group.rows]) for group in groups]
    total = sum(weight.sum() for weight in weights)
    low, high = (np.log([box[name][side] for name in box]) for side in (1, 2))
    origin = np.clip(np.log([start.get(name, box[name][0]) for name in box]), low, high)

    def values(point: Array) -> dict[str, float]:
        return dict(zip(box, np.exp(np.clip(point, low, high)).tolist(), strict=True))

    def loss(point: Array) -> float:
        efficiency = build(values(point))
        misses = sum(
            float(
                weight @ np.minimum(np.abs(np.log(predict_s(group, chip, efficiency) / group.seconds)), CAP)
            )
            for group, weight in zip(groups, weights, strict=True)
        )
        outside = float(np.abs(point - np.clip(point, low, high)).sum())
        return misses / total + PULL * float(((point - origin) ** 2).sum()) / len(training) + outside

    return {name: float(f"{value:.4g}") for name, value in values(minimise(loss, origin)).items()}


def score(
    name: str,
    rows: Sequence[Measurement],
    chip: Chip,
    efficiency: Efficiency,
    *,
    label: str = "",
    few: bool = False,
) -> Score:
    """How `efficiency` predicts the part of `rows` that judges; `few`: all of them, which also fitted it."""
    judged = [row for row in rows if (few or held_out(row)) and counts_in_full(row)]
    errors: list[tuple[float, Measurement]] = []
    for group in batches(judged):
        frac = predict_s(group, chip, efficiency) / group.seconds - 1.0
        errors += zip(frac.tolist(), group.rows, strict=True)
    frac = np.array([error for error, _ in errors]) if errors else np.array([np.nan])
    worst = sorted(errors, key=lambda item: (-abs(item[0]), item[1].where))[:3]
    return Score(
        name=name,
        chip=label or chip.name,
        rows=len(rows),
        held_out_rows=0 if few else len(judged),
        median_abs_frac=float(np.median(np.abs(frac))),
        mean_abs_frac=float(np.mean(np.abs(frac))),
        p90_abs_frac=float(np.quantile(np.abs(frac), 0.9)),
        bias_frac=float(np.median(frac)),
        worst=tuple((f"{row.where} {_describe(row)}", error) for error, row in worst),
        sources=tuple(sorted({row.source for row in rows})),
    )


def _describe(row: Measurement) -> str:
    return " ".join([row.variant, *(f"{key}={value:g}" for key, value in row.shape.items())])


@dataclass(slots=True)
class _Bench:
    """The rows at hand, and what has been fitted so far."""

    rows: list[Measurement]
    tables: dict[str, dict[str, Any]]
    scores: list[Score]

    def by_chip(self, keep: Callable[[Measurement], bool]) -> list[tuple[Chip, list[Measurement]]]:
        """The rows to keep, per chip; the chip with the most rows first."""
        chips: dict[str, list[Measurement]] = {}
        for row in self.rows:
            if keep(row):
                chips.setdefault(row.chip, []).append(row)
        ranked = sorted(chips.items(), key=lambda item: (-len(item[1]), item[0]))
        return [(find_chip(name), rows) for name, rows in ranked if len(rows) >= MIN_ROWS]

    def names(self, op: str) -> list[str]:
        """What the constants of `op` are called, in order."""
        return sorted({constants_name(row) for row in self.rows if row.op == op})

    def donor(self, key: str, chip: Chip) -> dict[str, float]:
        """Where the search for `chip` starts: at the first fitted chip of its generation, or of all."""
        fitted = self.tables.get(key, {})
        kin = [name for name in fitted if find_chip(name).generation == chip.generation]
        names = kin or list(fitted)
        return asdict(fitted[names[0]]) if names else {}

    def keep(
        self, key: str, chip: Chip, rows: Sequence[Measurement], efficiency: Efficiency, entry: Any
    ) -> None:
        """Stores the fitted `entry` of `key`, and the score of `efficiency`, which holds it."""
        self.tables.setdefault(key, {})[chip.name] = entry
        self.scores.append(score(key, rows, chip, efficiency))


def fit_all(paths: Sequence[Path], *, checked: str, write_to: Path | None = None) -> FitReport:
    """Fits every class of op to the measurements of `paths`; writes the catalog to `write_to` if given.

    `checked` is the date that the catalog states. Bad rows are reported, good ones count.
    """
    found = read(*paths)
    bench = _Bench(found.rows, {}, [])
    _fit_gemms(bench)
    _fit_attention(bench)
    _fit_links(bench)
    _fit_experts(bench)
    _fit_dispatches(bench)
    _fit_peers(bench)
    text = to_toml(bench, checked=checked, data=[path.name for path in paths])
    if write_to is not None:
        write_text(write_to, text)
    return FitReport(scores=bench.scores, problems=found.problems, toml=text)


def _fit_gemms(bench: _Bench) -> None:
    """bf16 first: its launch and memory bandwidth hold for streaming kernels, casts and other dtypes too."""
    for chip, rows in bench.by_chip(lambda row: row.op == "gemm" and constants_name(row) == "bf16"):
        gemm = _fit_gemm(bench, "bf16", chip, rows, GemmEfficiency(tiled=True))
        streaming = MemoryEfficiency(launch_s=gemm.launch_s, memory_frac=gemm.memory_frac)
        bench.tables.setdefault("memory.kernel", {})[chip.name] = streaming
    for name in ("fp8", "fp4", "fp8-trtllm"):
        for chip, rows in bench.by_chip(_is_gemm(name)):
            own = bench.tables["gemm.bf16"].get(chip.name, GemmEfficiency(launch_s=GEMM["launch_s"][0]))
            _fit_gemm(bench, name, chip, rows, GemmEfficiency(tiled=True, launch_s=own.launch_s))


def _is_gemm(name: str) -> Callable[[Measurement], bool]:
    return lambda row: row.op == "gemm" and row.shape["batch"] == 1 and constants_name(row) == name


def _fit_gemm(
    bench: _Bench, name: str, chip: Chip, rows: Sequence[Measurement], base: GemmEfficiency
) -> GemmEfficiency:
    """Fits the matmuls of one dtype and, where the rows include it, the cast of their left operand."""
    casts = {f"cast_{key}": value for key, value in CAST.items()} if rows[0].shape["cast"] else {}
    free = {key: value for key, value in GEMM.items() if not (key == "launch_s" and base.launch_s)}
    streaming = bench.tables.get("memory.kernel", {}).get(chip.name, MemoryEfficiency())

    def build(values: dict[str, float]) -> Efficiency:
        gemm = replace(base, **{key: values[key] for key in free})  # type: ignore[arg-type]
        cast = {key[5:]: values[key] for key in casts}
        return Efficiency(
            gemms={name: gemm}, casts={name: CastEfficiency(memory_frac=streaming.memory_frac, **cast)}
        )

    start = bench.donor(f"gemm.{name}", chip)
    start |= {f"cast_{key}": value for key, value in bench.donor(f"cast.{name}", chip).items()}
    fitted = build(fit(training_part(rows), chip, free | casts, build, start))
    bench.keep(f"gemm.{name}", chip, rows, fitted, fitted.gemm(name))
    if casts:
        bench.tables.setdefault(f"cast.{name}", {})[chip.name] = fitted.cast(name)
    return fitted.gemm(name)


_NATIVE_FLASH = {"ampere": "fa2", "hopper": "fa3"}
"""The FlashAttention that a generation runs by default; an older one has constants of its own."""


def _fit_attention(bench: _Bench) -> None:
    def native(row: Measurement) -> bool:
        return row.software in ("", _NATIVE_FLASH.get(find_chip(row.chip).generation))

    for chip, rows in bench.by_chip(lambda row: row.op == "attention" and native(row)):
        _fit_flash(bench, "attention.flash", chip, rows)
    for chip, rows in bench.by_chip(lambda row: row.op == "attention" and not native(row)):
        _fit_flash(bench, f"attention.{rows[0].software}", chip, rows)
    for name, build in (("flash", _decode_efficiency), ("mla", _latent_decode_efficiency)):
        for chip, rows in bench.by_chip(_is_decode(name)):
            fitted = build(fit(training_part(rows), chip, DECODE, build, bench.donor(f"decode.{name}", chip)))
            entry = fitted.latent_decode if name == "mla" else fitted.decode
            bench.keep(f"decode.{name}", chip, rows, fitted, entry)


def _is_decode(name: str) -> Callable[[Measurement], bool]:
    return lambda row: row.op == "decode" and row.variant == name


def _decode_efficiency(values: dict[str, float]) -> Efficiency:
    return Efficiency(decode=DecodeEfficiency(**values))


def _latent_decode_efficiency(values: dict[str, float]) -> Efficiency:
    return Efficiency(latent_decode=DecodeEfficiency(**values))


def _fit_flash(bench: _Bench, key: str, chip: Chip, rows: Sequence[Measurement]) -> None:
    """A chip without rows of the backward keeps the backward of the chip where its search starts."""
    start = bench.donor("attention.flash", chip)
    box = ATTENTION | (BACKWARD if any(row.shape["passes"] > 1 for row in rows) else {})
    backward_frac = start.get("backward_frac", BACKWARD["backward_frac"][0])
    base = AttentionEfficiency(tile=FLASH_TILE, backward_frac=backward_frac)

    def build(values: dict[str, float]) -> Efficiency:
        return Efficiency(attention=replace(base, **values))

    fitted = build(fit(training_part(rows), chip, box, build, start))
    bench.keep(key, chip, rows, fitted, fitted.attention)


_WITHOUT_SWITCH_SUMS = ("volta", "ampere", "ada")


def _fit_links(bench: _Bench) -> None:
    for chip, rows in bench.by_chip(lambda row: row.op == "collective" and not row.software):
        box = LINK | OWN_PART | ({} if chip.generation in _WITHOUT_SWITCH_SUMS else SWITCH)
        fitted = _inner(fit(training_part(rows), chip, box, _inner, bench.donor("inner.link", chip)))
        bench.keep("inner.link", chip, rows, fitted, fitted.inner)
    _fit_networks(bench)


def _fit_networks(bench: _Bench) -> None:
    """Slingshot has a sweep over nodes; the others start there and move only what their few rows show."""
    for network, box in (
        ("slingshot", LINK | TREE),
        ("efa", {key: LINK[key] for key in ("launch_s", "quick_frac", "bulk_latency", "bulk_frac")}),
        ("infiniband", {"bulk_frac": LINK["bulk_frac"]}),
    ):
        rows = [row for row in bench.rows if row.software == network]
        if not rows:
            continue
        chip = find_chip(rows[0].chip)
        rows = [row for row in rows if row.chip == chip.name]
        inner = bench.tables["inner.link"][chip.name]
        fitted = bench.tables.get("outer.link", {}).get("slingshot")
        base = fitted or LinkEfficiency()

        def build(
            values: dict[str, float], inner: LinkEfficiency = inner, base: LinkEfficiency = base
        ) -> Efficiency:
            return Efficiency(inner=inner, outer=replace(base, **values))

        start = asdict(fitted) if fitted else {"quick_latency": 1.2, "quick_frac": 0.1}
        few = len(rows) < MIN_ROWS
        efficiency = build(fit(rows if few else training_part(rows), chip, box, build, start))
        bench.tables.setdefault("outer.link", {})[network] = efficiency.outer
        bench.scores.append(score("outer.link", rows, chip, efficiency, label=network, few=few))


def _inner(values: dict[str, float]) -> Efficiency:
    return Efficiency(inner=LinkEfficiency(**values))


def _fit_experts(bench: _Bench) -> None:
    """Per dtype and library: how its grouped matmuls differ from the plain ones, which are known by now."""
    for name in bench.names("experts"):
        for chip, rows in bench.by_chip(_is("experts", name)):
            known = constants(chip, tables=bench.tables)

            def build(values: dict[str, float], known: Efficiency = known, name: str = name) -> Efficiency:
                return replace(known, experts={name: ExpertsEfficiency(**values)})

            key = f"experts.{name}"
            fitted = build(fit(training_part(rows), chip, EXPERTS, build, bench.donor(key, chip)))
            bench.keep(key, chip, rows, fitted, fitted.experts[name])


def _fit_dispatches(bench: _Bench) -> None:
    """Per library and direction; constants that the rows of a chip never exercise are left out."""
    for name in bench.names("dispatch"):
        for chip, rows in bench.by_chip(_is("dispatch", name)):

            def build(values: dict[str, float], name: str = name) -> Efficiency:
                return Efficiency(dispatches={name: DispatchEfficiency(**values)})

            key, box = f"dispatch.{name}", _dispatch_box(rows)
            fitted = build(fit(training_part(rows), chip, box, build, bench.donor(key, chip)))
            bench.keep(key, chip, rows, fitted, fitted.dispatches[name])


def _dispatch_box(rows: Sequence[Measurement]) -> dict[str, tuple[float, float, float]]:
    def values(name: str) -> set[float]:
        return {row.shape[name] for row in rows}

    box = dict(DISPATCH)
    if len(values("ranks_per_node")) > 1:
        box["rank_s"] = (1e-6, 1e-8, 1e-5)
    if len(values("experts")) > 2:
        box["expert_s"] = (1e-8, 1e-10, 1e-7)
    nodes = {row.shape["ranks"] / row.shape["ranks_per_node"] for row in rows}
    if len(nodes) > 1:
        box |= {"node_s": (1e-5, 1e-7, 1e-4), "outer_frac": (0.8, 0.1, 1.2)}
        if values("cores") != {0.0}:
            box |= {"crowded_frac": (0.5, 0.1, 1.0), "core_bytes_per_s": (1e10, 1e9, 1e11)}
    return box


def _fit_peers(bench: _Bench) -> None:
    """Custom all-reduces, between the collectives of the library that they leave large tensors to."""
    for chip, rows in bench.by_chip(lambda row: row.op == "peer_all_reduce"):
        known = constants(chip, tables=bench.tables)

        def build(values: dict[str, float], known: Efficiency = known) -> Efficiency:
            return replace(known, peer=PeerEfficiency(**values))

        key = "peer.all_reduce"
        fitted = build(fit(training_part(rows), chip, PEER, build, bench.donor(key, chip)))
        bench.keep(key, chip, rows, fitted, fitted.peer)


def _is(op: str, name: str) -> Callable[[Measurement], bool]:
    return lambda row: row.op == op and constants_name(row) == name


# --- writing -----------------------------------------------------------------------------------

_HEAD = """\
# Written by `meshwise fit`; do not edit. Constants of the formulas in `meshwise.cost`, described in
# `meshwise.machine.efficiency`. `fit`: rows of the class, and how the constants, fitted to two thirds of
# them, predict the others (at least 10 us, or 1 MiB): number, median and mean of |predicted/measured - 1|,
# and the median with its sign. With held_out_rows = 0 the rows were too few to spare any: the errors are of
# the fit itself. An entry without `fit` follows from another of the same chip (see `meshwise.calibrate.fit`).
"""


def to_toml(bench: _Bench, *, checked: str, data: Sequence[str]) -> str:
    """The catalog as text: one table per class, chip and variant, with its score and sources."""
    scores = {(score.name, score.chip): score for score in bench.scores}
    lines = [_HEAD, "[about]", f"data = {_toml(list(data))}", f'checked = "{checked}"']
    for key, table in bench.tables.items():
        name, _, variant = key.partition(".")
        for chip, entry in table.items():
            lines += ["", f"[{name}.{chip}.{variant}]"]
            for field, value in asdict(entry).items():
                if value is not None and value != getattr(type(entry)(), field):
                    lines.append(f"{field} = {_toml(value)}")
            if (key, chip) in scores:
                lines += _score_lines(scores[key, chip])
    return "\n".join(lines) + "\n"


def _score_lines(score: Score) -> list[str]:
    numbers = {
        "rows": score.rows,
        "held_out_rows": score.held_out_rows,
        "median_abs_frac": round(score.median_abs_frac, 4),
        "mean_abs_frac": round(score.mean_abs_frac, 4),
        "bias_frac": round(score.bias_frac, 4),
    }
    inside = ", ".join(f"{key} = {_toml(value)}" for key, value in numbers.items())
    return [f"fit = {{ {inside} }}", f"source = {_toml(list(score.sources))}"]


def _toml(value: float | bool | str | list[str]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""One picture of an estimate: where the step's time goes, what fills the memory, and the roofline.

Time and memory are *waterfalls*: each part starts where the one above it ends, so that they visibly add
up. Memory is drawn against the chip's capacity. The *roofline* shows the ops of one layer: arithmetic
intensity (FLOP per byte moved) to the right, achieved FLOP/s upward, both logarithmic. No op can be above
the slanted roof (intensity times memory bandwidth) or the flat one (the matrix peak); how far below them
it stays is what its kernel loses. The area of a mark is the time that the op takes in the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.ledger import Ledger
from meshwise.core.units import duration, with_prefix
from meshwise.estimate.single import Estimate
from meshwise.model.architecture import layer_counts
from meshwise.plan.plan import Plan
from meshwise.program.parts import layer_names
from meshwise.report.figure import check_format, new_figure, open_frame, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIME_COLORS = {
    **{"compute": "#4a8fc2", "memory": "#9ecae8", "host": "#c7b299"},
    **{"comm_tp": "#f0913a", "comm_cp": "#fdb777", "comm_ep": "#e0762a", "comm_dp": "#d9a441"},
    **{"comm_pp": "#fdd0a2", "bubble": "#c44e52", "optimizer": "#8172b2", "stragglers": "#e79a9a"},
}
MEMORY_COLORS = {
    **{"weights": "#4a8fc2", "gradients": "#9ecae8", "optimizer": "#8172b2"},
    **{"activations": "#4fa14a", "buffers": "#a8d8a0", "overhead": "#c7b299", "cache": "#dd8452"},
}
PHASES = {"forward": ("#4a8fc2", "o"), "backward": ("#4fa14a", "^")}
"""Color and mark of an op on the roofline."""
_OTHER, _SUM, _ROOF, _LIMIT = "#999999", "#555555", "#333333", "#d62728"
_NAMED_FRAC = 0.01
"""An op with at least this share of the layer's time is named on the roofline."""

Floats = NDArray[np.float64]


def draw_estimate(estimate: Estimate, path: str | Path) -> None:
    """Draw an `Estimate` to `path`: time, memory and roofline, in the format that its ending names.

    Raises DataError for another ending or a place that cannot be written, MissingExtraError without
    matplotlib.
    """
    path = Path(path)
    check_format(path)
    figure = new_figure(11, 9)
    figure.suptitle(_title(estimate), x=0.01, ha="left", fontsize=10.5)
    axes: dict[str, Axes] = figure.subplot_mosaic(
        [["time", "memory"], ["roofline", "roofline"]], height_ratios=[2, 3]
    )
    draw_time(axes["time"], estimate)
    draw_memory(axes["memory"], estimate)
    draw_roofline(axes["roofline"], estimate)
    save_figure(figure, path)


def draw_time(axes: Axes, estimate: Estimate) -> None:
    """Draw the parts of the step's time into matplotlib axes; they add up to the step."""
    _waterfall(axes, estimate.time_s, "step", TIME_COLORS, duration)
    axes.set_xlim(0, estimate.step_s)
    axes.set_title("time of a step", loc="left", fontsize=9.5)


def draw_memory(axes: Axes, estimate: Estimate) -> None:
    """Draw what fills the memory of the fullest rank into matplotlib axes, against the chip's capacity."""
    parts, capacity = dict(estimate.memory_bytes), estimate.cluster.chip.memory_bytes
    right = 1.06 * max(parts.pop("total"), capacity)
    _waterfall(axes, parts, "peak", MEMORY_COLORS, lambda value: with_prefix(value, "B"))
    axes.axvspan(capacity, right, color=_LIMIT, alpha=0.12, lw=0)
    axes.axvline(capacity, color=_LIMIT, lw=1.2)
    axes.set_xlim(0, right)
    axes.set_title(
        f"memory of the fullest rank; the chip has {with_prefix(capacity, 'B')} (red)",
        loc="left",
        fontsize=9.5,
    )


def draw_roofline(axes: Axes, estimate: Estimate) -> None:
    """Draw the roofs of the chip, and under them the ops of one layer, into matplotlib axes.

    Matrix ops crowd together under the flat roof; the corner that no op can reach shows them enlarged.
    """
    marks, roofs = _marks(estimate), _roofs(estimate)
    left, right = marks.intensity.min() / 2, 4 * max(marks.intensity.max(), roofs.ridge)
    axes.set(xscale="log", yscale="log", xlim=(left, right))
    axes.set_ylim(marks.achieved.min() / 3, 2 * roofs.highest)
    axes.set_xlabel("arithmetic intensity [FLOP / byte]", fontsize=8.5)
    axes.set_ylabel("achieved FLOP/s", fontsize=8.5)
    layer = "MoE layer" if "moe_layer" in marks.ops["module"][0] else "layer"
    axes.set_title(
        f"roofline: the ops of one {layer}, one microbatch, one rank; the area of a mark is its time",
        loc="left",
        fontsize=9.5,
    )
    _draw_ops(axes, marks, roofs)
    middle = (left * roofs.ridge) ** 0.5
    text, place = f"memory {with_prefix(roofs.memory_bytes_per_s, 'B/s')}", middle * roofs.memory_bytes_per_s
    _write(axes, text, (middle, place), (-8, 2), ha="right", color=_ROOF)
    legend: Any = axes.legend(frameon=False, fontsize=8, loc="upper left")
    for handle in legend.legend_handles:
        handle.set_sizes([30])

    named = _biggest(marks.ops)
    enlarged = [i for i in named if marks.intensity[i] > roofs.ridge / 4]
    if enlarged:
        inset = axes.inset_axes(_below_the_roof(axes, roofs))
        x, y = marks.intensity[enlarged], marks.achieved[enlarged]
        inset.set_xlim(max(x.min() - 0.15 * np.ptp(x) - 1, left), x.max() + 0.15 * np.ptp(x) + 1)
        inset.set_ylim(0.7 * y.min(), 1.12 * roofs.highest)
        inset.locator_params(nbins=6)
        _draw_ops(inset, marks, roofs)
        axes.indicate_inset_zoom(inset, edgecolor=_OTHER, alpha=0.6)
    figure: Any = axes.get_figure(root=True)
    figure.draw_without_rendering()  # arranges the axes, so that places in pixels are final
    insets: Sequence[Any] = axes.child_axes
    for inset in insets:
        _draw_names(inset, marks, enlarged)
    _draw_names(axes, marks, [i for i in named if i not in enlarged], keep_clear=insets)


def _below_the_roof(axes: Axes, roofs: _Roofs) -> tuple[float, float, float, float]:
    """Left, bottom, width, height, in shares of the axes, of the corner that no op can reach."""
    left, bottom = 0.46, 0.09
    x_low, x_high, y_low, y_high = np.log([*axes.get_xlim(), *axes.get_ylim()])
    roof = x_low + left * (x_high - x_low) + np.log(roofs.memory_bytes_per_s)
    return left, bottom, 0.995 - left, min((roof - y_low) / (y_high - y_low) - 0.09, 0.62) - bottom


@dataclass(frozen=True, slots=True, eq=False)
class _Roofs:
    """Rates that bound every op: matrix peaks by dtype, and memory."""

    peaks: dict[str, float]
    memory_bytes_per_s: float

    @property
    def highest(self) -> float:
        return max(self.peaks.values())

    @property
    def ridge(self) -> float:
        """The intensity from which memory no longer binds."""
        return self.highest / self.memory_bytes_per_s


@dataclass(frozen=True, slots=True, eq=False)
class _Marks:
    """The ops on a roofline: where each stands, and the radius of its mark in points."""

    ops: Ledger
    intensity: Floats
    achieved: Floats
    radius: Floats


def _roofs(estimate: Estimate) -> _Roofs:
    chip = estimate.cluster.chip
    peaks = {dtype: chip.matrix_peak(dtype) for dtype in estimate.machine.by_dtype}
    return _Roofs(peaks, chip.memory_bytes_per_s)


def _marks(estimate: Estimate) -> _Marks:
    ops = layer_ops(estimate)
    area = 8 + 900 * ops["time_s"] / ops["time_s"].sum()
    intensity = ops["flop"] / (ops["read_bytes"] + ops["write_bytes"])
    return _Marks(ops, intensity, ops["flop"] / ops["time_s"], np.sqrt(area) / 2)


def layer_ops(estimate: Estimate) -> Ledger:
    """The ops (not the collectives) of the kind of layer that the model has most of, one microbatch."""
    model, ledger = estimate.model, estimate.layer()
    numbers = layer_counts(model)
    names = dict(zip(numbers, layer_names(model), strict=True))
    kind = names[max(numbers, key=lambda layer: (numbers[layer], layer.moe, not layer.window))]
    of_kind = np.array([module.partition(".")[0] == kind for module in ledger["module"]])
    phases = list(PHASES) if estimate.trains else ["forward"]
    keep = of_kind & (ledger["flop"] > 0) & np.isin(ledger["phase"], phases)
    return Ledger({name: column[keep] for name, column in ledger.columns.items()})


def _title(estimate: Estimate) -> str:
    load, cluster, plan = estimate.workload, estimate.cluster, plan_words(estimate.plan)
    where = f"{estimate.model.name} on {cluster.num_chips} x {cluster.chip.name}"
    rate = f"{estimate.tokens_per_s / cluster.num_chips:,.1f} tokens/s per GPU"
    verdict = "memory fits" if estimate.fits else "memory DOES NOT FIT"
    return (
        f"{where}, batch {load.batch} x {load.seq}\n"
        f"{plan}{', ' if plan else ''}dp={int(estimate.mesh.dp)}\n"
        f"step {duration(estimate.step_s)}, {rate}, MFU {estimate.mfu:.1%}, HFU {estimate.hfu:.1%}, {verdict}"
    )


def plan_words(plan: Plan) -> str:
    """The keys of a plan that differ from the default, as on the command line; long lists are shortened."""
    usual = Plan()
    chosen = {field.name: getattr(plan, field.name) for field in fields(Plan) if field.name != "dp"}
    return ", ".join(f"{key}={_word(value)}" for key, value in chosen.items() if value != getattr(usual, key))


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(str, value if len(value) < 6 else (*value[:2], "…", value[-1])))
    return str(int(value) if isinstance(value, bool) else value)


def _waterfall(
    axes: Axes, parts: dict[str, float], sum_name: str, colors: dict[str, str], show: Callable[[float], str]
) -> None:
    """A row for each part that is there, from where the last one ended, and a row for their sum."""
    shown = {name: value for name, value in parts.items() if value > 0}
    ends = np.cumsum([*shown.values()])
    total, rows = float(ends[-1]), np.arange(len(shown) + 1)
    widths, starts = np.append([*shown.values()], total), np.append([0.0, *ends[:-1]], 0.0)
    axes.barh(rows, widths, 0.72, starts, color=[*(colors.get(name, _OTHER) for name in shown), _SUM])
    axes.vlines(ends[:-1], rows[:-2], rows[1:-1], color=_OTHER, lw=0.6, zorder=0.5)
    for row, width in zip(rows, widths, strict=True):
        for place, text in ((1.17, show(width)), (1.3, f"{width / total:.1%}")):
            beside = axes.get_yaxis_transform()
            axes.text(place, float(row), text, transform=beside, ha="right", va="center", fontsize=8)
    axes.set_yticks(rows, [*shown, sum_name], fontsize=8)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: show(value) if value else "0")
    axes.locator_params(axis="x", nbins=6)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(alpha=0.25, axis="x")
    axes.set_axisbelow(True)
    open_frame(axes)


def _draw_ops(axes: Axes, marks: _Marks, roofs: _Roofs) -> None:
    """Roofs and marks within the limits that the axes have."""
    left, right = axes.get_xlim()
    slope = np.array([min(left, roofs.ridge), roofs.ridge])
    axes.plot(slope, slope * roofs.memory_bytes_per_s, color=_ROOF, lw=1.2)
    for dtype, peak in roofs.peaks.items():
        corner = peak / roofs.memory_bytes_per_s
        axes.plot([corner, right], [peak, peak], color=_ROOF, lw=1.2)
        place, offset = ((corner, peak), (-8, -3)) if corner > 3 * left else ((right, peak), (-4, 3))
        _write(axes, f"{dtype} {with_prefix(peak, 'FLOP/s')}", place, offset, ha="right", color=_ROOF)
    for phase, (color, mark) in PHASES.items():
        mine = marks.ops["phase"] == phase
        if mine.any():
            axes.scatter(
                marks.intensity[mine],
                marks.achieved[mine],
                s=(2 * marks.radius[mine]) ** 2,
                c=color,
                marker=mark,
                alpha=0.75,
                lw=0,
                label=phase,
            )
    axes.set_xlim(left, right)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: with_prefix(value, ""))
    axes.tick_params(labelsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    open_frame(axes)


def _write(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **look: Any) -> Any:
    return axes.annotate(text, at, offset, textcoords="offset points", fontsize=8, **look)


def _biggest(ops: Ledger) -> list[int]:
    """The rows to name, longest first: one for each op and phase with a share worth naming."""
    rows: dict[tuple[str, str], int] = {}
    for i in np.argsort(-ops["time_s"], kind="stable"):
        if ops["time_s"][i] >= _NAMED_FRAC * ops["time_s"].sum():
            rows.setdefault((ops["op"][i], ops["phase"][i]), int(i))
    return list(rows.values())


def _draw_names(axes: Axes, marks: _Marks, rows: list[int], keep_clear: Sequence[Any] = ()) -> None:
    """Name the ops of `rows` beside their marks: each name at the nearest place that is free.

    Free means inside the axes, clear of the marks, roofs and texts, of the names before it and the lines
    that lead to them, and of the axes in `keep_clear`. A name that finds no such place is left out.
    """
    figure: Any = axes.get_figure(root=True)
    pixels = figure.dpi / 72
    center = axes.transData.transform(np.column_stack([marks.intensity, marks.achieved]))
    radius = marks.radius * pixels
    boxes = [np.column_stack([center - radius[:, None], center + radius[:, None]])]
    boxes += [np.atleast_2d(text.get_window_extent().extents) for text in axes.texts]
    boxes += [np.atleast_2d(other.get_tightbbox().extents) for other in keep_clear]
    for line in axes.get_lines():
        boxes.append(_line_boxes(*axes.transData.transform(line.get_xydata())))
    taken, names = np.concatenate(boxes), np.empty((0, 4))
    for i in rows:
        phase = marks.ops["phase"][i]
        name = marks.ops["op"][i] + (" bwd" if phase == "backward" else "")
        leader = {"arrowstyle": "-", "color": _OTHER, "lw": 0.5, "shrinkA": 0, "shrinkB": 0}
        look = {"ha": "center", "va": "center", "color": PHASES[phase][0], "arrowprops": leader}
        label = _write(axes, name, (marks.intensity[i], marks.achieved[i]), (0, 0), **look)
        label.set_in_layout(False)
        half = np.array(label.get_window_extent().size) / 2 + pixels
        for offset in _offsets(radius[i], half, pixels):
            place = center[i] + offset
            box, leading = np.hstack([place - half, place + half])[None], _line_boxes(center[i], place)
            inside = (place - half >= axes.bbox.min).all() and (place + half <= axes.bbox.max).all()
            if inside and not (_touch(box, taken) or _touch(box, names) or _touch(leading, names)):
                label.set_position(tuple(offset / pixels))
                names = np.vstack([names, box, leading])
                break
        else:
            label.remove()


def _offsets(radius: float, half: Floats, pixels: float) -> Iterator[Floats]:
    """Where a name of half size `half` may stand around a mark, near places first, below before above."""
    for distance in np.arange(3, 110, 4) * pixels:
        for angle in np.radians([-45, -90, -135, -20, -160, 0, 180, -65, -115, 45, 135, 90]):
            way = np.array([np.cos(angle), np.sin(angle)])
            yield way * (radius + distance + half * np.abs(way))


def _line_boxes(start: Floats, end: Floats) -> Floats:
    """A line as boxes without extent (left, bottom, right, top) along it."""
    along = start + np.linspace(0, 1, 200)[:, None] * (end - start)
    return np.column_stack([along, along])


def _touch(some: Floats, others: Floats) -> bool:
    """Whether any box of `some` overlaps any of `others`, rows of (left, bottom, right, top)."""
    return bool(((some[:, None, :2] < others[:, 2:]) & (some[:, None, 2:] > others[:, :2])).all(axis=2).any())

"""How every picture begins and ends: matplotlib imported late, and a file written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwise.core.errors import DataError, MissingExtraError
from meshwise.core.files import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 160


def check_format(path: Path, *, also: tuple[str, ...] = ()) -> None:
    """Raise DataError unless `path` ends in a format we draw (or in one of `also`)."""
    if path.suffix.lower() not in (*FORMATS, *also):
        raise DataError(f"cannot draw {path}: its name must end in {', '.join((*FORMATS, *also))}")


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """An empty figure that arranges its own axes; MissingExtraError without matplotlib.

    It belongs to no window, so drawing never opens one and never changes the caller's backend.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError('matplotlib is not installed; run: pip install "meshwise[plot]"') from None
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write `figure` in the format that the ending of `path` names; DataError where that cannot be."""
    check_format(path)
    with whole_file(path) as file:
        figure.savefig(file, format=path.suffix.lower().removeprefix("."), dpi=DOTS_PER_INCH)


def open_frame(axes: Axes) -> None:
    """Leave out the lines above and to the right of the axes."""
    axes.spines[["top", "right"]].set_visible(False)

"""A study of machines as a picture: their speed, and what a token costs on them."""

from __future__ import annotations

from meshwise.report.chart import (
    COLORS,
    FRONT_COLOR,
    OTHER_COLOR,
    Bars,
    Chart,
    ChartAxis,
    Mark,
    Names,
    Picture,
    Series,
)
from meshwise.search.study import Study


def study_picture(study: Study) -> Picture:
    """Machines by their speed, and by what a token costs on them."""
    found = [(point, point.measures()) for point in study.points if point.best is not None]
    names = [", ".join(f"{key} {value}" for key, value in point.changes.items()) for point, _ in found]
    chips = [values["num_chips"] for _, values in found]
    tokens_per_s = [1.0 / values["s_per_token"] for _, values in found]
    if len(set(chips)) == len(chips) > 1:
        ideal = [tokens_per_s[0] * num / chips[0] for num in chips]
        marks = [
            Series(chips, ideal, "in proportion to the GPUs", OTHER_COLOR, "dash"),
            Series(chips, tokens_per_s, "best plan", size=7),
        ]
        speed = Chart(
            "Speed",
            marks,
            ChartAxis("GPUs", log=True, numbers="count", ticks=chips),
            ChartAxis("tokens/s", log=True),
        )
    else:
        bars = Bars(names, tokens_per_s, [COLORS[0]] * len(names))
        speed = Chart("Speed", [bars], ChartAxis("tokens/s", low=0.0))
    front = {id(study.points[i]) for i in study.front("gpu_s_per_token")}
    hours = [1e6 / 3600 * values["gpu_s_per_token"] for _, values in found]
    colors = [FRONT_COLOR if id(point) in front else COLORS[0] for point, _ in found]
    dots: list[Mark] = [
        Series([x], [y], color=color, line="", size=7)
        for x, y, color in zip(tokens_per_s, hours, colors, strict=True)
    ]
    axes = ChartAxis("tokens/s", log=True), ChartAxis("GPU-hours a million tokens", low=0.0)
    cost = Chart(
        "Cost", [*dots, Names(tokens_per_s, hours, names, colors)], *axes,
        "Red: no other machine is both faster and cheaper.", height=360,
    )  # fmt: skip
    return Picture([[speed, cost]])

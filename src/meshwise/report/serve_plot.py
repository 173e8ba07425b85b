"""The trade-offs of a server: tokens/s that a user sees, against tokens/s of a GPU."""

from __future__ import annotations

from pathlib import Path

from meshwise.report.figure import check_format, new_figure, open_frame, save_figure
from meshwise.serve.size import Choice, Sizing

COLORS = ("#4a8fc2", "#dd8452", "#4fa14a", "#8172b2", "#c44e52", "#937860")


def draw_trade_offs(sizing: Sizing, path: str | Path) -> None:
    """Draw every choice by chip, those with pools of their own hollow, and the line that none is beyond."""
    path = Path(path)
    check_format(path)
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    groups: dict[tuple[str, bool], list[Choice]] = {}
    for choice in sizing.choices:
        pools = choice.fleet.prefill
        chips = dict.fromkeys(one.cluster.chip.name for one in (pools, choice.fleet.serving) if one)
        groups.setdefault((" + ".join(chips), pools is not None), []).append(choice)
    names = list(dict.fromkeys(name for name, _ in groups))
    for (name, apart), members in groups.items():
        color = COLORS[names.index(name) % len(COLORS)]
        axes.scatter(
            [1.0 / one.tpot_s for one in members], [one.tokens_per_s_per_gpu for one in members], s=8,
            edgecolors=color, facecolors="none" if apart else color,
            label=name + (", separate prefill" if apart else ""),
        )  # fmt: skip
    best = sizing.trade_offs
    axes.step(
        [1.0 / one.tpot_s for one in best], [one.tokens_per_s_per_gpu for one in best], where="pre",
        color="#333333", linewidth=1, zorder=3,
    )  # fmt: skip
    axes.set(xlabel="output tokens/s a user", ylabel="output tokens/s a GPU, of all GPUs", xscale="log")
    axes.set_ylim(bottom=0)
    open_frame(axes)
    if groups:
        figure.legend(frameon=False, fontsize=8, loc="outside upper left", ncols=2)
    save_figure(figure, path)

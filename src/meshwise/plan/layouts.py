"""Grids of tensor-parallel ranks: the one a layout takes by default, and whether a block can be cut by it."""

import math
from collections.abc import Iterator
from typing import Any

from meshwise.core.errors import PlanError
from meshwise.core.refusals import broken
from meshwise.model.architecture import Model
from meshwise.plan.plan import NARROW_DTYPES, Plan, Rule, grid_rules, rules_of


def default_grid(layout: str, ranks: int) -> tuple[int, ...]:
    """The grid of `ranks` ranks nearest to a square or a cube; PlanError where the layout has none."""
    if layout == "1d":
        return ()
    if layout in ("2d", "2d-cp"):
        rows = next(size for size in range(math.isqrt(ranks), 0, -1) if ranks % size == 0)
        return ranks // rows, rows
    if layout == "3d":
        side = round(ranks ** (1 / 3))
        if side**3 != ranks:
            raise PlanError(
                f"layout 3d is a cube, and {ranks} ranks are none; use {side**3} or {(side + 1) ** 3} ranks"
            )
        return side, side, side
    sides = [size for size in range(1, math.isqrt(ranks) + 1) if ranks % size**2 == 0]
    side = min(sides, key=lambda size: abs(math.log(size**3 / ranks)))
    return side, side, ranks // side**2


def layout_rules(model: Model, plan: Plan, seq: int) -> Iterator[Rule]:
    """Rules of a layout of several dimensions: of the plan, the model and `seq`."""
    yield from rules_of("layout", plan=plan, narrow=NARROW_DTYPES)
    grid = plan.grid or default_grid(plan.layout, plan.tp)
    yield from block_rules(model, plan.layout, grid, plan.tp, seq, plan.panels)


def parts_beyond(what: str, model: Model, **names: Any) -> Iterator[tuple[Any, str]]:
    """The parts of models that are unknown to `what` (`catalog/refusals.toml`): whether there, and a word."""
    kinds, fields = {*model.layers}, ("head_dim", "keys", "sides")
    parts = {layer.mixer for layer in kinds} | {
        name for name in fields if any(getattr(layer, name) for layer in kinds)
    }
    names |= {"model": model, "parts": parts}
    return ((holds, word.format(**names)) for holds, word in broken(f"parts beyond {what}", names))


def block_rules(
    model: Model, layout: str, grid: tuple[int, ...], ranks: int, seq: int, panels: int = 1
) -> Iterator[Rule]:
    """Where `layout` on `grid` lacks what a block of the model has, or does not divide it, or the ranks."""
    yield from grid_rules(layout, grid, ranks)
    name = ":".join(filter(None, (layout, "x".join(map(str, grid)))))
    for present, what in parts_beyond("a layout", model) if layout != "1d" else ():
        yield from rules_of("part of a layout", present=present, layout=name, what=what, model=model)
    for what, size, divisor in _divisions(model, layout, grid or (ranks,), seq, panels):
        names = {"layout": name, "what": what, "size": size, "divisor": divisor, "model": model}
        yield from rules_of("size in a layout", **names)


def _divisions(
    model: Model, layout: str, grid: tuple[int, ...], seq: int, panels: int
) -> list[tuple[str, int, int]]:
    """What is cut, its size, and by how much."""
    hidden, ffn = ("hidden width", model.hidden), ("ffn width", model.ffn_hidden)
    inner = ("width of all heads", model.num_heads * model.head_dim)
    heads = [("heads", model.num_heads), ("key-value heads", model.num_kv_heads)]
    tokens, halves = ("sequence", seq), 2 if model.causal else 1
    columns = grid[0]
    if layout in ("1d", "2d-cp"):
        rows = grid[1] if layout == "2d-cp" else 1
        across = (halves * rows if rows > 1 else 1, columns * rows)
        return [*((*what, columns) for what in (ffn, *heads)), *((*tokens, divisor) for divisor in across)]
    if layout == "3d":
        side = columns
        cuts = [(*what, side * side) for what in (hidden, ffn, inner)]
        cuts += [(*tokens, halves * side if side > 1 else 1), (*tokens, side * side)]
        return [*cuts, *((*what, side * side) for what in heads)]
    rows, depth = grid[1], grid[2] if layout == "2.5d" else 1
    steps = panels * math.lcm(columns, rows)
    cuts = [(*what, steps) for what in (hidden, ffn, inner)]
    cuts.append((*tokens, halves * rows * depth if rows * depth > 1 else 1))
    return [*cuts, *((*what, columns) for what in heads)]

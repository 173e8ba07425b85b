"""Two plans side by side: what differs first, term by term."""

from __future__ import annotations

from collections.abc import Callable

from meshwise.core.units import duration, with_prefix
from meshwise.estimate.one_plan import Estimate
from meshwise.report.answer import COLORS, Bars, Chart, ChartAxis, Page, Section, Text
from meshwise.report.estimate import plan_words
from meshwise.report.table import Table, pair_row

COLUMNS = ("", "A", "B", "B - A", "change")


def compare_page(left: Estimate, right: Estimate) -> Page:
    """Two plans side by side, term by term."""
    names = ("A: " + plan_words(left), "B: " + plan_words(right))
    if (left.plan, left.workload, left.model, left.cluster) == (
        right.plan, right.workload, right.model, right.cluster
    ):  # fmt: skip
        return Page("; ".join(names), "A and B are the same plan", [Text("A and B", names)], left.fits)
    change = right.step_s / left.step_s - 1
    totals = left.memory_bytes["total"], right.memory_bytes["total"]
    rows = [
        _both("step", left.step_s, right.step_s, duration),
        _both("tokens/s", left.tokens_per_s, right.tokens_per_s, lambda x: with_prefix(x, "")),
        _both("MFU", left.mfu, right.mfu, lambda x: f"{x:.1%}"),
        _both("memory", *totals, lambda x: with_prefix(x, "B")),
    ]
    differs = f"{abs(change):.1%} {'slower' if change > 0 else 'faster'} than A"
    headline = f"B takes {duration(right.step_s)} a step, {differs} ({duration(left.step_s)})"
    fits = {(True, True): "Both fit.", (False, False): "Neither fits."}
    fits |= {(True, False): "A fits, B does not.", (False, True): "B fits, A does not."}
    sections: list[Section] = [
        Text("A and B", [headline, fits[left.fits, right.fits], *names]),
        Table("B against A", COLUMNS, rows),
        _bars("Time of a step, A and B", left.time_s, right.time_s, "s"),
        _bars("Memory, A and B", left.memory_bytes, right.memory_bytes, "B"),
    ]
    return Page("; ".join(names), headline, sections, left.fits and right.fits)


def _both(name: str, a: float, b: float, show: Callable[[float], str]) -> tuple[str, ...]:
    return *pair_row(name, a, b, show), f"{b / a - 1:+.1%}" if a else ""


def _bars(title: str, left: dict[str, float], right: dict[str, float], unit: str) -> Chart:
    """The parts of A and B that differ most first; in the table as they are."""
    show = duration if unit == "s" else lambda value: with_prefix(value, "B")
    both = [(name, left[name], right[name]) for name in left if left[name] or right[name]]
    table = Table("", COLUMNS, [_both(*term, show) for term in both])
    terms = [term for term in both if term[0] != "total"]
    terms.sort(key=lambda term: -abs(term[2] - term[1]))
    names, *sides = zip(*terms, strict=True)
    bars = [
        Bars(names, values, [color] * len(terms), name=side)
        for side, values, color in zip("AB", sides, COLORS, strict=False)
    ]
    name, a, b = terms[0]
    finding = f"The largest difference is {name}: {show(a)} in A, {show(b)} in B."
    axis, height = ChartAxis("time" if unit == "s" else "memory", unit), 80 + 34 * len(terms)
    return Chart(title, bars, axis, finding=finding, table=table, height=height)

"""What is refused, and what is told: conditions on named values, each with the sentence for where it holds.

`catalog/refusals.toml` has a table of them for each thing that is checked. Values may be arrays over a grid;
their conditions are put together by & and | instead of by `and` and `or`. In a sentence `{x:in s}` is a time
as people write it, `{x:in B}` or `{x:in W, 3}` an amount with a prefix, of four or so many digits.
"""

import math
import string
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from meshwise.core.errors import MeshwiseError
from meshwise.core.expressions import Value, parsed
from meshwise.core.files import read_catalog
from meshwise.core.units import duration, with_prefix

_FUNCTIONS = {"bool": bool, "len": len, "inf": math.inf}


class _Sentence(string.Formatter):
    """Fills in the values of a sentence."""

    def format_field(self, value: Any, spec: str) -> str:
        if not spec.startswith("in "):
            return str(super().format_field(value, spec))
        unit, _, digits = spec.removeprefix("in ").partition(", ")
        return duration(value) if unit == "s" else with_prefix(value, unit, int(digits or 4))


_filled = _Sentence().vformat


@cache
def _catalog() -> dict[str, dict[str, str]]:
    return read_catalog("refusals.toml")


@cache
def _conditions(table: str) -> list[tuple[Value, str]]:
    return [(parsed(condition), sentence) for condition, sentence in _catalog().get(table, {}).items()]


def broken(table: str, names: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Whether each condition of a table holds (of a grid: where), and its sentence."""
    known = _FUNCTIONS | dict(names)
    for condition, sentence in _conditions(table):
        yield condition(known), sentence


def told(table: str, **names: Any) -> list[str]:
    """The sentences of all conditions of a table that hold."""
    return [_filled(sentence, (), names) for holds, sentence in broken(table, names) if holds]


def refuse(table: str, error: type[MeshwiseError], where: str = "", /, **names: Any) -> None:
    """Raise `error` with the sentence of the first condition of a table that holds, behind `where`."""
    for holds, sentence in broken(table, names):
        if holds:
            raise error(where + _filled(sentence, (), names))

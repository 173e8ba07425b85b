"""TOML: texts of users as tables, tables as the text of a file, fitted constants as that of a catalog.

The parser of Python takes memory and time with the square of the length of a dotted key or header, so a
text is bounded before it is parsed: in bytes, in the parts of a key, in depth and in the digits of a number.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from meshwise.core.errors import DataError, MeshwiseError
from meshwise.core.files import catalog_text, parse_text, read_text

Record = TypeVar("Record")

_TYPES: dict[str, type] = {"text": str, "count": int, "number": float, "switch": bool}

MOST_BYTES = 2**16
"""Clusters, plans, models and options have a few thousand bytes."""
MOST_DEPTH = 8
"""Parts of a dotted key or header, and tables and lists within each other."""
_QUOTED = re.compile(
    r'''"""(?:\\.?|[^\\])*?(?:"{3,5}|\Z)|\'{3}.*?(?:\'{3,5}|\Z)|"(?:\\.?|[^"\\\n])*+"?|'[^'\n]*+'?|#[^\n]*+''',
    re.DOTALL,
)
"""A string, ended or not, or a comment."""
_TOO_LONG = {
    rf"(?:\.[ \t]*+[\w-]++[ \t]*+){{{MOST_DEPTH}}}": f"a dotted key has more than {MOST_DEPTH} parts",
    r"\b0[box]\w{65}": "a number has more than 64 digits",
}


def read_toml(
    path: Path, error: type[MeshwiseError] = DataError, most_bytes: int = MOST_BYTES
) -> dict[str, Any]:
    """The tables of a user's TOML file; `error` says what is wrong with it."""
    return parse_toml(read_text(path, "TOML", error, most_bytes), repr(str(path)), error, most_bytes)


def check_fields(
    stated: Iterable[str],
    known: Sequence[str],
    needed: Iterable[str],
    at: str,
    error: type[MeshwiseError] = DataError,
) -> None:
    """`error` names all `stated` fields that are not `known`, or all `needed` ones that are missing."""
    stated = set(stated)
    if unknown := sorted(stated.difference(known)):
        raise error(f"{at}: {', '.join(unknown)} unknown; the fields are {', '.join(known)}")
    if missing := [name for name in needed if name not in stated]:
        raise error(f"{at}: {', '.join(missing)} missing; state {'all' if missing[1:] else 'it'}")


def converted(table: Mapping[str, Any], kind: type[Record], at: str, error: type[MeshwiseError]) -> Record:
    """`table` as a record of `kind`, or `error` that says what of it is wrong."""
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as problem:
        raise error(f"{at}: {problem}") from None


def parse_toml(
    text: str, name: str, error: type[MeshwiseError] = DataError, most_bytes: int = MOST_BYTES
) -> dict[str, Any]:
    """The tables of a user's TOML text that is called `name`; `error` says what is wrong with it."""

    def parse(text: str) -> dict[str, Any]:
        _check_bounds(text, most_bytes)
        return tomllib.loads(text)

    return parse_text(text, name, "TOML", parse, error)


def _check_bounds(text: str, most_bytes: int) -> None:
    """ValueError where the text is longer or nested deeper than such a file can be meant."""
    if len(text) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    bare = _QUOTED.sub("_", text)
    for pattern, reason in _TOO_LONG.items():
        if re.search(pattern, bare):
            raise ValueError(reason)
    depth = 0
    for bracket in re.findall(r"[][{}]", bare):
        depth += 1 if bracket in "[{" else -1
        if depth > MOST_DEPTH:
            raise ValueError("its brackets are nested too deeply")


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`, without what is None."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


def toml_text(tables: Iterable[tuple[str, Mapping[str, Any]]], digits: int | None = None) -> str:
    """Each table under its head (`[chip]`, `[[levels]]`; of the first perhaps none), floats to `digits`."""

    def block(head: str, table: Mapping[str, Any]) -> str:
        lines = (f"{key} = {_value(value, digits)}" for key, value in table.items())
        return "\n".join([*filter(None, [head]), *lines])

    return "\n\n".join(block(*one) for one in tables) + "\n"


def catalog_toml(name: str, sections: Mapping[str, Mapping[str, Any]]) -> str:
    """The file `name` of the catalog with other `sections`: its head, a table each, floats to four digits."""
    head, _, _ = catalog_text(name).partition("\n\n")
    tables = ((f"[{section}]", values) for section, values in sections.items())
    return f"{head}\n\n{toml_text(tables, 4)}"


def _value(value: Any, digits: int | None) -> str:
    """A text, number, list or table as TOML writes it inline."""
    if isinstance(value, float) and digits is not None:
        return f"{value:.{digits}g}"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item, digits)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item, digits) for item in value)}]"
    return msgspec.json.encode(value).decode()


def held_types(table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The types of a catalog's `table` by name: a `type`, its limits and its description (`msgspec.Meta`)."""
    limits = {name: {key: of[key] for key in of if key != "type"} for name, of in table.items()}
    return {name: Annotated[_TYPES[of["type"]], msgspec.Meta(**limits[name])] for name, of in table.items()}

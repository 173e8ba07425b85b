"""Fields that are checked when a value is made: one table says what each may hold.

A table of `Field` by name gives the checks, the text form, the help and the tables of the pages.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from meshwise.core.errors import MeshwiseError
from meshwise.core.units import values_by_key


@dataclass(frozen=True, slots=True)
class Field:
    """What a field may hold. `read` gives a value or its text in the field's type, or raises ValueError."""

    values: str
    read: Callable[[Any], Any]
    doc: str
    show: Callable[[Any], str] = str
    """The shortest text that `read` turns back into the value."""
    names: tuple[str, ...] = ()
    """All values as text, where there are only some."""


def whole(doc: str, least: int = 1, most: int | None = None) -> Field:
    """A whole number from `least` to `most`."""
    limits = f", {least} to 1e15" if most is None else f" from {least} to {most}"

    def read(value: Any) -> int:
        number = int(value)
        in_range = least <= number <= (10**15 if most is None else most)  # beyond, float64 loses units
        if isinstance(value, bool) or not in_range or (not isinstance(value, str) and number != value):
            raise ValueError
        return number

    return Field(f"a whole number{limits}", read, doc)


def number(doc: str, least: float, most: float | None = None) -> Field:
    """A finite number from `least` to `most`."""
    limits = f"of at least {least:g}" if most is None else f"from {least:g} to {most:g}"

    def read(value: Any) -> float:
        found = float(value)
        if isinstance(value, bool) or not least <= found <= (1e300 if most is None else most):
            raise ValueError
        return found

    def show(value: float) -> str:
        short = f"{value:g}"
        return short if float(short) == value else repr(value)

    return Field(f"a number {limits}", read, doc, show)


def switch(doc: str) -> Field:
    """On or off."""
    states = {"0": False, "1": True, "false": False, "true": True}
    return Field("0 or 1", lambda value: states[str(value).lower()], doc, lambda on: str(int(on)), ("0", "1"))


def choice(doc: str, names: Collection[str]) -> Field:
    """One of `names`."""
    by_name = {name: name for name in names}
    return Field(f"one of {', '.join(names)}", lambda value: by_name[str(value)], doc, names=tuple(names))


def sizes(doc: str, joined: str, least: int = 1, empty: str = "") -> Field:
    """Whole numbers of at least `least`, as text joined by `joined`; `empty` is the word for none."""
    one = whole(doc, least)

    def read(value: Any) -> tuple[int, ...]:
        parts = value if isinstance(value, list | tuple) else str(value).split(joined)
        return () if value == empty != "" else tuple(one.read(part) for part in parts)

    values = f"whole numbers of at least {least}, as in {joined.join('342')}" + (empty and f", or {empty}")
    return Field(values, read, doc, lambda parts: joined.join(map(str, parts)) or empty)


def order(doc: str, names: Sequence[str]) -> Field:
    """All of `names`, in any order, as text joined by `-`."""

    def read(value: Any) -> tuple[str, ...]:
        found = tuple(map(str, value if isinstance(value, list | tuple) else str(value).split("-")))
        if sorted(found) != sorted(names):
            raise ValueError
        return found

    return Field(f"{', '.join(names)} in some order, as in {'-'.join(names)}", read, doc, "-".join)


def several(doc: str, names: Sequence[str]) -> Field:
    """Some of `names`, each once, as text joined by `+`; kept in the order of `names`."""

    def read(value: Any) -> tuple[str, ...]:
        found = tuple(map(str, value if isinstance(value, list | tuple) else str(value).split("+")))
        if not found or not set(found) <= set(names):
            raise ValueError
        return tuple(name for name in names if name in found)

    return Field(f"some of {', '.join(names)}, as in {'+'.join(names[:2])}", read, doc, "+".join)


_ARGUMENTS = {"doc", "least", "most", "names", "joined", "empty"}
FIELDS: dict[str, Callable[..., Field]] = {
    kind.__name__: kind for kind in (whole, number, switch, choice, sizes, order, several)
}
"""The kinds of fields by name, as a catalog states them."""


def catalog_fields(
    tables: Mapping[str, Mapping[str, Any]], names: Mapping[str, Collection[str]]
) -> dict[str, Field]:
    """The fields that a catalog states: the kind of each, what that takes; `names` that it refers to."""
    found = {}
    for key, table in tables.items():
        stated = {name: table[name] for name in _ARGUMENTS & table.keys()}
        if "names_of" in table:
            stated["names"] = names[table["names_of"]]
        found[key] = FIELDS[table["kind"]](**stated)
    return found


def read_field(name: str, value: Any, table: Mapping[str, Field], error: type[MeshwiseError]) -> Any:
    """`value`, or what its text says, in the type of the field `name`; else `error`."""
    try:
        return table[name].read(value)
    except (ValueError, TypeError, LookupError, OverflowError):
        shown = str(value) if str(value).isprintable() else repr(value)
        raise error(f"{name}={shown} must be {table[name].values}") from None


def read_words(
    text: str, table: Mapping[str, Field], error: type[MeshwiseError], what: str
) -> dict[str, Any]:
    """The words `key=value` of `text`, a comma between two, as fields of `table`; else `error` of `what`."""
    found = {}
    for key, value in values_by_key(text, what, error).items():
        if key not in table:
            raise error(f"{what}: {key!r} is no setting; choose among {', '.join(table)}")
        found[key] = read_field(key, value, table, error)
    return found


def check_fields(made: Any, table: Mapping[str, Field], error: type[MeshwiseError]) -> None:
    """Bring every field of a frozen dataclass to its type; `error` names the first that cannot be.

    A field that has its default (None: not stated) is left as it is.
    """
    for field in fields(made):
        value = getattr(made, field.name)
        if value is not field.default:
            object.__setattr__(made, field.name, read_field(field.name, value, table, error))

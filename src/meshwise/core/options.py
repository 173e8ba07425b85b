"""The options of a verb, stated once: by the function that is the verb.

Its signature says how an option is called, of which type it is and what holds where it is left out; the
`Args:` of its docstring say what it means, and in which unit. The command line and its help, the defaults of
a file, the forms of the page and the reference are made from `options_of(function)`, and `help(function)`
shows the same.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from meshwise.core.errors import WorkloadError
from meshwise.core.units import quantity

REQUIRED = inspect.Parameter.empty
"""The default of an option that must be given."""


@dataclass(frozen=True, slots=True)
class Option:
    """One parameter of a verb. `is_word`: it stands behind the verb without its name.

    `kind` is the type of its value as it is typed, without None: str, int, float, bool, Path or a Literal, or
    a list of them. `reader` makes the value of the text where the type alone does not say how, and `bounds`
    are the whole numbers that it may be.
    """

    name: str
    kind: Any
    default: Any
    help: str
    is_word: bool = False
    reader: Callable[[str, str], Any] | None = None
    bounds: range | None = None


def whole_numbers(text: str, option: str) -> list[int]:
    """`1|2|4`, or with commas, as numbers; WorkloadError names the `option` that says something else."""
    words = [word.strip() for word in re.split("[|,]", text)] if text else []
    for word in words:
        if not word.isdecimal():
            raise WorkloadError(f"{option} {text}: {word!r} is no whole number; write for example 1|2|4")
    return [int(word) for word in words]


Quantity = Annotated[float, quantity]
"""A number that a person writes as 15T or 64MiB."""
Counts = Annotated[Sequence[int], whole_numbers]
"""Several whole numbers in one text."""


def options_of(verb: Callable[..., Any]) -> dict[str, Option]:
    """The options of a verb by name, in the order of its signature."""
    found: dict[str, Option] = {}
    meanings = _meanings(verb)
    for parameter in inspect.signature(verb).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        kind, notes = _kind(parameter.annotation, verb.__globals__)
        found[parameter.name] = Option(
            name=parameter.name,
            kind=kind,
            default=parameter.default,
            help=meanings.get(parameter.name, ""),
            is_word=not found and parameter.kind is not inspect.Parameter.KEYWORD_ONLY,
            reader=next((note for note in notes if callable(note)), None),
            bounds=next((note for note in notes if isinstance(note, range)), None),
        )
    return found


def summary_of(verb: Callable[..., Any]) -> str:
    """What a verb does: its docstring up to the sections."""
    return re.split(r"\n\n(?:Args|Returns|Raises):\n", inspect.getdoc(verb) or "")[0]


def _meanings(verb: Callable[..., Any]) -> dict[str, str]:
    """What the docstring of `verb` says of each parameter; "As in `other`." is what that other verb says."""
    _, _, section = (inspect.getdoc(verb) or "").partition("Args:\n")
    found: dict[str, str] = {}
    for item in re.split(r"\n    (?=\S)", "\n" + section.partition("\n\n")[0])[1:]:
        names, _, text = " ".join(item.split()).partition(": ")
        for name in names.split(", "):
            other = re.match(r"As in `(\w+)`[.;] ?", text)
            if other is None:
                found[name] = text
                continue
            of = _meanings(verb.__globals__[other[1]])
            found[name] = f"{of[name]} {text[other.end() :]}".strip()
    return found


def _kind(annotation: Any, names: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The type of a value as it is typed, and what annotates it; what no command line knows is a text."""
    if isinstance(annotation, str):
        try:
            stated = type("Stated", (), {"__annotations__": {"it": annotation}})
            annotation = get_type_hints(stated, names, include_extras=True)["it"]
        except NameError:  # a class of ours, imported when it is needed; it is named or described by a text
            return str, ()
    kinds = [kind for kind in _parts(annotation) if kind is not type(None)]
    for kind in kinds:
        if get_origin(kind) is Annotated:
            bare, *rest = get_args(kind)
            return (str if any(map(callable, rest)) else bare), tuple(rest)
    for kind in kinds:
        if isinstance(get_origin(kind), type) and get_origin(kind) is not UnionType:  # a sequence of them
            one, notes = _kind(get_args(kind)[0], names)
            return list[one], notes  # type: ignore[valid-type]
    return Path if Path in kinds else kinds[0], ()


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)

"""The options of a verb, stated once: by the function that is the verb.

Its signature says how an option is called, of which type it is and what holds where it is left out; the
`Args:` of its docstring say what it means, and in which unit. The command line and its help, the defaults of
a file, the forms of the page and the reference are made from `options_of(function)`, and `help(function)`
shows the same.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, wraps
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from meshwise.core.errors import WorkloadError
from meshwise.core.units import quantity, to_number

Function = TypeVar("Function", bound=Callable[..., Any])
REQUIRED = inspect.Parameter.empty
"""The default of an option that must be given."""


@dataclass(frozen=True, slots=True)
class Option:
    """One parameter of a verb. `is_word`: it stands behind the verb without its name.

    `kind` is the type of its value as it is typed, without None: str, int, float, bool, Path or a Literal, or
    a list of them. `reader` makes the value of the text where the type alone does not say how, and `bounds`
    are the whole numbers that it may be. `in_ms`: seconds that are typed as milliseconds. `types`: what each
    value is in Python, where no class of ours may stand for it.
    """

    name: str
    kind: Any
    default: Any
    help: str
    is_word: bool = False
    reader: Callable[[str, str], Any] | None = None
    bounds: range | None = None
    in_ms: bool = False
    types: tuple[type, ...] = ()

    @property
    def typed(self) -> str:
        """Its name as it is typed: a latency in seconds is typed in milliseconds."""
        return f"{self.name.removesuffix('_s')}_ms" if self.in_ms else self.name

    def of(self, value: Any) -> Any:
        """A value of the library, where a number may be a text and one stand for several."""
        found = self._of(value)
        if found is None and (self.default in (None, REQUIRED) or (self.types and self.default == "")):
            return None if self.default is REQUIRED else self.default
        many = found if self.default == () else [found]
        if Integral in self.types:
            many = [int(one) if isinstance(one, float) and one.is_integer() else one for one in many]
        for one in many:
            if self.types and not isinstance(one, self.types):
                words = dict.fromkeys(_SAID[of] for of in self.types)
                raise WorkloadError(f"{self.name}={one!r:.60} must be {' or '.join(words)}")
        return many if self.default == () else many[0]

    def _of(self, value: Any) -> Any:
        if isinstance(value, str) and self.reader is not None:
            found = self.reader(value, self.name)
            return found if self.reader is whole_numbers or self.default != () else (found,)
        if self.default == () and (isinstance(value, str | int | Path) or not isinstance(value, Iterable)):
            return (value,)
        if self.default == () and self.reader is not None:
            return [self.reader(one, self.name) if isinstance(one, str) else one for one in value]
        return tuple(value) if self.default == () else value

    def value(self, text: str, typed: str = "") -> Any:
        """The value that `text` spells; WorkloadError says what it must be, by the name that was `typed`."""
        typed = typed or self.typed
        if self.reader is not None:
            return self.reader(text, typed)
        if get_origin(self.kind) is Literal and text not in (known := get_args(self.kind)):
            raise WorkloadError(f"{self.typed}={text} must be one of {', '.join(filter(None, known))}")
        if self.kind is bool:
            if text not in ("yes", "no"):
                raise WorkloadError(f"{self.typed}={text} must be yes or no")
            return text == "yes"
        if self.kind not in (int, float):
            return text
        value = to_number(text, typed)
        if self.kind is float:
            return value / 1e3 if self.in_ms else value
        if not value.is_integer() or abs(value) > 1e15:  # beyond, float64 loses units
            raise WorkloadError(f"{typed}={text} must be a whole number, at most 1e15")
        number = int(value)  # a range looks for a float one by one
        if self.bounds is not None and number not in self.bounds:
            raise WorkloadError(f"{typed}={text} must be from {self.bounds[0]:,} to {self.bounds[-1]:,}")
        return number


def whole_numbers(text: str, option: str) -> list[int]:
    """`1,2,4`, or with bars, as numbers; WorkloadError names the `option` that says something else."""
    words = [word.strip() for word in re.split("[|,]", text)] if text else []
    for word in words:
        if not word.isdecimal():
            raise WorkloadError(f"{option} {text}: {word!r} is no whole number; write for example 1,2,4")
    return [int(word) for word in words]


def reads_texts(verb: Function) -> Function:
    """`verb` for who writes values as on the command line: a number as a text, one in place of several."""

    signature = inspect.signature(verb)

    @wraps(verb)
    def read(*args: Any, **asked: Any) -> Any:
        bound, of = signature.bind(*args, **asked), options_of(verb)
        bound.arguments |= {name: of[name].of(value) for name, value in bound.arguments.items() if name in of}
        return verb(*bound.args, **bound.kwargs)

    return read  # type: ignore[return-value]


Quantity = Annotated[float, quantity]
"""A number that a person writes as 15T or 64MiB."""
Counts = Annotated[Sequence[int], whole_numbers]
"""Several whole numbers in one text."""
Latency = Annotated[float, "ms"]
"""Seconds that a person types in milliseconds."""


def takes(
    *verbs: Callable[..., Any], without: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """Give a function that ends in `**asked` the options of `verbs`.

    Those that it fills in itself go `without`; `optional` may be left out.
    """

    def with_options(function: Function) -> Function:
        taken = {name: of for verb in verbs for name, of in options_of(verb).items() if name not in without}
        taken |= {name: replace(taken[name], default=None) for name in optional}
        function.taken = taken  # type: ignore[attr-defined]
        return function

    return with_options


def all_options(function: Callable[..., Any]) -> dict[str, Option]:
    """The options that a function takes and its own; what it states itself goes before the verbs' words."""
    taken = getattr(function, "taken", {})
    own = {name: option for name, option in options_of(function).items() if name != "context"}
    return taken | {
        name: option if option.help or name not in taken else replace(option, help=taken[name].help)
        for name, option in own.items()
    }


def options_in(asked: dict[str, Any], verb: Callable[..., Any]) -> dict[str, Any]:
    """The options of `verb` out of those that are `asked`; they are taken away."""
    return {name: asked.pop(name) for name in options_of(verb) if name in asked}


def stated_in(asked: Mapping[str, Any], function: Callable[..., Any]) -> list[str]:
    """Those of the options that are `asked` of a function that are not as they are by default."""
    of = all_options(function)
    return [name for name, value in asked.items() if value not in (None, (), of[name].default)]


@cache
def options_of(verb: Callable[..., Any]) -> Mapping[str, Option]:
    """The options of a verb by name, in the order of its signature."""
    found: dict[str, Option] = {}
    verb = inspect.unwrap(verb)
    meanings = _meanings(verb)
    for parameter in inspect.signature(verb).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        kind, notes, types = _kind(_kinds(parameter.annotation, verb.__globals__))
        found[parameter.name] = Option(
            name=parameter.name,
            kind=kind,
            default=parameter.default,
            help=meanings.get(parameter.name, ""),
            is_word=not found and parameter.kind is not inspect.Parameter.KEYWORD_ONLY,
            reader=next((note for note in notes if callable(note)), None),
            bounds=next((note for note in notes if isinstance(note, range)), None),
            in_ms="ms" in notes,
            types=types,
        )
    return MappingProxyType(found)


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
            of = _meanings(inspect.unwrap(verb.__globals__[other[1]]))
            found[name] = f"{of[name]} {text[other.end() :]}".strip()
    return found


_TYPES: dict[Any, type] = {int: Integral, float: Real, bool: bool, str: str, Path: PathLike}
_WORDS = ("a whole number", "a number", "True or False", "a text", "a path")
_SAID = dict(zip(_TYPES.values(), _WORDS, strict=True))


def _kinds(annotation: Any, names: dict[str, Any]) -> list[Any]:
    """The types that an annotation admits, None left out; none for a class of ours, imported when needed."""
    if isinstance(annotation, str):
        try:
            stated = type("Stated", (), {"__annotations__": {"it": annotation}})
            annotation = get_type_hints(stated, names, include_extras=True)["it"]
        except NameError:
            return []
    is_union = get_origin(annotation) in (Union, UnionType)
    return [kind for kind in get_args(annotation) if kind is not type(None)] if is_union else [annotation]


def _kind(kinds: Sequence[Any]) -> tuple[Any, tuple[Any, ...], tuple[type, ...]]:
    """The type of a value as it is typed, what annotates it, and its types in Python.

    What no command line knows is named or described by a text.
    """
    for kind in kinds:
        if get_origin(kind) is Annotated:
            bare, *rest = get_args(kind)
            return (str if any(map(callable, rest)) else bare), tuple(rest), _types([bare])
    for kind in kinds:
        if isinstance(get_origin(kind), type) and get_origin(kind) is not UnionType:  # a sequence of them
            one, notes, types = _kind(_kinds(get_args(kind)[0], {}))
            return list[one], notes, types * (len(kinds) == 1)  # type: ignore[valid-type]
    return (Path if Path in kinds else [*kinds, str][0]), (), _types(kinds)


def _types(kinds: Sequence[Any]) -> tuple[type, ...]:
    return tuple(_TYPES[kind] for kind in kinds) if all(kind in _TYPES for kind in kinds) else ()

"""What each framework calls the settings of a plan: the tables of `catalog/launch.toml`.

A table maps a fact (a key of the plan, or what follows from it: `facts.py`) to an argument that takes its
value, or to what is set for each value it may have. A value without an entry cannot be expressed. `ANY`
stands for all other values and `VALUE` for the value itself; an empty entry is what the framework does
unasked.
"""

from functools import cache
from typing import Any, NamedTuple

import msgspec

from meshwise.core.files import read_catalog
from meshwise.core.units import whole
from meshwise.machine.overheads import DEFAULT_SOFTWARE
from meshwise.plan.plan import KEYS

ANY, VALUE = object(), object()
_WORDS: dict[str, Any] = {"*": ANY, "unset": None, "true": True, "false": False}
_VALUES = {"*": VALUE, "unset": None}


class Wording(NamedTuple):
    """The arguments that say a value, or come nearest to it where it `differs` in something."""

    settings: dict[str, Any]
    differs: str = ""


Setting = dict[Any, Wording]
Table = dict[str, Setting]


class LaunchTables(msgspec.Struct, frozen=True):
    """The file: see its own head for what the sections hold."""

    covers: dict[str, tuple[str, ...]]
    accelerate_deepspeed: dict[str, str]
    slurm: dict[str, str]
    instead: dict[str, dict[str, str]]
    derived: dict[str, str]
    grid: dict[str, str]
    recovered: dict[str, str]
    served: dict[str, str]
    shape: dict[str, str]
    model: dict[str, str]
    facts: dict[str, dict[str, Any]]
    constants: dict[str, dict[str, Any]]
    outside: dict[str, dict[str, str]]
    decisive: tuple[str, ...]
    neutral: list[str]
    said: tuple[str, ...]
    counts: tuple[str, ...]
    forms: tuple[str, ...]
    costly: dict[str, str]
    other_model: str
    bridge_names: dict[str, str]
    commands: dict[str, str]
    across_nodes: dict[str, str]
    programs: dict[str, str]
    starters: dict[str, str]
    scripts: dict[str, str]
    model_elsewhere: dict[str, tuple[str, str]]
    tokenizers: dict[str, int]
    torchtitan_models: dict[str, tuple[str, str]]


OF_TRAINER = ("deepspeed", "accelerate")
"""Frameworks whose jobs take arguments of transformers' Trainer too, which need not be in their file."""


@cache
def launch_tables() -> LaunchTables:
    """The tables as they stand in the file."""
    return msgspec.convert(read_catalog("launch.toml"), LaunchTables)


@cache
def software_of(framework: str) -> str:
    """The generation of software that its runs of today are taken to have (`catalog/frameworks.toml`).

    Jobs of Accelerate and DeepSpeed are those of the Trainer of transformers.
    """
    framework = "transformers" if framework in OF_TRAINER else framework
    entries = read_catalog("frameworks.toml")["frameworks"]
    found = (one["software"] for one in entries if framework in one["names"] and "until" not in one)
    return next(found, DEFAULT_SOFTWARE)


@cache
def table_of(framework: str) -> Table:
    """The table of `framework`: its own entries over those of the table that it names under `like`."""
    entries = dict(launch_tables().facts[framework])
    base = table_of(entries.pop("like")) if "like" in entries else {}
    return base | {fact: _setting(fact, entry) for fact, entry in entries.items()}


@cache
def constants_of(framework: str) -> dict[str, Any]:
    """What is written whatever the plan is, unless the plan says another value; None undoes a value."""
    return _option(launch_tables().constants.get(framework, {})).settings


@cache
def covered(framework: str) -> set[str]:
    """The keys of a plan that the table of `framework` says, directly or by a fact that follows from them."""
    covers = launch_tables().covers
    return {key for fact in table_of(framework) for key in (fact, *covers.get(fact, ()))} | {"dp"}


def _setting(fact: str, entry: Any) -> Setting:
    """An entry as options by value: `"argument"`, `[neutral value, "argument"]`, or `{value = settings}`."""
    if isinstance(entry, str):
        return {ANY: Wording({entry: VALUE})}
    if isinstance(entry, list):
        neutral, argument = entry
        return {_value(fact, neutral): Wording({}), ANY: Wording({argument: VALUE})}
    return {_value(fact, value): _option(settings) for value, settings in entry.items()}


def _option(settings: dict[str, Any]) -> Wording:
    written: dict[str, Any] = {name: _VALUES.get(str(value), value) for name, value in settings.items()}
    return Wording(written, written.pop("near", ""))


def _value(fact: str, text: str) -> Any:
    """A value of a fact from its text in the file."""
    if text in _WORDS:
        return _WORDS[text]
    if fact in KEYS:
        return KEYS[fact].read(text)
    number = whole(text)
    return text if number is None else number

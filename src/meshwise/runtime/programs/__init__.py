"""The programs that meshwise can price, dry-run and run: real torch programs with plain options.

A program is a module that can be imported without torch and has

    Options                     a frozen dataclass (`program_options`), whose fields become options of the
                                command line
    check(options, ranks)       raises a MeshwiseError for what does not fit, before anything starts
    main(options, context)      runs on every rank (imports torch inside); may return JSON values
    estimate(options, tape)     writes the closed form of the same program on a tape
    STATES                      optional: what that closed form states, `all` (see `Program`)
    SAYS_RESULT                 optional: True if it prints what `main` returns itself

`PROGRAMS` names them; a module is imported when its program is asked for.
"""

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal, NoReturn

import msgspec

from meshwise.core.errors import PlanError, WorkloadError, did_you_mean
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse

PROGRAMS = ("ulysses", "model-2d", "train", "tensor-parallel", "eval-lm", "generate", "rl")
"""Each is a module of this folder, with `_` for `-`."""
MOST_RANKS = 1 << 24
"""A mesh lists its ranks one by one."""
_MOST = 1 << 53

_TABLES = read_catalog("program_options.toml")


@dataclass(frozen=True, slots=True)
class Program:
    """A program's name and the functions of its module.

    What its closed form `states`: `all`; `work`, the ops of a layout, which name matmuls, collectives and
    what is kept, but not every copy in between; `totals` of matmuls, attention, collectives and states.
    """

    name: str
    options: Any
    fits: Callable[[Any, int], None]
    main: Callable[[Any, Any], Any]
    estimate: Callable[..., None]
    doc: str
    states: str = "all"
    says_result: bool = False

    def check(self, options: Any, ranks: int) -> None:
        """MeshwiseError for options that do not fit a world of so many ranks."""
        refuse("program", PlanError, ranks=ranks, most=MOST_RANKS)
        try:
            self.fits(options, ranks)
        except MemoryError:
            raise PlanError("this machine's memory does not hold lists of these sizes") from None


def find_program(name: str) -> Program:
    """The program called `name`; PlanError names the ones there are."""
    if name not in PROGRAMS:
        raise PlanError(f"no program is called {name!r}; choose one of {', '.join(PROGRAMS)}")
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    doc = (module.__doc__ or "").split("\n\n")[0]
    states, says_result = getattr(module, "STATES", "all"), getattr(module, "SAYS_RESULT", False)
    functions = module.check, module.main, module.estimate
    return Program(name, module.Options, *functions, doc, states=states, says_result=says_result)


def program_options(module: str, *tables: str, **properties: property) -> Any:
    """The class `Options` of a `module`: the options of `tables` of the catalog, and what follows of them."""
    rows = {name: row for table in tables for name, row in _TABLES[table].items()}
    options = [(name, _type_of(row), field(default=row.get("default"))) for name, row in rows.items()]
    namespace = {"rows": rows, **properties}
    made = make_dataclass("Options", options, frozen=True, slots=True, kw_only=True, namespace=namespace)
    made.__module__ = module  # where pickle looks for it
    return made


def _type_of(row: Mapping[str, Any]) -> Any:
    """The type of an option, within its limits; one without a default may be None."""
    kind: Any = Literal[tuple(row["names"])] if "names" in row else _plain_type(row)
    limits: dict[str, Any] = {"ge": -_MOST, "le": _MOST} if kind is int else {}
    limits |= {name: row[name] for name in ("ge", "gt", "le") if name in row}
    kind = Annotated[kind, msgspec.Meta(**limits)] if limits else kind
    return kind if "default" in row else kind | None


def _plain_type(row: Mapping[str, Any]) -> type:
    return type(row["default"]) if "default" in row else {"int": int, "str": str}[row.get("type", "str")]


class _Words(argparse.ArgumentParser):
    """Reads the words of a program; what is wrong with them is a WorkloadError."""

    def error(self, message: str) -> NoReturn:
        raise WorkloadError(f"{self.prog}: {message.removeprefix('argument ')}")


def words_of(program: Program) -> argparse.ArgumentParser:
    """What reads words as options of `program` (`--seq 4096 --causal --dtype=bf16`), and explains them."""
    none: Any = argparse.SUPPRESS
    words = _Words(program.name, none, program.doc, add_help=False, allow_abbrev=False, argument_default=none)
    for name, row in program.options.rows.items():
        kind, default = _plain_type(row), row.get("default")
        shown = "" if default in (None, "", False) else f" [{default}]"
        how: dict[str, Any] = {"metavar": "|".join(row.get("names", ())) or kind.__name__}
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else how
        words.add_argument(_flag(name), help=f"{row['doc']}{shown}".replace("%", "%%"), **how)
    return words


def parse_options(program: Program, words: Sequence[str]) -> Any:
    """The options of `program` that `words` spell.

    WorkloadError names the option that is unknown, malformed, or out of its range.
    """
    values, others = words_of(program).parse_known_args(words)
    if others:
        flags = [_flag(known) for known in program.options.rows]
        hint = did_you_mean(others[0], flags, f"it has {', '.join(flags)}")
        raise WorkloadError(f"{program.name} has no option {others[0]}; {hint}")
    return make_options(program, vars(values))


def make_options(program: Program, values: Mapping[str, Any]) -> Any:
    """The options of `program` from `values` by field name, checked; texts are converted."""
    rows = program.options.rows
    if unknown := values.keys() - rows.keys():
        raise WorkloadError(f"{program.name} has no option {min(unknown)!r}")
    try:
        return msgspec.convert(dict(values), program.options, strict=False)
    except UnicodeEncodeError:
        raise WorkloadError(f"{program.name}: the value of an option is not text in UTF-8") from None
    except msgspec.ValidationError as error:
        text, _, place = str(error).replace("Expected", "expected").partition(" - at `$.")
        name = place.rstrip("`")
        if "names" in rows[name]:
            text = f"choose one of {', '.join(rows[name]['names'])}"
        raise WorkloadError(f"{program.name}: {_flag(name)} {values[name]}: {text}") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

"""The programs that meshwise can price, dry-run and run: real torch programs with plain options.

A program is a module that can be imported without torch and has

    Options                     a frozen dataclass; each field is `Annotated[type, Meta(description=...)]`
                                with a default, and becomes an option of the command line
    check(options, ranks)       raises a MeshwiseError for what does not fit, before anything starts
    main(options, context)      runs on every rank (imports torch inside); may return JSON values
    estimate(options, tape)     optional: writes the closed form of the same program on a tape
    STATES_TOTALS_ONLY          optional: True if it states matmuls, attention, collectives and weights,
                                gradients and moments alone, not where in the program they are
    STATES_WORK_ONLY            optional: True if that closed form is the ops of a layout (see `Program`)
    SAYS_RESULT                 optional: True if it prints what `main` returns itself

`PROGRAMS` names them; a module is imported when its program is asked for.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from meshwise.core.errors import PlanError, WorkloadError, did_you_mean

PROGRAMS = ("ulysses", "model-2d", "train", "tensor-parallel", "eval-lm", "generate", "rl")
"""Each is a module of this folder, with `_` for `-`."""
MOST_RANKS = 1 << 24
"""A mesh lists its ranks one by one."""
_MOST = 1 << 53

Dtype = Literal["bf16", "fp16", "fp32", "fp64"]
"""Element types that the programs compute in."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program's name and the functions of its module.

    `states_work_only` (STATES_WORK_ONLY of the module): its closed form is the ops of a layout, which name
    matmuls, collectives and what is kept, but not every copy in between. `states_totals_only`: it states
    matmuls, attention, collectives and states, without their modules.
    """

    name: str
    options: type
    fits: Callable[[Any, int], None]
    main: Callable[[Any, Any], Any]
    estimate: Callable[..., None]
    doc: str
    states_work_only: bool = False
    states_totals_only: bool = False
    says_result: bool = False

    def check(self, options: Any, ranks: int) -> None:
        """MeshwiseError for options that do not fit a world of so many ranks."""
        if not 1 <= ranks <= MOST_RANKS:
            raise PlanError(f"{ranks} ranks; a world has from 1 to {MOST_RANKS}")
        try:
            self.fits(options, ranks)
        except MemoryError:
            raise PlanError("this machine's memory does not hold lists of these sizes") from None


@dataclass(frozen=True, slots=True)
class OptionHelp:
    """One option of a program as its help prints it."""

    flag: str
    kind: str
    default: str
    doc: str


def find_program(name: str) -> Program:
    """The program called `name`; PlanError names the ones there are."""
    if name not in PROGRAMS:
        raise PlanError(f"no program is called {name!r}; choose one of {', '.join(PROGRAMS)}")
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    return Program(
        name=name,
        options=module.Options,
        fits=module.check,
        main=module.main,
        estimate=module.estimate,
        doc=(module.__doc__ or "").split("\n\n")[0],
        states_work_only=getattr(module, "STATES_WORK_ONLY", False),
        states_totals_only=getattr(module, "STATES_TOTALS_ONLY", False),
        says_result=getattr(module, "SAYS_RESULT", False),
    )


def parse_options(program: Program, words: Sequence[str]) -> Any:
    """The options of `program` that `words` spell: `--seq 4096 --causal --no-backward --dtype=bf16`.

    WorkloadError names the option that is unknown, malformed, or out of its range.
    """
    hints = get_type_hints(program.options, include_extras=True)
    kinds = {name: _bare(hint) for name, hint in hints.items()}
    values: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, has_value, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            raise WorkloadError(
                f"{program.name}: {word!r} is not an option; options are written --name value"
            )
        if name.startswith("no_") and kinds.get(name[3:]) is bool and not has_value:
            values[name[3:]] = False
        elif name not in kinds:
            flags = [_flag(known) for known in kinds]
            hint = did_you_mean(flag, flags, f"it has {', '.join(flags)}")
            raise WorkloadError(f"{program.name} has no option {flag}; {hint}")
        elif kinds[name] is bool and not has_value:
            values[name] = True
        elif not has_value and not rest:
            raise WorkloadError(f"{program.name}: option {flag} needs a value; write {flag} VALUE")
        else:
            values[name] = value if has_value else rest.pop(0)
    return make_options(program, values)


def make_options(program: Program, values: Mapping[str, Any]) -> Any:
    """The options of `program` from `values` by field name, checked; texts are converted."""
    for name, value in values.items():  # one at a time, so that the message names the option
        kind = get_type_hints(program.options, include_extras=True).get(name)
        if kind is None:
            raise WorkloadError(f"{program.name} has no option {name!r}")
        try:
            number = msgspec.convert(value, kind, strict=False)
        except msgspec.ValidationError as error:
            text = str(error).replace("Expected", "expected")
            if get_origin(_bare(kind)) is Literal:
                text = f"choose one of {', '.join(map(str, get_args(_bare(kind))))}"
            raise WorkloadError(f"{program.name}: {_flag(name)} {value}: {text}") from None
        except UnicodeEncodeError:
            raise WorkloadError(f"{program.name}: the value of {_flag(name)} is not text in UTF-8") from None
        if isinstance(number, int) and abs(number) > _MOST:
            raise WorkloadError(f"{program.name}: {_flag(name)} {value} is too large; the most is {_MOST}")
    return msgspec.convert(dict(values), program.options, strict=False)


def option_help(program: Program) -> list[OptionHelp]:
    """What the options of `program` are called, take, default to and mean."""
    hints = get_type_hints(program.options, include_extras=True)
    rows = []
    for field in fields(program.options):
        hint = hints[field.name]
        doc = next(
            (meta.description or "" for meta in hint.__metadata__ if isinstance(meta, msgspec.Meta)), ""
        )
        kind = _bare(hint)
        text = "|".join(map(str, get_args(kind))) or ("" if kind is bool else kind.__name__)
        default = "" if field.default is MISSING or field.default in (None, "", False) else str(field.default)
        rows.append(OptionHelp(_flag(field.name), text, default, doc))
    return rows


def _bare(hint: Any) -> Any:
    """The type under Annotated and Optional."""
    if get_origin(hint) is Annotated:
        return _bare(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return _bare(next(arg for arg in get_args(hint) if arg is not type(None)))
    return hint


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

"""A command of the command line, made from a function: its options are those that it takes and its own."""

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from meshwise.core.files import check_writable, read_catalog
from meshwise.core.options import REQUIRED, Option, all_options, summary_of

_TEXTS = read_catalog("options.toml")
_FILES = ("csv", "html", "plot", "trace")
"""Options that name a file for the answer: it can be made, before the work begins."""


def command_options(function: Callable[..., Any]) -> dict[str, Option]:
    """All options of a command by name, with what they mean."""
    texts, options = _TEXTS["help"], all_options(function)
    return {name: replace(of, help=of.help or texts.get(name, "")) for name, of in options.items()}


def as_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as typer takes it."""
    options = command_options(function)
    taken = inspect.signature(function).parameters.keys() & {"context"}

    def call(context: typer.Context, **values: Any) -> None:
        for name, others in _TEXTS["waits"].items():
            source = getattr(context.get_parameter_source(name), "name", "")
            if source == "DEFAULT_MAP" and not any(map(values.get, others)):
                values[name] = None
        for path in filter(None, map(values.get, _FILES)):
            check_writable(path)
        stated = {name: options[name].default if value is None and name in options else value
                  for name, value in values.items()}  # fmt: skip
        function(**stated, **dict.fromkeys(taken, context))

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, default=_default(option), annotation=_annotation(option))
        for name, option in options.items()
    ]
    parameters.append(inspect.Parameter("context", keyword, annotation=typer.Context))
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__doc__ = summary_of(function)
    call.options = options  # type: ignore[attr-defined]
    return call


def flags(option: Option) -> Sequence[str]:
    """How an option is written on the command line."""
    name = "--" + option.typed.replace("_", "-")
    can_be_off = option.default is True or (option.kind is bool and option.default is None)
    spelled = (f"{name}/--no-{name[2:]}" if can_be_off else name,)
    return _TEXTS["spelled"].get(option.name, spelled)


def _default(option: Option) -> Any:
    if option.default in (None, REQUIRED, ()):
        return REQUIRED if option.default is REQUIRED else None
    return option.default * 1e3 if option.in_ms else option.default


def _annotation(option: Option) -> Any:
    settings: dict[str, Any] = {"help": option.help}
    if option.reader is not None or option.kind in (int, float):
        settings["parser"] = lambda text: option.value(str(text), flags(option)[0])
        settings["metavar"] = {int: "INTEGER", float: "FLOAT"}.get(option.kind, "TEXT")
    kind = option.kind if option.default in (REQUIRED, True, False) else option.kind | None
    if option.is_word:
        return Annotated[kind, typer.Argument(**settings)]
    return Annotated[kind, typer.Option(*flags(option), **settings)]


# --- examples -------------------------------------------------------------------------------------

EXAMPLES: dict[str, list[str]] = read_catalog("examples.toml")


def epilog(name: str) -> str | None:
    """The examples of a command as the end of its help; of a group, one of each of its first two commands."""
    inside = [lines[0] for verb, lines in EXAMPLES.items() if verb.startswith(f"{name} ")]
    lines = EXAMPLES.get(name, inside[:2])
    return "\b\nExamples:\n" + "\n".join(map(_shown, lines)) if lines else None


def _shown(line: str) -> str:
    """One command, broken before options, as a shell reads it, where it is wider than a terminal."""
    together = re.sub(r"(--\S+) (?!-)", "\\1\N{NO-BREAK SPACE}", f"meshwise {line}")
    parts = textwrap.wrap(
        together, 75, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
    )
    return " \\\n".join(parts).replace("\N{NO-BREAK SPACE}", " ")

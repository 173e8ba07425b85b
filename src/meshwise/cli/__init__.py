"""The command line: `meshwise VERB ...`. Each command parses, calls one function, prints.

Exit codes: 0 done, 1 the answer is no, 2 wrong input (one sentence on stderr), 3 a missing extra or
device. Only typer is imported here; a command imports what it needs when it runs.
"""

import atexit
import codecs
import gc
import importlib
import os
import re
import resource
import sys
import traceback
from collections import UserDict
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from meshwise.cli.command import as_command, epilog
from meshwise.cli.defaults import read_defaults
from meshwise.core.errors import MeshwiseError
from meshwise.core.files import read_catalog


class Command(typer.core.TyperCommand):
    """A command that refuses an option given twice, of which it would use only the last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line into the parameters of the command."""
        *_, order = self.make_parser(ctx).parse_args(args=list(args))
        for param in self.params:
            if param.param_type_name == "option" and not param.multiple and order.count(param) > 1:
                raise MeshwiseError(f"{param.opts[0]} is given {order.count(param)} times; give it once")
        return super().parse_args(ctx, args)


@atexit.register
def _leave_garbage() -> None:
    """What the process leaves behind needs no search, unless triton is loaded, which complains of it."""
    if "triton" not in sys.modules:
        gc.freeze()


_VERBS = read_catalog("verbs.toml")
VERBS: dict[str, str] = _VERBS["modules"]
"""The module of each verb, and its function where that is not called so, in the order of the help."""
GROUPS, SETTINGS = _VERBS["groups"], _VERBS["settings"]


class Verbs(UserDict[str, Any]):
    """The commands by name; a verb's module is imported when the verb is asked for, or all of them listed."""

    def __getitem__(self, name: str) -> Any:
        return _command(name)


class VerbGroup(typer.core.TyperGroup):
    """The command `meshwise` itself, whose commands are `Verbs`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": Verbs(VERBS)})


@cache
def _command(verb: str) -> Any:
    """The command, or the group of commands, of a verb, with examples."""
    module, _, function = VERBS[verb].partition(":")
    function = "COMMANDS" if verb in GROUPS else function or verb.replace("-", "_")
    made = getattr(importlib.import_module(f"meshwise.cli.{module}"), function)
    part = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    if verb in GROUPS:
        group = typer.Typer(help=GROUPS[verb], epilog=epilog(verb), no_args_is_help=True)
        for one in made:
            name = one.__name__
            group.command(name, cls=Command, epilog=epilog(f"{verb} {name}"))(as_command(one))
        part.add_typer(group, name=verb)
    else:
        part.command(verb, cls=Command, epilog=epilog(verb), **SETTINGS.get(verb, {}))(as_command(made))
    return typer.main.get_group(part).commands[verb]


app = typer.Typer(
    name="meshwise",
    cls=VerbGroup,
    help="What a distributed transformer costs before it runs, and where prediction and run differ.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from meshwise import __version__

        print(f"meshwise {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(help="Default options of each verb, a TOML file [./meshwise.toml, for answers alone]."),
    ] = None,
) -> None:
    if not context.resilient_parsing:
        context.default_map = read_defaults(context.command, config)


_UsageError: Any = typer.BadParameter.__base__
MAX_SENTENCE = 2000
INTERRUPTED = 130
"""Exit code after SIGINT, as shells have it."""
leave_at_once = os._exit
"""For after an interrupt: Ray's threads sometimes crash while Python ends."""
LEAST_BYTES = 2**28
"""Of address space: with less, numpy ends the process when it is imported."""
_NO_MEMORY = re.compile("allocate memory|map segment|start new thread|temporarily unavailable")
_SPELLED = {"µ": "u", "…": ".", "▸": ">", "█": "#", "░": ".", "●": "o", "├": "|", "┤": "|", "─": "-"}
"""Characters of our tables that an encoding may lack."""


def _spell(error: UnicodeError) -> tuple[str, int]:
    """What is printed for characters that the encoding of the output lacks."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_SPELLED.get(character, "?") for character in lacking), error.end


codecs.register_error("spell", _spell)


def main() -> None:
    """Run the command line; a problem the user can act on is one sentence and an exit code."""
    try:
        if sys.stdout is None:
            raise MeshwiseError("stdout is closed; leave it open, or send it to /dev/null")
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="spell")
        if 0 <= (space := resource.getrlimit(resource.RLIMIT_AS)[0]) < LEAST_BYTES:
            raise MemoryError(f"ulimit -v leaves {space >> 20} MiB of address space")
        exit_code = app(standalone_mode=False)
        sys.stdout.flush()
        if exit_code == INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(exit_code)
    except MeshwiseError as error:
        _end(str(error), error.exit_code)
    except _UsageError as error:
        if "NoArgs" in type(error).__name__:  # the help itself
            error.show()
            sys.exit(2)
        _end(_sentence(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        _end("interrupted", INTERRUPTED)
    except (BrokenPipeError, SystemExit) as stop:  # typer makes an exit of a broken pipe
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, BrokenPipeError):
            raise
        _drop_output()
        sys.exit(0)  # a reader that has seen enough (`| head`) is no failure
    except (MemoryError, ImportError, RuntimeError, OSError) as error:
        if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
            told = str(error).partition("\n")[0].removesuffix(".") or "nothing is left"
            _end(f"out of memory or threads: {told}; give the process more, or make the job smaller", 2)
        if not isinstance(error, OSError):
            raise
        if error.filename is None:
            _drop_output()
            _end(f"cannot go on: {error.strerror or error}; is there room where the output goes?", 2)
        _end(f"cannot use {str(error.filename)!r}: {error.strerror}; name another file or folder", 2)


def _drop_output() -> None:
    """Leave what stdout did not take: Python would try once more at its end."""
    with suppress(OSError):  # a stdout that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _sentence(error: Any) -> str:
    """What is wrong with the words of a command, what a missing one means, and where to read more."""
    text = " ".join(error.format_message().split()).removesuffix(".")
    text = re.sub(r"Value error, | \(Possible options: --help\)|\. Did you mean '--help'\?", "", text)
    parameter = getattr(error, "param", None)
    meaning = getattr(parameter, "help", None)
    if text.startswith("Missing") and meaning:
        text += f": {meaning.removesuffix('.')}"
    command = error.ctx.command_path if error.ctx else "meshwise"
    return f"{text}; see {command} --help"


def _end(sentence: str, exit_code: int) -> None:
    if len(sentence) > MAX_SENTENCE:  # it quotes what it cannot read
        sentence = f"{sentence[: MAX_SENTENCE // 2]} ... {sentence[-MAX_SENTENCE // 4 :]}"
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in sentence)
    with suppress(OSError):
        print(f"meshwise: {shown}", file=sys.stderr, flush=True)
    if exit_code == INTERRUPTED and "ray" in sys.modules:
        leave_at_once(exit_code)
    sys.exit(exit_code)


def run(words: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `meshwise WORDS`, run in this process for a sweep."""
    out, err = StringIO(), StringIO()
    sys.argv = ["meshwise", *words]
    code = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except Exception:
            traceback.print_exc()
            code = 1
    return code, out.getvalue(), err.getvalue()

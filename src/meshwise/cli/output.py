"""What commands print: one JSON document, or tables; everything else goes to stderr."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from meshwise.core.files import csv_text, write_text

if TYPE_CHECKING:
    from rich.console import Console

    from meshwise.report.answer import Section

STDERR = 2
"""Where the output of a program that is started goes when stdout holds the document."""


def show(
    found: Any,
    document: dict[str, Any] | None = None,
    *,
    json: bool,
    html: Path | None = None,
    plot: Path | None = None,
    ok: bool = True,
    run: dict[str, float] | None = None,
    below: Iterable[str] = (),
    **shown: Any,
) -> None:
    """Print a result, and write its page and picture; exit code 1 where the answer is no (not `ok`).

    As JSON it is `document` (by default its own), else the parts that `shown` asks for, and sentences `below`
    them. `run`: what a whole run of it takes, which all forms show.
    """
    from meshwise.report.pages import draw, parts_of, write_html

    whole: dict[str, Any] = {"run": run} if run else {}
    if html is not None:
        write_html(found, html, **whole)
    if plot is not None:
        draw(found, plot, **whole)
    if json:
        print_json(found.to_json() if document is None else document)
    else:
        print_parts(chain(parts_of(found, **whole, **shown), below))
    if not ok:
        raise typer.Exit(1)


def print_parts(parts: Iterable[Section]) -> None:
    """Print sentences and tables that are of no result."""
    from meshwise.report.pages import print_parts as printed

    printed(parts, console())


def print_answer(document: Any, parts: Iterable[Section], *, json: bool) -> None:
    """Print what is of no result: as JSON `document`, else sentences and tables."""
    if json:
        print_json(document)
    else:
        print_parts(parts)


def write_rows(path: Path | None, rows: Iterable[Iterable[Any]]) -> None:
    """Write a table, its head first, to the file that `--csv` names, if it names one."""
    if path is not None:
        write_text(path, csv_text(rows))


def print_json(document: Any) -> None:
    """Print one JSON document on stdout; JSON has no NaN, so what is not finite becomes null."""
    encoded = msgspec.json.encode(document, enc_hook=lambda number: number.item())  # numpy's own types
    text = msgspec.json.format(encoded, indent=2).decode()
    if not (sys.stdout.encoding or "utf").lower().startswith("utf"):
        text = re.sub(r"[^\0-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)
    sys.stdout.write(text + "\n")


@contextmanager
def on_nodes(ray: str, what: str = "") -> Iterator[None]:
    """Compute on the cluster that `--ray` names, or here; a terminal shows how many `what` are done.

    What Ray says of its nodes goes to stderr, where stdout is for the document.
    """
    from meshwise.core.each import on_ray, telling

    with ExitStack() as opened:
        if ray:
            opened.enter_context(redirect_stdout(sys.stderr))
        opened.enter_context(on_ray(ray))
        if what and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            bar = opened.enter_context(Progress(console=Console(stderr=True), transient=True))
            task = bar.add_task(what, total=None)
            opened.enter_context(telling(lambda done, all: bar.update(task, completed=done, total=all)))
        yield


@contextmanager
def how_far(ends: str = " (Ctrl-C keeps it)") -> Iterator[Callable[[str], None]]:
    """What is called says on a terminal how far a search is, and what `ends` it."""
    from rich.console import Console

    from meshwise.core.each import HEARS, telling

    status = Console(stderr=True).status("")

    def hear(said: str) -> None:
        if said:
            status.update(said + ends)

    with status, telling(lambda done, total: None, hear):
        yield HEARS.get()


def console() -> Console:
    """The console that tables are printed on: COLUMNS wide, or 120 in a file or pipe.

    No name is read as markup.
    """
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
    return Plain(highlight=False, markup=False, width=width)

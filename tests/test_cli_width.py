"""Tables on a narrow terminal: every line fits 80 columns, and no word of the wide table is broken."""

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from data_tables import TRACES, table
from meshwise.cli.command import EXAMPLES
from meshwise.report import pages

COMMANDS = table("drawn")["width"]["commands"]
HELP = ["trace", "frontier", *EXAMPLES]
BLANKS = re.compile(r"[\s,/─-]+")


def words(text: str) -> set[str]:
    """The words of an output, without bars, and without what depends on the clock."""
    lines = (re.sub("█+|priced in .*|configurations in .*", "", line) for line in text.splitlines())
    return {word for line in lines for word in BLANKS.split(line) if word}


@pytest.fixture
def at_widths(meshwise: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, int], tuple[str, str]]:
    """Runs a command once and prints its answer at two widths."""
    print_parts = pages.print_parts

    def run(command: str, narrow: int, wide: int) -> tuple[str, str]:
        file = io.StringIO()

        def print_twice(parts: Any, console: Console) -> None:
            parts = list(parts)
            print_parts(parts, console)
            print_parts(parts, Console(width=wide, file=file, highlight=False, markup=False))

        monkeypatch.setenv("COLUMNS", str(narrow))
        monkeypatch.setattr(pages, "print_parts", print_twice)
        done = meshwise(*command.split())
        assert done.code in (0, 1), done.err
        return done.out, file.getvalue()

    return run


@pytest.mark.parametrize(
    "command", COMMANDS, ids=[" ".join(c.split()[:2]) + f" {i}" for i, c in enumerate(COMMANDS)]
)
def test_tables_fit_80_columns_with_every_word_whole(command: str, at_widths: Any) -> None:
    narrow, wide = at_widths(command, 80, 300)
    for line in narrow.splitlines():  # a plan is never broken in a sentence
        has_plan = any(word.count("=") > 1 for word in line.split())
        assert len(line) <= 80 or has_plan or max(map(len, line.split())) > 40
    assert words(narrow) ^ words(wide) == set()


GLOO = f"{TRACES}/gloo4"
OF_TRACES = [
    *(f"trace {verb} {GLOO}" for verb in ("summary --all", "sections", "path", "memory", "table --limit 4")),
    *(f"trace {verb} {GLOO} --cluster a100-80g-sxm:4" for verb in ("rates", "bandwidth")),
    f"trace diff {GLOO} {GLOO}",
    f"trace summary {TRACES}/hta/sampled",
    f"explain {GLOO}",
]
QUANTITY = re.compile(r"(?<![\w.:…])[-+]?\d[\d.,]*(?: ?(?:[nµum]?s|[kMGT]?(?:B|b|B/s|FLOP/s)|%))?(?![\w.…])")


@pytest.mark.parametrize("command", OF_TRACES, ids=lambda command: " ".join(command.split()[:2]))
def test_no_number_of_a_trace_is_cut(command: str, at_widths: Any) -> None:
    """Names may be shortened; each number is there with its unit, and no line is too long."""
    shown = at_widths(command, 80, 400)
    narrow, wide = (set(QUANTITY.findall(re.sub(r"\s*\n", " ", text))) for text in shown)
    assert max(map(len, shown[0].splitlines())) <= 80
    assert narrow >= wide != set()


@pytest.mark.parametrize("words", ["", *HELP])
def test_help_fits_80_columns_and_cuts_no_sentence(words: str, meshwise: Any) -> None:
    printed = meshwise(*words.split(), "--help").out.splitlines()
    assert max(map(len, printed)) <= 80
    assert not [line for line in printed if re.search(r"^  .*[^\s\]]\.\.\.$", line)]

"""Shared by all tests: hypothesis without a deadline (machines are shared), and how to run the CLI."""

import gc
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings

from data_tables import table

gc.disable()  # nothing that imports make is garbage; the search for it takes a third of collecting tests
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores Ctrl-C
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks and workers share the cores
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch tells of every fake process group
settings.register_profile("shared", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("shared")


SECONDS = table("seconds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, so that the workers end together."""
    items.sort(key=lambda item: -SECONDS.get(item.path.stem, 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many classes of `transformers` the walk found exact, refused and wrong (`test_transformers.py`)."""
    found: Counter[str] = Counter()
    reports = (report for each in terminalreporter.stats.values() for report in each)
    for report in reports:
        if getattr(report, "when", "") == "call" and "test_transformers" in report.nodeid:
            found.update(dict(report.user_properties))
    if found:
        said = ", ".join(f"{number} {verdict}" for verdict, number in found.items())
        terminalreporter.write_line(f"classes of transformers: {said}")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    """So many real ranks, for a whole module, as its `NUM_RANKS` says."""
    from ranks import Ranks

    with Ranks(request.module.NUM_RANKS) as ranks:
        yield ranks


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Dry runs of `python script.py` are forks of a server that has their imports; all else starts anew."""
    from forks import start_script
    from meshwise.runtime.launch import _PRELOAD
    from meshwise.runtime.profile import run_command

    def run(words: list[str], environment: dict[str, str], stdout: Any) -> tuple[int | None, float]:
        if words[0] != "python" or words[1] == "-m":
            return run_command(words, environment, stdout)
        script = start_script(tmp_path_factory.mktemp("forked"), words[1:], environment)
        code = script.end()
        print(script.out.read_text(), end="", file=sys.stderr if stdout else None)
        return code, 0.0

    monkeypatch.setattr("meshwise.runtime.launch._PRELOAD", [*_PRELOAD, "meshwise.runtime.script.child"])
    monkeypatch.setattr("meshwise.runtime.script.start.run_command", run)


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)


@pytest.fixture
def meshwise(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run the command line in this process: `meshwise("estimate", "gpt3-175b", ...)`."""
    from meshwise.cli import main

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("meshwise.cli.leave_at_once", sys.exit)

    def run(*words: str) -> Outcome:
        monkeypatch.setattr("sys.argv", ["meshwise", *words])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run

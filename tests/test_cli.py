"""What holds for every verb: help with examples that can be typed, defaults from a file, the version."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

import meshwise as mw
from data_tables import ROOT, table
from meshwise.cli import app
from meshwise.cli.command import EXAMPLES
from meshwise.cli.defaults import verbs_of
from meshwise.machine.hardware import cluster_text, find_cluster
from meshwise.runtime.programs import PROGRAMS, find_program, parse_options

WRONG = table("wrong_inputs")

COMMAND = typer.main.get_command(app)
PRICED = ("estimate", "llama3-8b", "--batch", "8", "--json")


def test_every_verb_has_an_example() -> None:
    assert set(EXAMPLES) == dict(verbs_of(COMMAND)).keys()


@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, lines in EXAMPLES.items() for line in lines]
)
def test_an_example_can_be_typed(name: str, line: str) -> None:
    words = shlex.split(line)
    command: Any = COMMAND
    for word in name.split():
        assert words.pop(0) == word
        command = command.commands[word]
    context = command.make_context(name, words)  # raises for an option that is not there, or a wrong value
    if context.params.get("program") in PROGRAMS:
        parse_options(find_program(context.params["program"]), context.args)


@pytest.mark.parametrize(("words", "code", "says"), table("tables")["cli"]["said"])
def test_help_has_examples_and_errors_say_why(meshwise: Any, words: str, code: int, says: str) -> None:
    done = meshwise(*words.split())
    assert done.code == code and says in (done.err if code else done.out)
    assert "Possible options: --help" not in done.err and "mean '--help'" not in done.err


def test_every_file_and_the_command_name_the_same_version(meshwise: Any) -> None:
    assert meshwise("--version").out == f"meshwise {mw.__version__}\n"
    assert f"version: {mw.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {mw.__version__} (" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("place", ["here", "named"])
def test_defaults_come_from_a_file(
    meshwise: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("meshwise.toml" if place == "here" else "mine.toml")
    file.write_text(
        'cluster = "h100-80g-sxm:8"\nseq = 1024\ncarbon = 99\n[estimate]\nplan = "tp=2"\nseq = 2048\n'
        '[trace.summary]\nsteps = "complete"\n'  # and `estimate` has an option --trace
    )
    words = () if place == "here" else ("--config", str(file))
    done = meshwise(*words, *PRICED)
    assert done.err == f"meshwise: defaults from {file}\n"
    plan, workload = done.document["plan"], done.document["workload"]
    assert (plan["tp"], workload["seq"]) == (2, 2048)
    stated = meshwise(*words, *PRICED, "--plan", "tp=4", "--seq", "512", "--tokens", "1e9").document
    assert "run" not in done.document and stated["run"]["co2_kg"] > 0  # of a run, so they wait for one
    assert (stated["plan"]["tp"], stated["workload"]["seq"]) == (4, 512)


@pytest.mark.parametrize(("text", "says"), WRONG["defaults"])
def test_a_default_that_nothing_takes_is_refused(meshwise: Any, tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "meshwise.toml"
    file.write_text(text)
    done = meshwise("--config", str(file), *PRICED, "--cluster", "h100-80g-sxm:8")
    assert (done.code, done.out) == (2, "")
    assert says in done.err


@pytest.mark.parametrize("text", WRONG["found_defaults"])
def test_a_file_that_was_found_gives_defaults_of_answers_alone(
    meshwise: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    folder = tmp_path / "cloned"
    folder.mkdir()
    (folder / "link").symlink_to("..")
    (folder / "cluster.toml").write_text(cluster_text(find_cluster("h100-80g-sxm:8")))
    monkeypatch.chdir(folder)
    file = Path("meshwise.toml")
    file.write_text("[estimate]\ncluster = 'cluster.toml'")
    assert meshwise(*PRICED).code == 0
    file.write_text(text)
    done = meshwise("list", "models")
    assert (done.code, done.out) == (2, "")
    assert "meshwise --config meshwise.toml" in done.err
    assert meshwise("--config", "meshwise.toml", "list", "models").code == 0

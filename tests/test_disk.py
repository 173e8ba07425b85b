"""Every file that meshwise writes, on a full disk and in a place that cannot be written: one sentence, exit
code 2, nothing on stdout, and no file that is half there.

The disk takes less than a kilobyte of each file: RLIMIT_FSIZE fails the same calls as a full disk. What is
printed has its own ends: a reader that leaves (`| head`), /dev/full, a closed stdout, an encoding that lacks
a character. And of two writers of one file, one's whole file stays.
"""

import json
import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer.main

from data_tables import GLOO4, table
from meshwise.calibrate.runs import published_runs
from meshwise.cli import app
from meshwise.core.files import whole_file
from meshwise.machine.hardware import cluster_text, find_cluster

pytestmark = pytest.mark.slow

pytest.importorskip("matplotlib")
pytest.importorskip("plotly")
pytest.importorskip("torch")

GLOO = str(GLOO4)
SMALL = "ulysses --seq 64 --hidden 64 --heads 8"
DISK = table("disk")
WRITES = {verb: (words, options) for verb, (words, *options) in DISK["writes"].items()}
EXCEPTIONS = table("exceptions")
OUTPUTS = {"--csv", "--plot", "--html", "--trace", "--out", "--profile"}
CASES = [(verb, words, option) for verb, (words, options) in WRITES.items() for option in options]
READ_ONLY = "/proc/nowhere"


def options_of(inside: Any, *words: str) -> Iterator[tuple[str, str]]:
    """Every verb and each of its options."""
    for name, found in inside.commands.items():
        if hasattr(found, "commands"):
            yield from options_of(found, *words, name)
        else:
            yield from ((" ".join((*words, name)), option) for param in found.params for option in param.opts)


def test_every_output_is_tried() -> None:
    tried = {(verb, option.split()[0]) for verb, (_, every) in WRITES.items() for option in every}
    written = {
        (verb, option) for verb, option in options_of(typer.main.get_command(app)) if option in OUTPUTS
    }
    assert written == tried | {tuple(one.rsplit(" ", 1)) for one in EXCEPTIONS["written_elsewhere"]}


@contextmanager
def full_disk() -> Iterator[None]:
    """No file grows beyond 900 bytes, where the first of `launch` ends; nor bytecode, which would be cut."""
    os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def stated(tmp_path: Path) -> Any:
    """The words of a case, with its file in a folder."""
    (tmp_path / "runs.csv").write_text("\n".join(published_runs().read_text().splitlines()[:3]))
    (tmp_path / "sweep.toml").write_text(DISK["sweep"])
    files = {"RUNS": str(tmp_path / "runs.csv"), "SWEEP": str(tmp_path / "sweep.toml"), "GLOO": GLOO}

    def words(verb: str, words: str, option: str, folder: Path | str) -> list[str]:
        name, file = option.split()
        given = [files.get(word, word) for word in f"{verb} {words}".split()]
        return [*given, name, str(Path(folder) / file)]

    return words


def check_refused(verb: str, code: int, out: str, err: str, says: str) -> None:
    assert code == 2 and err.count("\n") == 1, err
    assert out == "" or verb in ("dryrun", "run")  # whose programs print as they go
    assert err.startswith("meshwise: ") and says in err, err


def check_empty(folder: Path) -> None:
    assert not [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]


@pytest.mark.parametrize(("verb", "words", "option"), CASES)
def test_a_full_disk(meshwise: Any, stated: Any, tmp_path: Path, verb: str, words: str, option: str) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    given = stated(verb, words, option, folder)
    with full_disk():
        done = meshwise(*given)
    check_refused(verb, done.code, done.out, done.err, "cannot write")
    check_empty(folder)


@pytest.mark.parametrize("verb", WRITES)
def test_a_place_that_cannot_be_written(meshwise: Any, stated: Any, verb: str) -> None:
    words, (option, *_) = WRITES[verb]
    done = meshwise(*stated(verb, words, option, READ_ONLY))
    check_refused(verb, done.code, done.out, done.err, READ_ONLY)


# --- stdout --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "code", "says"),
    [("| true", 0, ""), ("> /dev/full", 2, "No space left"), (">&-", 2, "stdout is closed")],
)
def test_where_stdout_goes(to: str, code: int, says: str) -> None:
    """A reader that has seen enough is no failure; no room is, in one sentence."""
    command = f"{shlex.quote(sys.executable)} -m meshwise list chips --json {to}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code and says in done.stderr, done.stderr
    assert done.stderr.count("\n") == (1 if says else 0), done.stderr


# --- two writers ---------------------------------------------------------------------------------


def test_two_writers_at_once(tmp_path: Path) -> None:
    """Both write at the same time; each file that a reader sees on the way is whole."""
    path = tmp_path / "x.csv"
    with whole_file(path) as one:
        one.write(b"one, ")
        with whole_file(path) as other:
            other.write(b"other, ")
            one.write(b"whole")
            assert not path.exists()
            other.write(b"whole")
        assert path.read_bytes() == b"other, whole"
    assert path.read_bytes() == b"one, whole"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("option", WRITES["estimate"][1])
def test_no_output_is_written_in_its_place(meshwise: Any, stated: Any, tmp_path: Path, option: str) -> None:
    """What another process has written, or is reading, stays as it is until the new file replaces it."""
    path, kept = tmp_path / option.split()[1], tmp_path / "kept"
    path.write_bytes(b"theirs")
    kept.hardlink_to(path)
    assert meshwise(*stated("estimate", WRITES["estimate"][0], option, tmp_path)).code == 0
    assert kept.read_bytes() == b"theirs" and not path.samefile(kept)


@pytest.mark.parametrize(
    ("encoding", "words"), [("ascii", f"trace summary {GLOO}"), ("latin-1", "estimate llama3-8b --json")]
)
def test_an_encoding_that_lacks_a_character(tmp_path: Path, encoding: str, words: str) -> None:
    """A screen writes u for µ; a document is the same."""
    file = tmp_path / "µ-größe.toml"
    file.write_text(cluster_text(find_cluster("h100-80g-sxm:8")).replace("h100-80g-sxm:8", "µ"))
    command = [sys.executable, "-m", "meshwise", *words.split()]
    command += ["--cluster", str(file)] if "--json" in words else []
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode(encoding)
    if "--json" in words:
        assert json.loads(text)["cluster"]["name"] == "µ"
    else:
        assert re.search("[0-9] us", text)

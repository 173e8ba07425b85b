"""Sweeps: the grid becomes command lines; nothing finished is lost or repeated; failures are kept."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import typer.main

import tasks
from data_tables import DATA, DOCS, ROOT, csv_rows, table
from meshwise.cli import app
from meshwise.core.errors import DataError
from meshwise.sweep import sweep as sweeps
from meshwise.sweep.sweep import ON_BY_DEFAULT, VERBS, Store, read_sweep, run_sweep

WRONG = table("wrong_inputs")

pytestmark = pytest.mark.slow

GRID = (DATA / "sweeps" / "grid.toml").read_text()


def test_default_columns_are_documented_keys():
    """docs/reference/json.md is the list of keys; what a sweep shows by default is some of them."""
    text = (DOCS / "reference" / "json.md").read_text()
    keys_of = {
        verb: keys
        for verbs, keys in re.findall(r"^\| (`.*?`) \| (.*) \|$", text, re.MULTILINE)
        for verb in re.findall(r"`(.*?)`", verbs)
    }
    for verb, columns in sweeps.DEFAULT_RESULTS.items():
        for path in columns.values():
            parts = [part for part in path.split(".") if not part.isdigit()]
            assert not [part for part in parts if not re.search(rf"\b{part}\b", keys_of[verb])], (verb, path)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Sweeps call what stands in for the command line; returns the numbers that it was given, in order."""
    log = tmp_path / "log"
    log.touch()
    monkeypatch.setenv("TASKS_LOG", str(log))
    monkeypatch.setattr(sweeps, "answer_of", tasks.answer_of)
    return lambda: [int(n) for n in log.read_text().split()]


def _file(folder, text):
    (folder / "sweep.toml").write_text(text)
    return folder / "sweep.toml"


def _numbers(folder, numbers, extra=""):
    grid = f"n = {list(numbers)}\ncluster = ['{folder}/cluster.toml']"
    text = f'verb = "estimate"\n{extra}\n[grid]\n{grid}\n[results]\nsquare = "n.square.0"\n'
    return read_sweep(_file(folder, text))


def test_points_are_command_lines():
    found = read_sweep(DATA / "sweeps" / "points.toml")
    assert [" ".join(point.words) for point in found.points] == [
        "run eval-lm --plan tp=1,ep=4 --capacity-fraction 0.05 --json",
        "run eval-lm --plan tp=2,ep=4 --capacity-fraction 0.05 --json",
        "run eval-lm --plan tp=2,ep=4 --capacity-fraction 0.05 --quiet --json",
        "run eval-lm --plan tp=8,ep=4 --capacity-fraction 0.05 --quiet --json",
    ]


@pytest.mark.parametrize(("text", "reason"), WRONG["sweeps"])
def test_wrong_files_are_one_sentence(tmp_path, text, reason):
    with pytest.raises(DataError, match=r"sweep\.toml") as caught:
        read_sweep(_file(tmp_path, text))
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_failures_stop_nothing(tmp_path, fake):
    """A worker that is killed, one that takes too long, a refusal: each keeps its reason."""
    wanted = _numbers(tmp_path, [1, -1, 2, -2, 3, -3, 4], "timeout_s = 2.0")
    with Store(tmp_path / "a.sqlite") as store:
        run_sweep(wanted, store, jobs=2)
        rows = {row.values["n"]: row for row in store.rows(wanted)}
    assert {n: row.results["square"] for n, row in rows.items() if n > 0} == {1: 1, 2: 4, 3: 9, 4: 16}
    assert rows[-1].error == "the process was ended by SIGKILL: about to die"
    assert rows[-2].error == "it took longer than timeout_s = 2 s"
    assert rows[-3].error == "n is bad; use another" and rows[-3].status == "failed"


def test_finished_points_are_not_repeated(tmp_path, fake):
    """Not when the sweep is started again or its grid grows; failed ones with retry, all for other files."""
    runs = ([1, -3], False, ""), ([1, -3], False, ""), ([-3, 5, 1], False, ""), ([1, 5, -3], True, "")
    for numbers, retry, text in (*runs, ([1], False, "another cluster")):
        (tmp_path / "cluster.toml").write_text(text)
        wanted = _numbers(tmp_path, numbers)
        with Store(tmp_path / "a.sqlite") as store:
            run_sweep(wanted, store, jobs=1, retry=retry)
            assert [row.values["n"] for row in store.rows(wanted)] == numbers
    assert fake() == [1, -3, 5, -3, 1]


SLOW = DATA / "scripts" / "slow_sweep.py"


def test_kill_nine_loses_only_what_was_running(tmp_path, fake):
    """Killed and started again: the rows of before are untouched, only what ran then runs again."""
    numbers = list(range(1, 41))
    path = _file(tmp_path, f'verb = "estimate"\n[grid]\nn = {numbers}\n')
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    query = "SELECT id, command, status, finished_at, seconds, document FROM points ORDER BY id"

    def stored():
        with closing(sqlite3.connect(tmp_path / "sweep.sqlite", timeout=30)) as database:
            return database.execute(query).fetchall()

    process = subprocess.Popen([sys.executable, str(SLOW), str(path)], env=environment)
    while len(fake()) < 4 and process.poll() is None:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = stored()
    wanted = read_sweep(path)
    with Store(tmp_path / "sweep.sqlite") as store:
        run_sweep(wanted, store, jobs=2)
    after = stored()
    assert 3 <= len(before) < 40 and after[: len(before)] == before
    assert len({row[1] for row in after}) == 40 and set(fake()) == set(numbers) and len(fake()) <= 42


def test_one_writer_at_a_time(tmp_path):
    with Store(tmp_path / "a.sqlite"), pytest.raises(DataError, match="another sweep is writing"):
        Store(tmp_path / "a.sqlite")
    (tmp_path / "b.sqlite").write_text("not a database, but long enough to be looked at by SQLite" * 9)
    with pytest.raises(DataError, match="is not a results file"):
        Store(tmp_path / "b.sqlite")
    with pytest.raises(DataError, match="cannot write"):
        Store(tmp_path / "nowhere" / "a.sqlite")


def test_command_line(meshwise, tmp_path, monkeypatch):
    """Estimates through the sweep are the estimates of the command line; pp=7 fails and is told."""
    pytest.importorskip("matplotlib")
    path = _file(tmp_path, GRID)
    done = meshwise("sweep", str(path), "--json")
    document = done.document
    assert done.code == 1 and (document["num_done"], document["num_failed"]) == (6, 3)
    failed = [point for point in document["points"] if point["status"] == "failed"]
    assert {point["values"]["pp"] for point in failed} == {7} and all(point["error"] for point in failed)
    alone = "estimate gpt3-175b --cluster h100-80g-sxm:64 --plan tp=4,pp=4 --batch 64 --json"
    alone = meshwise(*alone.split()).document
    point = next(p for p in document["points"] if p["values"] == {"tp": 4, "pp": 4})
    assert point["results"]["step_s"] == alone["step_s"] and point["results"]["fits"] == alone["fits"]
    table = csv_rows(tmp_path / "sweep.csv")
    assert len(table) == 9 and float(table[4]["step_s"]) == alone["step_s"]
    assert Path(document["figure"]).read_bytes().startswith(b"\x89PNG")
    monkeypatch.setenv("COLUMNS", "80")
    again = meshwise("sweep", str(_file(tmp_path, GRID + '[results]\nt = "rows.0.time_s"\na_s = "plan"\n')))
    assert again.code == 1 and "6 done, 3 failed" in again.out and "has rows.0.time_s" in again.out
    shown = [line.split()[:2] for line in again.out.splitlines() if re.match(r" \d ", line)]
    assert shown == [[tp, pp] for tp in "248" for pp in "147"]
    assert all(point["error"] in " ".join(again.out.split()) for point in failed)


def test_the_example_of_the_page_runs(meshwise, tmp_path):
    page = (DOCS / "sweep.md").read_text()
    text = page.partition("```toml\n")[2].partition("```")[0]
    assert meshwise("sweep", str(_file(tmp_path, text))).code == 0


def test_unknown_option_is_the_file_s_fault(meshwise, tmp_path):
    """One sentence for the whole sweep, and no point stored."""
    path = _file(tmp_path, GRID.replace("batch = 64", "bacth = 64"))
    done = meshwise("sweep", str(path))
    assert done.code == 2 and "--bacth" in done.err and "correct the file" in done.err
    with closing(sqlite3.connect(tmp_path / "sweep.sqlite")) as database:
        assert database.execute("SELECT count(*) FROM points").fetchone() == (0,)


def test_interrupted_says_how_to_go_on(tmp_path, fake, monkeypatch, capsys):
    from meshwise.cli.sweep import sweep

    path = _file(tmp_path, 'verb = "estimate"\n[grid]\nn = [1, 2, 3]\n[results]\nsquare = "n.square.0"\n')
    real = Store.add

    def add(self, point, answer):
        real(self, point, answer)
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "add", add)
    with pytest.raises(KeyboardInterrupt):
        sweep(path, jobs=1)
    assert "1 of 3 points are kept" in capsys.readouterr().err
    with Store(tmp_path / "sweep.sqlite") as store:
        assert len(store.finished()) == 1


@pytest.mark.parametrize("damage", table("tables")["sweep"]["damage"])
def test_a_damaged_or_foreign_database_is_one_sentence(tmp_path, fake, damage):
    """It is left as it was, too."""
    wanted, path = _numbers(tmp_path, range(2)), tmp_path / "a.sqlite"
    with Store(path) as store:
        run_sweep(wanted, store, jobs=1)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(damage)
    before = path.read_bytes()
    with pytest.raises(DataError, match="is not a results file of a sweep"), Store(path) as store:
        store.finished()
        store.rows(wanted)
    assert path.read_bytes() == before


def test_ray_is_an_extra(meshwise, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    done = meshwise("sweep", str(_file(tmp_path, GRID)), "--ray", "auto")
    assert done.code == 3 and "ray is not installed" in done.err


def test_no_option_of_a_sweep_is_dropped(tmp_path: Path) -> None:
    """What is off is said where it would be on: `ledger = false` runs at full speed."""
    verbs = dict.fromkeys(VERBS, typer.main.get_command(app))
    for verb in verbs:
        for word in verb.split():
            verbs[verb] = verbs[verb].commands[word]
    flags = [option for verb in verbs.values() for param in verb.params for option in param.secondary_opts]
    assert {flag.removeprefix("--no-") for flag in flags} == set(ON_BY_DEFAULT)
    text = 'verb = "run"\narguments = ["ulysses"]\n[options]\nledger = false\n[grid]\nranks = [1]\n'
    (point,) = read_sweep(_file(tmp_path, text)).points
    assert "--no-ledger" in point.words


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*benchmark*.toml")))
def test_a_benchmark_of_the_examples_is_a_sweep(path: Path) -> None:
    points = read_sweep(path).points
    assert len(points) > 20 and {"seq", "layers", "experts", "ranks", "profile"} <= set(points[0].values)

"""What users hand in, and where they want results, may be wrong: one sentence, exit code 2, nothing left
behind. And what must hold between two answers, whatever they are (metamorphic tests).
"""

import os
import re
import signal
import socket
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject, settings, strategies as st

import meshwise as mw
from data_tables import DATA, ROOT, csv_rows, table
from meshwise.core.errors import DataError
from meshwise.core.files import write_text
from meshwise.machine.hardware import Cluster, find_cluster
from meshwise.sweep.sweep import read_sweep

ESTIMATE = ("estimate", "llama3-8b", "--batch", "64", "--seq", "1024")
ON_CHIPS = ("--cluster", "h100-80g-sxm:8")


def refused(done: Any, says: str) -> None:
    assert done.code == 2 and done.out == "", done.err
    assert done.err.startswith("meshwise: ") and done.err.count("\n") == 1
    assert says in done.err


DOTTED = ".".join("a" * 15_000)


@pytest.mark.parametrize("text", [f"[{DOTTED}]", f'a = ["""x"""", {{{DOTTED} = 1}}]'])
@pytest.mark.parametrize("words", table("tables")["of_a_file"])
def test_a_long_key_of_a_toml_file_is_refused_before_it_is_parsed(
    meshwise: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Any, text: str
) -> None:
    """The parser's memory grows with its square: 40,000 parts took 1.6 GB."""
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text(f"{text}\n[training]\n")
    words = words.split()
    refused(meshwise(*words), "a dotted key has more than 8 parts")
    Path("x.toml").write_text("[training]\n" + "# comment\n" * 200_000)
    refused(meshwise(*words), "bytes")


READS_CODE = r"pickle\.loads?\(|\bexec\(|(?<!\.)\beval\(|allow_pickle|yaml\.(unsafe_)?load|shelve|marshal"
WALL_CLOCK = r"\btime\.time(_ns)?\(|from time import [^\n]*\btime\b|datetime\.now|utcnow|fromtimestamp"


@pytest.mark.parametrize(("words", "said_in"), [(READS_CODE, set()), (WALL_CLOCK, {"runtime/capture.py"})])
def test_what_no_module_says(words: str, said_in: set[str]) -> None:
    """Nothing that is read can run code, and no clock that may jump measures: a trace alone says when it was
    taken, as its own events do."""
    source = Path(mw.__file__).parent
    found = {path for path in source.rglob("*.py") if re.search(words, path.read_text(encoding="utf-8"))}
    assert {path.relative_to(source).as_posix() for path in found} == said_in


def test_every_dependency_is_locked_with_hashes() -> None:
    """As `pip install --require-hashes -r requirements.lock` wants it."""
    locked = (ROOT / "requirements.lock").read_text().replace(" \\\n", "").splitlines()
    assert all(re.match(r"[\w.-]+==[\w.]+( +--hash=sha256:[0-9a-f]{64})+$", line) for line in locked)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]}  # type: ignore[index]
    assert names and names <= {line.partition("==")[0] for line in locked}


def test_a_device_is_no_file(meshwise: Any) -> None:
    refused(meshwise("estimate", "/dev/zero", *ON_CHIPS, "--batch", "8"), "no file is there")


FORMATS = ("{n:{n}}", "{n:{m}}", "{n:>1000000000}", "{n:0.999999999f}")
GROWING = [(f'arguments = ["{text}"]\n[grid]\nn = [1]', "cannot be filled in") for text in FORMATS]
MANY = "\n".join(f"k{i} = {list(range(100))}" for i in range(10))


@pytest.mark.parametrize(("text", "says"), [*GROWING, (f"[grid]\n{MANY}", "more than 1,000,000 points")])
def test_a_sweep_that_grows_without_bound_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(f'verb = "run"\n{text}')
    with pytest.raises(DataError, match=says):
        read_sweep(path)


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_what_is_no_plain_file_is_not_replaced_by_one(tmp_path: Path, kind: str) -> None:
    path, found = tmp_path / "x.csv", tmp_path / "there"
    if kind == "link":
        found.write_text("before")
        path.symlink_to(found)
    else:
        os.mkfifo(path)
        reader = threading.Thread(target=lambda: found.write_bytes(path.read_bytes()))
        reader.start()
    write_text(path, "after")
    if kind == "fifo":
        reader.join()
    assert found.read_text() == "after"
    assert (path.is_symlink(), path.is_fifo()) == (kind == "link", kind == "fifo")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["there", "x.csv"]


def test_names_are_no_markup(meshwise: Any, tmp_path: Path) -> None:
    config = DATA / "tiny_llama.json"
    path = tmp_path / "[bold] [ab" / "config.json"
    path.parent.mkdir()
    path.write_text(config.read_text())
    done = meshwise("estimate", str(path.parent), *ON_CHIPS, "--batch", "8", "--seq", "64")
    assert done.code == 0, done.err
    assert "[bold] [ab" in done.out


# --- ranks -------------------------------------------------------------------------------------


def test_a_stopped_rank_is_named_and_can_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    import ranks as on_ranks
    from forks import wait_until
    from meshwise.runtime.launch import launch

    monkeypatch.setattr("meshwise.runtime.launch._LOOK_S", 0.2)
    said: list[str] = []
    files = [tmp_path / "0", tmp_path / "1"]

    def strike() -> None:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        os.kill(int(files[1].read_text()), signal.SIGSTOP)
        (tmp_path / "go").touch()
        deadline = time.monotonic() + 120.0
        while "stopped" not in "".join(said) and time.monotonic() < deadline:
            said.append(capfd.readouterr().err)
            time.sleep(0.1)
        time.sleep(1.0)  # the launcher looks again
        os.kill(int(files[1].read_text()), signal.SIGCONT)

    watcher = threading.Thread(target=strike)
    watcher.start()
    assert launch(on_ranks.sum_of_ranks, 2, str(tmp_path)) == [1, 1]
    watcher.join()
    text = "".join([*said, capfd.readouterr().err])
    assert text.count("rank 1 is stopped by a signal") == 1
    assert f"kill -CONT {files[1].read_text()}" in text


def test_only_this_machine_reaches_the_meeting_point() -> None:
    pytest.importorskip("torch")
    from meshwise.runtime.launch import LOOPBACK, _meeting_store

    store = _meeting_store(0)
    socket.create_connection((LOOPBACK, store.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5).close()


# --- between two answers -----------------------------------------------------------------------


MODELS = ("llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v2-lite", "qwen3-0.6b", "gpt-oss-20b")
CLUSTERS = ("h100-80g-sxm:64", "a100-80g-sxm:64", "mi300x:64", "gb200:64")
CHOICES = table("drawn")["faster_machines"]
"""Values of a plan's keys that are drawn."""
jobs = st.tuples(
    st.sampled_from(MODELS),
    st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in CHOICES.items()}).map(
        lambda keys: ",".join(f"{key}={value}" for key, value in keys.items())
    ),
)
"""A model and a plan, which may be none."""
RATES = ("memory_bytes_per_s", "matrix_flop_per_s", "vector_flop_per_s")
FASTER = st.sampled_from(("links", "inner links", *RATES))
NO_LONGER = 1 + 1e-12
SOME = int(os.environ.get("CASES", "20"))
"""Plans of each property."""


def step(cluster: Cluster, job: tuple[str, str]) -> Any:
    return mw.estimate(job[0], cluster, job[1], batch=64, seq=2048)


def valid_step(cluster: Cluster, job: tuple[str, str]) -> Any:
    try:
        return step(cluster, job)
    except mw.MeshwiseError:
        return reject()


def faster(cluster: Cluster, what: str, times: float) -> Cluster:
    chip = cluster.chip
    if what == "links":
        levels = tuple(replace(level, bytes_per_s=times * level.bytes_per_s) for level in cluster.levels)
        return replace(cluster, levels=levels)
    if what == "inner links":
        inner = replace(cluster.levels[0], bytes_per_s=times * cluster.levels[0].bytes_per_s)
        return replace(cluster, levels=(inner, *cluster.levels[1:]))
    if what.startswith("memory_bytes"):
        return replace(cluster, chip=replace(chip, **{what: times * getattr(chip, what)}))
    rates = {dtype: times * rate for dtype, rate in getattr(chip, what).items()}
    return replace(cluster, chip=replace(chip, **{what: rates}))


@settings(max_examples=3 * SOME)
@given(jobs, st.sampled_from(CLUSTERS), FASTER, st.floats(1, 8))
def test_a_faster_machine_never_costs_time(job: tuple[str, str], chips: str, what: str, times: float) -> None:
    """Layers are placed as well on one machine as on another, too."""
    cluster = find_cluster(chips)
    before, after = valid_step(cluster, job), step(faster(cluster, what, times), job)
    assert after.step_s <= before.step_s * NO_LONGER


@pytest.mark.parametrize("what", ["links", "matrix_flop_per_s", "memory_bytes"])
def test_the_best_plan_of_a_better_machine_is_no_slower(what: str) -> None:
    cluster = find_cluster("a100-40g-sxm:16")
    took = [
        mw.search("llama3-8b", faster(cluster, what, times), batch=64, seq=2048, top=1).best[0].step_s
        for times in (1, 1.3, 4)
    ]
    assert took[0] >= took[1] / NO_LONGER >= took[2] / NO_LONGER**2


@settings(max_examples=SOME)
@given(jobs, st.sampled_from(CLUSTERS), st.floats(1, 8))
def test_more_memory_changes_no_time(job: tuple[str, str], chips: str, times: float) -> None:
    cluster = find_cluster(chips)
    before, after = valid_step(cluster, job), step(faster(cluster, "memory_bytes", times), job)
    assert after.step_s == before.step_s and after.fits >= before.fits


@settings(max_examples=SOME)
@given(jobs, st.sampled_from(CLUSTERS), st.permutations(("tp", "cp", "dp", "pp")))
def test_on_equal_links_the_placement_changes_nothing(
    job: tuple[str, str], chips: str, order: list[str]
) -> None:
    cluster = find_cluster(chips)
    flat = replace(cluster, levels=(replace(cluster.levels[0], ranks=float("inf")),))
    model, plan = job
    moved = valid_step(flat, (model, f"{plan},placement={'-'.join(order)}"))
    assert moved.step_s == pytest.approx(step(flat, job).step_s, rel=1e-12)


def test_json_csv_and_python_agree_to_the_digit(meshwise: Any, tmp_path: Path) -> None:
    words = (*ESTIMATE, "--cluster", "h100-80g-sxm:64", "--plan", "tp=4,pp=2")
    document = meshwise(*words, "--json", "--csv", str(tmp_path / "x.csv")).document
    found = mw.estimate("llama3-8b", "h100-80g-sxm:64", "tp=4,pp=2", batch=64, seq=1024)
    assert document["step_s"] == found.step_s
    rows = csv_rows(tmp_path / "x.csv")
    assert len(rows) == len(document["ledger"]) == len(found.ledger.to_json())
    for row, told in zip(rows, document["ledger"], strict=True):
        assert row["op"] == told["op"]
        for column in ("count", "flop", "time_s", "payload_bytes"):
            assert (float(row[column]) if row[column] else None) == told[column]

"""A signal at a random moment of start, run and end: no process is left, nothing is half-written, no
traceback is printed, and a message names the rank that ended or that a stopped process holds up.

`MOMENTS=20 SEED=1 pytest tests/test_signals.py -s` prints and tries so many moments of each kind.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from data_tables import DATA

pytest.importorskip("torch")

import ranks as on_ranks
from forks import PATIENCE_S, wait_until
from meshwise.runtime.launch import RankError, launch

MOMENTS = int(os.environ.get("MOMENTS", "0"))
SEED = os.environ.get("SEED", "0")
RUN = "run train --ranks 2 --batch 2 --seq 16 --plan zero=3,dtype=fp32 --steps 4 --json"
WORDS = [*RUN.split(), "--model", str(DATA / "tiny_llama.json")]
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)


def children(pid: int) -> list[int]:
    """The processes that `pid` has started and that have not ended, in their order."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append((int(fields[19]), int(stat.parent.name)))
    return [child for _, child in sorted(found)]


def is_server(pid: int) -> bool:
    try:
        return b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def processes(parent: int) -> dict[str, int]:
    """The process that ranks are forks of and the ranks, as far as they have begun."""
    found: dict[str, int] = {}
    for server in filter(is_server, children(parent)):
        found |= {"server": server} | {f"rank {n}": pid for n, pid in enumerate(children(server))}
    return found


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("moment", range(MOMENTS or 1))
@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("who", ["rank", "server"])
def test_a_signal_to_a_rank_or_to_what_starts_it(
    who: str, how: signal.Signals, moment: int, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("meshwise.runtime.launch._LOOK_S", 0.5)
    chance = random.Random(f"{SEED} {who} {how} {moment}")
    after_s = chance.uniform(0.0, 0.6 if who == "rank" else 3.0)
    name = f"rank {chance.randrange(2)}" if who == "rank" else who
    began: dict[str, int] = {}
    ended = threading.Event()

    def strike() -> None:
        wait_until(lambda: ended.is_set() or name in processes(os.getpid()))
        time.sleep(after_s)
        began.update(processes(os.getpid()))
        if name not in began or ended.is_set():
            return
        os.kill(began[name], how)
        if how == signal.SIGSTOP:
            said = ""
            while not ended.is_set() and "meshwise: rank" not in (said := said + capfd.readouterr().err):
                ended.wait(0.1)
            with suppress(ProcessLookupError):
                os.kill(began[name], signal.SIGCONT)

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        outcome: Any = launch(on_ranks.many_sums, 2, 300)
    except RankError as error:
        outcome = str(error)
    ended.set()
    striker.join()
    shown = f"{how.name} to {name} {after_s:.3f} s after it began: {outcome}"
    with capfd.disabled():
        print(f"\n{shown}" if MOMENTS else "", end="")
    assert outcome == [300, 300] or how != signal.SIGSTOP, shown
    if outcome != [300, 300]:
        of_rank = f"{name} failed: it was ended by {how.name}"
        named = of_rank if who == "rank" else r"rank \d (failed|did not start)"
        assert re.match(named, outcome) and "Traceback" not in outcome, shown
    wait_until(lambda: not any(is_running(pid) for one, pid in began.items() if one != "server"))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("moment", range(MOMENTS or 1))
@pytest.mark.parametrize("how", [*SIGNALS, signal.SIGINT] if MOMENTS else [signal.SIGTERM])
def test_a_signal_to_the_command(how: signal.Signals, moment: int, tmp_path: Path) -> None:
    after_s = random.Random(f"{SEED} {how} {moment}").uniform(0.0, 12.0 if MOMENTS else 4.0)
    out, err, profiles = tmp_path / "out", tmp_path / "err", tmp_path / "profiles"
    words = [sys.executable, "-m", "meshwise", *WORDS, "--profile", str(profiles)]
    with out.open("w") as stdout, err.open("w") as stderr:
        job = subprocess.Popen(words, stdout=stdout, stderr=stderr, start_new_session=True)
    try:
        time.sleep(after_s)
        began = processes(job.pid)
        job.send_signal(how)
        if how == signal.SIGSTOP:
            time.sleep(after_s)
            job.send_signal(signal.SIGCONT)
        code = job.wait(PATIENCE_S)
    finally:
        job.kill()
    print(f"{how.name} {after_s:.2f} s after it began, with {len(began)} processes: exit code {code}")
    wait_until(lambda: not any(map(is_running, began.values())))
    assert "Traceback" not in err.read_text()
    assert code in ((0,) if how == signal.SIGSTOP else (0, -how, 130)), err.read_text()
    assert json.loads(out.read_text())["ranks"] == 2 if code == 0 else out.read_text() == ""
    for trace in profiles.glob("rank-*"):
        assert json.loads(trace.read_text())["traceEvents"]

"""The launcher: ranks start, answer, fail, and end; nothing is left behind."""

import json
import multiprocessing as mp
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

import meshwise
from data_tables import SCRIPTS, table
from forks import start_script, wait_until
from meshwise.core.errors import MissingExtraError, PlanError
from meshwise.runtime import launch as launcher
from meshwise.runtime.launch import RankError, check_world, outside_place
from ports import own_port
from ranks import fail_on

pytestmark = pytest.mark.slow


def is_running(pid: int) -> bool:
    """Whether the process lives; one that is dead and not yet waited for does not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize(
    ("how", "failing", "error", "message"),
    [
        ("raises", 1, RankError, "rank 1 failed: ValueError: broken on purpose"),
        ("refuses", 0, PlanError, "rank 0: these sizes do not divide"),
        ("dies", 1, RankError, "rank 1 failed: it was ended by SIGKILL"),
        ("exits", 0, RankError, "rank 0 failed: it ended with exit code 7 before it was done"),
    ],
)
def test_first_failure_is_reported_and_all_end(
    how: str, failing: int, error: type[Exception], message: str
) -> None:
    """The other rank waits in a barrier and would wait for half an hour."""
    with pytest.raises(error, match=f"^{message}"):
        launcher.launch(fail_on, 2, failing, how)
    assert not [process for process in mp.active_children() if process.name.startswith("rank")]


def test_no_rank_outlives_the_launcher(tmp_path: Path) -> None:
    """Killed; other signals: test_signals.py."""
    temporary = Path(tempfile.mkdtemp())  # the path of a socket has 108 bytes at most
    surroundings = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(SCRIPTS / "ranks_until_killed.py"), str(tmp_path)]
    job = subprocess.Popen(command, env=surroundings, stderr=subprocess.DEVNULL, start_new_session=True)
    files = [tmp_path / "0", tmp_path / "1"]
    try:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        pids = [int(file.read_text()) for file in files]
        job.kill()
        job.wait(timeout=60)
    finally:
        job.kill()
    wait_until(lambda: not any(map(is_running, pids)))
    wait_until(lambda: not list(temporary.glob("pymp-*")))
    shutil.rmtree(temporary)


def test_worlds_that_do_not_fit() -> None:
    most = launcher.RANKS_PER_CORE * (os.cpu_count() or 1)
    check_world(most, "cpu")
    with pytest.raises(PlanError, match=f"{most + 1} ranks are more than this machine takes"):
        check_world(most + 1, "cpu")
    with pytest.raises(PlanError, match="at least one"):
        check_world(0, "cpu")


def test_no_gpu_is_a_missing_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(MissingExtraError, match="no CUDA device"):
        check_world(1, "cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(PlanError, match="5 ranks on 4 GPUs"):
        check_world(5, "cuda")


# --- worlds that others start -------------------------------------------------------------------


def test_place_under_torchrun_and_srun() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
    assert outside_place(torchrun) == launcher.RankPlace(5, 16, 1)
    srun = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "12", "SLURM_LOCALID": "3"}
    assert outside_place(srun) == launcher.RankPlace(9, 12, 3)
    assert outside_place({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert outside_place({}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[003-010,12],cpu1", "gpu003"), ("a,b", "a"), ("node-7", "node-7"), ("n[5,7]", "n5")],
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert launcher.meeting_point({"SLURM_STEP_NODELIST": nodes})[0] == first


@pytest.mark.parametrize(("environment", "sentence"), table("tables")["run"]["environments"])
def test_environments_that_make_no_sense(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(PlanError, match=re.escape(sentence)):
        outside_place(environment)


SMALL = ["run", "ulysses", "--seq", "16", "--hidden", "8", "--heads", "2", "--json"]
JOB = str(Path(__file__).parent / "outside_job.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def told_by_srun() -> list[dict[str, str]]:
    """What srun says to each of two ranks of one machine."""
    common = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"MASTER_PORT": str(own_port())}
    return [common | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]


def test_srun_needs_no_other_command(tmp_path: Path) -> None:
    """The same words on every rank; rank 0 prints the one document, the other nothing."""
    command = [str(Path(meshwise.__file__).with_name("__main__.py")), *SMALL]
    jobs = [start_script(tmp_path, command, told) for told in told_by_srun()]
    assert [job.end() for job in jobs] == [0, 0], [job.err.read_text() for job in jobs]
    assert json.loads(jobs[0].out.read_text())["ranks"] == 2
    assert jobs[1].out.read_text() == ""


def test_torchrun_needs_no_other_command() -> None:
    done = subprocess.run([*TORCHRUN, "-m", "meshwise", *SMALL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2


LOST = "meshwise: rank 0: it lost the connection to another rank, whose error says why\n"


@pytest.mark.parametrize(
    ("how", "code", "first"),
    [("refuses", 2, "meshwise: rank 1: these sizes do not divide\n"), ("dies", -signal.SIGKILL, "")],
)
def test_a_failing_rank_ends_the_others_under_srun(how: str, code: int, first: str, tmp_path: Path) -> None:
    """The other waits in a barrier, and would for half an hour."""
    jobs = [start_script(tmp_path, [JOB, how], told) for told in told_by_srun()]
    assert [job.end() for job in jobs] == [1, code]
    assert jobs[0].err.read_text() == LOST
    assert jobs[1].err.read_text().startswith(first)


def test_a_port_in_use_outside() -> None:
    """Rank 0 is to hold the meeting point; the sentence names it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words = [sys.executable, "-m", "meshwise", *SMALL]
        done = subprocess.run(words, env=os.environ | world, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(f"meshwise: rank 0: tcp://127.0.0.1:{port} is in use; set MASTER_ADDR")

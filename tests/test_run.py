"""The launcher: ranks start, answer, fail, and end; nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import ranks as on_ranks
from meshwise.errors import MissingExtraError, PlanError
from meshwise.instruments.launch import (
    RANKS_PER_CORE,
    RankError,
    Ranks,
    check_world,
    first_host,
    launch,
    meeting_point,
    outside_place,
)


def is_running(pid: int) -> bool:
    """Whether the process lives; one that is dead and not yet waited for does not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def test_every_rank_answers(pool: Ranks) -> None:
    assert pool.call(on_ranks.total_of_ranks, 3) == [3, 3]
    assert pool.call(on_ranks.total_of_ranks, 5) == [5, 5]


@pytest.mark.parametrize(
    ("function", "failing", "error", "message"),
    [
        (on_ranks.fail_on, 1, RankError, "rank 1 failed: ValueError: broken on purpose on rank 1"),
        (on_ranks.refuse_on, 0, PlanError, "rank 0: these sizes do not divide"),
        (on_ranks.die_on, 1, RankError, "rank 1 failed: it was ended by SIGKILL"),
        (on_ranks.exit_on, 0, RankError, "rank 0 failed: it ended with exit code 7"),
    ],
)
def test_first_failure_is_reported_and_all_end(
    function: Callable[..., None], failing: int, error: type[Exception], message: str
) -> None:
    """The other rank waits in a barrier and would wait for half an hour."""
    with Ranks(2) as ranks:
        pids = ranks.pids
        with pytest.raises(error, match="^" + message.replace(".", r"\.")):
            ranks.call(function, failing)
        assert not any(map(is_running, pids))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_launcher(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from meshwise.instruments.launch import launch\n"
        "from ranks import sleep_forever\n"
        f"if __name__ == '__main__': launch(sleep_forever, 2, {str(tmp_path)!r})\n"
    )
    job = subprocess.Popen([sys.executable, script], stderr=subprocess.DEVNULL, start_new_session=True)
    files = [tmp_path / "0", tmp_path / "1"]
    assert wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    pids = [int(file.read_text()) for file in files]
    os.kill(job.pid, how)
    job.wait(timeout=60)
    assert wait_until(lambda: not any(map(is_running, pids)))


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PlanError, match=f"port {port} is in use; name another"):
            launch(on_ranks.total_of_ranks, 1, 1, port=port)


def test_worlds_that_do_not_fit() -> None:
    most = RANKS_PER_CORE * (os.cpu_count() or 1)
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


def test_memory_that_is_not_there(meshwise: Callable[..., Any]) -> None:
    outcome = meshwise("run", "ulysses", "--ranks", "2", "--seq", "1000000", "--hidden", "4096")
    assert outcome.code == 2
    assert "this machine has" in outcome.err and "use dryrun" in outcome.err


# --- worlds that others start -------------------------------------------------------------------


def test_place_under_torchrun_and_srun() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
    place = outside_place(torchrun)
    assert place is not None and (place.rank, place.world_size, place.local_rank) == (5, 16, 1)
    srun = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "12", "SLURM_LOCALID": "3"}
    place = outside_place(srun)
    assert place is not None and (place.rank, place.world_size, place.local_rank) == (9, 12, 3)
    assert outside_place({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert outside_place({}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[003-010,12],cpu1", "gpu003"), ("a,b", "a"), ("node-7", "node-7"), ("n[5,7]", "n5")],
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
    assert meeting_point({"SLURM_STEP_NODELIST": nodes}).startswith(f"tcp://{first}:")


def test_meeting_point_prefers_what_is_said() -> None:
    said = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "SLURM_STEP_NODELIST": "a"}
    assert meeting_point(said) == "tcp://10.0.0.1:1234"


def test_srun_and_torchrun_need_no_other_command() -> None:
    """The same words on every rank; rank 0 prints the one document, the others nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["run", "ulysses", "--seq", "16", "--hidden", "8", "--heads", "2", "--json"]
    worlds = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)} if rank else {
            "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"
        }
        for rank in range(2)
    ]  # fmt: skip
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "meshwise", *words]
    jobs = [
        subprocess.Popen(
            command, env=common | world, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for world in worlds
    ]
    outputs = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert '"ranks": 2' in outputs[0][0]
    assert outputs[1][0] == ""

"""The documented Slurm script under a real slurmctld and slurmd on this machine.

They need root and the packages slurmctld, slurmd and slurm-client; every file of theirs is in a folder of the
test, and authentication is off.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).parent.parent / "examples" / "slurm" / "run.sbatch"
DAEMONS = ("slurmctld", "slurmd")
CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
GresTypes=gpu
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a cluster of one node, this machine, with two GPUs in name."""
    if os.geteuid() != 0 or any(shutil.which(name) is None for name in (*DAEMONS, "sbatch", "srun")):
        pytest.skip("Slurm's daemons need root; install slurmctld, slurmd and slurm-client")
    (tmp_path / "state").mkdir()
    (tmp_path / "spool").mkdir()
    path, host = tmp_path / "slurm.conf", socket.gethostname()
    ports = free_port(), free_port()
    path.write_text(CONFIG.format(host=host, folder=tmp_path, ports=ports, cpus=os.cpu_count()))
    (tmp_path / "gres.conf").write_text(
        "Name=gpu File=/dev/zero\nName=gpu File=/dev/full\n"
    )  # devices in name
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"SLURM_CONF": str(path), "PATH": search}
    running = [
        subprocess.Popen([name, "-D", "-f", str(path)], env=environment, stderr=subprocess.DEVNULL)
        for name in DAEMONS
    ]
    try:
        yield environment
    finally:
        for daemon in running:
            daemon.terminate()
        for daemon in running:
            daemon.wait(timeout=20)


def ask(environment: dict[str, str], *words: str) -> str:
    return subprocess.run(words, env=environment, capture_output=True, text=True).stdout


def wait_for(environment: dict[str, str], words: tuple[str, ...], wanted: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while wanted not in (said := ask(environment, *words)):
        assert time.monotonic() < end, f"{' '.join(words)}: {said}"
        time.sleep(0.5)


def test_the_documented_script_runs_two_ranks(slurm: dict[str, str], tmp_path: Path) -> None:
    wait_for(slurm, ("sinfo", "--noheader", "--format=%T"), "idle", 60)
    sizes = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", f"--output={tmp_path}/job.log")
    words = (*sizes, "--overcommit", "--parsable", str(SCRIPT), "ulysses", "--seq", "64", "--hidden", "32")
    job = ask(slurm | {"DEVICE": "cpu"}, "sbatch", *words, "--heads", "4").strip()
    assert job.isdigit()
    wait_for(slurm, ("scontrol", "show", "job", job), "JobState=COMPLETED", 200)
    log = (tmp_path / "job.log").read_text()
    assert "rank 0 of 2 on cpu: peak memory" in log

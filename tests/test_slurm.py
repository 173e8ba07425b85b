"""The documented Slurm script under a real slurmctld and slurmd on this machine.

A second node is a second slurmd under the machine's other name, localhost, on a port of its own.
They need root and the packages slurmctld, slurmd and slurm-client; every file of theirs is in two folders of
the test, and authentication is off.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_tables import DATA, ROOT

pytest.importorskip("torch")

import meshwise as mw
from ports import own_port

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "examples" / "slurm" / "run.sbatch"
DAEMONS = ("slurmctld", "slurmd")
NODE = "NodeName={name} NodeHostname={host} Port={port} CPUs={cpus} Gres=gpu:2 State=UNKNOWN\n"
PARTITION = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a cluster of two nodes, both this machine, with two GPUs each in name."""
    if os.geteuid() != 0 or any(shutil.which(name) is None for name in (*DAEMONS, "sbatch", "srun")):
        pytest.skip("Slurm's daemons need root; install slurmctld, slurmd and slurm-client")
    path, host = tmp_path / "slurm.conf", socket.gethostname()
    names = (host, "localhost")
    (tmp_path / "state").mkdir()
    spool = Path(tempfile.mkdtemp(prefix="slurm-"))  # holds sockets, whose paths have 107 bytes at most
    for name in names:
        (spool / name).mkdir()
    nodes = [NODE.format(name=name, host=host, port=own_port(), cpus=os.cpu_count()) for name in names]
    config = (DATA / "slurm.conf").read_text()
    path.write_text(
        config.format(host=host, folder=tmp_path, spool=spool, port=own_port()) + "".join(nodes) + PARTITION
    )
    devices = "Name=gpu File=/dev/zero\nName=gpu File=/dev/full\n"  # in name
    (tmp_path / "gres.conf").write_text(devices)
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"SLURM_CONF": str(path), "PATH": search}
    daemons = [[DAEMONS[0]], *([DAEMONS[1], "-N", name] for name in names)]
    running = [
        subprocess.Popen([*words, "-D", "-f", str(path)], env=environment, stderr=subprocess.DEVNULL)
        for words in daemons
    ]
    try:
        wait_for(environment, ("sinfo", "--noheader", "--format=%D %T"), "2 idle", 60)
        yield environment
    finally:
        for daemon in running:
            daemon.terminate()
        for daemon in running:
            daemon.wait(timeout=20)
        shutil.rmtree(spool, ignore_errors=True)


def ask(environment: dict[str, str], *words: str) -> str:
    return subprocess.run(words, env=environment, capture_output=True, text=True).stdout


def wait_for(environment: dict[str, str], words: tuple[str, ...], wanted: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while wanted not in (said := ask(environment, *words)):
        assert time.monotonic() < end, f"{' '.join(words)}: {said}"
        time.sleep(0.5)


def test_a_job_finds_its_own_file(slurm: dict[str, str], tmp_path: Path) -> None:
    """From the folder in which `sbatch job/job.sbatch` is said, in a copy elsewhere."""
    mw.launch("llama3-8b", "h100:1", "", to="tensorrt-llm", batch=8, seq=64).write(tmp_path / "job")
    (stub := tmp_path / "trtllm-serve").write_text('#!/bin/bash\ncat "${@: -2:1}"\n')
    stub.chmod(0o755)
    words = f"PATH={tmp_path}:$PATH sbatch --output=job.log --wait job/job.sbatch last"
    subprocess.run(words, shell=True, env=slurm, cwd=tmp_path, timeout=100, check=True)
    assert "enable_attention_dp: false" in (tmp_path / "job.log").read_text()


def test_the_documented_script_runs_on_two_nodes(slurm: dict[str, str], tmp_path: Path) -> None:
    sizes = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1")
    words = (*sizes, f"--output={tmp_path}/job.log", "--overcommit", "--parsable", str(SCRIPT))
    words += ("ulysses", "--seq", "64", "--hidden", "32")
    job = ask(slurm | {"DEVICE": "cpu"}, "sbatch", *words, "--heads", "4").strip()
    assert job.isdigit()
    wait_for(slurm, ("scontrol", "show", "job", job), "JobState=COMPLETED", 200)
    assert "NumNodes=2 " in ask(slurm, "scontrol", "show", "job", job)
    log = (tmp_path / "job.log").read_text()
    assert "rank 0 of 2 on cpu: peak memory" in log

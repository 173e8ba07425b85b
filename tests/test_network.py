"""Predicted against measured communication, over links whose speed is known.

Two hosts, each a network namespace with two ranks, joined by a virtual cable that a token bucket slows
down. The ranks talk over gloo, as on a real cluster. The prediction knows the cable's rate, nothing else.

The cable loses nothing and its rate is all there is to know of it: the bucket's queue is longer than what
can be under way, and TCP's congestion control is Reno, which without losses keeps the cable full. (BBR, the
default of many systems, makes its own model of the cable and leaves a third of it idle where both
directions are busy.)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwise.cost.collective import collective_s

pytest.importorskip("torch")

from network_worker import (
    BURST_BYTES,
    COLLECTIVES,
    HOLD_S,
    PROGRAMS,
    RANKS_PER_HOST,
    RATE_BYTES_PER_S,
    address,
)

# TCP with timestamps over Ethernet: 1448 bytes of payload in a frame of 1514
LINK_BYTES_PER_S = RATE_BYTES_PER_S * 1448 / 1514
NUM_HOSTS = 2
WORLD_SIZE = RANKS_PER_HOST * NUM_HOSTS
MEMORY_BYTES_PER_S = 1e10  # between ranks of a host: so fast that it does not bind
TOLERANCE = 0.15


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Two namespaces whose cable carries `RATE_BYTES_PER_S` in each direction."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("making hosts needs root and iproute2")
    names = [f"meshwise-{os.getpid()}-{host}" for host in range(NUM_HOSTS)]
    cables = [f"mw{os.getpid() % 100000}-{host}" for host in range(NUM_HOSTS)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system makes no network namespaces: {error.stderr.strip()}")
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for host, (name, cable) in enumerate(zip(names, cables, strict=True)):
            ip("link", "set", cable, "netns", name)
            inside = ["netns", "exec", name]
            ip(*inside, "ip", "link", "set", "lo", "up")
            ip(*inside, "ip", "link", "set", cable, "name", "cable")
            ip(*inside, "ip", "addr", "add", f"{address(host)}/24", "dev", "cable")
            ip(*inside, "ip", "link", "set", "cable", "up")
            ip(*inside, "sysctl", "-w", "net.ipv4.tcp_slow_start_after_idle=0")
            ip(*inside, "sysctl", "-w", "net.ipv4.tcp_congestion_control=reno")
            rate = [f"{8 * RATE_BYTES_PER_S:.0f}bit", "burst", str(BURST_BYTES), "limit", "64mb"]
            ip(*inside, "tc", "qdisc", "add", "dev", "cable", "root", "tbf", "rate", *rate)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start_ranks(hosts: list[str], port: int, script: str, *words: str) -> list[subprocess.Popen[str]]:
    """Start a script of this folder on every rank, as srun or torchrun would."""
    ranks = []
    for rank in range(WORLD_SIZE):
        environment = {
            **os.environ,
            **{"RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "LOCAL_RANK": str(rank % RANKS_PER_HOST)},
            **{"MASTER_ADDR": address(0), "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "cable"},
            "OMP_NUM_THREADS": "1",
        }
        inside = ["ip", "netns", "exec", hosts[rank // RANKS_PER_HOST]]
        command = [*inside, sys.executable, str(Path(__file__).parent / script), *words]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, env=environment, **pipes))
    return ranks


def outputs_of(ranks: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """What the ranks print until they end; none is left."""
    try:
        return [rank.communicate(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.fixture(scope="module")
def measured(hosts: list[str]) -> list[dict[str, Any]]:
    """Start the ranks on their hosts and wait for what they measured."""
    ranks = start_ranks(hosts, 29512, "network_worker.py")
    outputs = outputs_of(ranks)
    failed = [error for rank, (_, error) in zip(ranks, outputs, strict=True) if rank.returncode]
    assert not failed, failed[0]
    result: list[dict[str, Any]] = json.loads(outputs[0][0].splitlines()[-1])
    return result


def predicted_s(kind: Any, payload_bytes: float) -> float:
    """Over all ranks. Both ranks of a host share the cable. gloo reduce-scatters by an all-reduce."""
    return HOLD_S + float(
        collective_s(
            "all_reduce" if kind == "reduce_scatter" else kind,
            payload_bytes,
            WORLD_SIZE,
            link_bytes_per_s=(MEMORY_BYTES_PER_S, LINK_BYTES_PER_S / RANKS_PER_HOST),
            link_latency_s=(0.0, 0.0),
            link_ranks=(RANKS_PER_HOST, float("inf")),
        )
    )


CASES = [("alone", kind) for kind in COLLECTIVES] + [
    *(("model-2d", kind) for kind in ("all_gather", "reduce_scatter")),
    ("ulysses", "all_to_all"),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_communication_takes_the_predicted_time(name: str, kind: str, measured: list[dict[str, Any]]) -> None:
    """Each collective of 8 MiB and more, alone and where the programs issue it."""
    found = [each for each in measured if (each["name"], each["kind"]) == (name, kind)]
    assert found
    predicted = [predicted_s(kind, each["payload_bytes"]) for each in found]
    assert [each["time_s"] for each in found] == pytest.approx(predicted, rel=TOLERANCE)


def test_no_large_collective_is_left_out(measured: list[dict[str, Any]]) -> None:
    assert {(each["name"], each["kind"]) for each in measured} == set(CASES)
    assert {name for name, _ in CASES} == {"alone", *PROGRAMS}


def sentence(rank: subprocess.Popen[str]) -> str:
    """The next sentence of ours that a rank says, among torch's own warnings."""
    lines = iter(rank.stderr.readline, "")  # type: ignore[union-attr]
    return next(line for line in lines if line.startswith("meshwise: "))


def test_a_lost_network_is_named_and_may_come_back(hosts: list[str], tmp_path: Path) -> None:
    """Within 15 s the ranks of each host name those that they cannot hear; the job goes on where it was."""
    met, end = tmp_path / "met", tmp_path / "end"
    ranks = start_ranks(hosts, 29513, "outside_job.py", "meet_until", str(met), str(end))
    try:
        while not met.exists():
            assert not any(map(subprocess.Popen.poll, ranks)), outputs_of(ranks)
            time.sleep(0.1)
        ip("netns", "exec", hosts[1], "ip", "link", "set", "cable", "down")
        lost_s = time.monotonic()
        heard = [sentence(ranks[rank]) for rank in (0, 0, 2, 3)]
        assert time.monotonic() - lost_s < 15
    finally:
        ip("netns", "exec", hosts[1], "ip", "link", "set", "cable", "up")
        end.touch()
        outputs = outputs_of(ranks)
    pairs = ((0, 2), (0, 3), (2, 0), (3, 0))
    says = [f"meshwise: rank {rank} hears nothing of rank {other}, and waits; " for rank, other in pairs]
    assert all(map(str.startswith, heard, says)), heard
    assert [rank.returncode for rank in ranks] == [0] * WORLD_SIZE, outputs

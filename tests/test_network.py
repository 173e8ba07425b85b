"""Predicted against measured communication, over links whose speed is known.

Two hosts, each a network namespace with two ranks, joined by a virtual cable that a token bucket slows
down. The ranks talk over gloo, as on a real cluster. The prediction knows the cable's rate, nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshwise.cost.collective import collective_s

pytest.importorskip("torch")

RATE_BITS_PER_S = 100e6
# TCP with timestamps over Ethernet: 1448 bytes of payload in a frame of 1514
LINK_BYTES_PER_S = RATE_BITS_PER_S / 8 * 1448 / 1514
RANKS_PER_HOST, NUM_HOSTS = 2, 2
MEMORY_BYTES_PER_S = 1e10  # between ranks of a host: so fast that it does not bind
TOLERANCE = 0.15
ATTEMPTS = 3


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Two namespaces, 10.231.0.1 and .2, whose cable carries `RATE_BITS_PER_S` in each direction."""
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
            ip(*inside, "ip", "addr", "add", f"10.231.0.{host + 1}/24", "dev", "cable")
            ip(*inside, "ip", "link", "set", "cable", "up")
            ip(*inside, "sysctl", "-w", "net.ipv4.tcp_slow_start_after_idle=0")
            shape = ["rate", f"{RATE_BITS_PER_S:.0f}bit", "burst", "128kb", "limit", "1mb"]
            ip(*inside, "tc", "qdisc", "add", "dev", "cable", "root", "tbf", *shape)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


Measured = list[dict[str, Any]]


@pytest.fixture(scope="module")
def measured(hosts: list[str]) -> Callable[[int], Measured]:
    """What every rank measured, by rank, at the first, second, ... attempt."""
    return cache(lambda attempt: measure(hosts))


def measure(hosts: list[str]) -> Measured:
    """Start the ranks on their hosts and wait for what they measured."""
    world_size = RANKS_PER_HOST * NUM_HOSTS
    ranks = []
    for rank in range(world_size):
        environment = {
            **os.environ,
            **{"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % RANKS_PER_HOST)},
            **{"MASTER_ADDR": "10.231.0.1", "MASTER_PORT": "29512", "GLOO_SOCKET_IFNAME": "cable"},
            "OMP_NUM_THREADS": "1",
        }
        command = ["ip", "netns", "exec", hosts[rank // RANKS_PER_HOST], sys.executable]
        worker = str(Path(__file__).parent / "network_worker.py")
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen([*command, worker], env=environment, **pipes))
    try:
        outputs = [rank.communicate(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [error for rank, (_, error) in zip(ranks, outputs, strict=True) if rank.returncode]
    assert not failed, failed[0]
    result: Measured = json.loads(outputs[0][0].splitlines()[-1])
    return result


def predicted_s(kind: Any, payload_bytes: float) -> float:
    """Over all ranks. Both ranks of a host share the cable. gloo reduce-scatters by an all-reduce."""
    return float(
        collective_s(
            "all_reduce" if kind == "reduce_scatter" else kind,
            payload_bytes,
            RANKS_PER_HOST * NUM_HOSTS,
            link_bytes_per_s=(MEMORY_BYTES_PER_S, LINK_BYTES_PER_S / RANKS_PER_HOST),
            link_latency_s=(0.0, 0.0),
            link_ranks=(RANKS_PER_HOST, float("inf")),
        )
    )


def check_within(
    measured: Callable[[int], Measured], pairs: Callable[[Measured], list[tuple[float, float]]]
) -> None:
    """All of (measured, predicted) agree at one of three attempts: what else the machine does is noise."""
    for attempt in range(ATTEMPTS):
        times = pairs(measured(attempt))
        if all(took == pytest.approx(predicted, rel=TOLERANCE) for took, predicted in times):
            return
    assert [took for took, _ in times] == pytest.approx([predicted for _, predicted in times], rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
def test_collectives_take_the_predicted_time(kind: str, measured: Callable[[int], Measured]) -> None:
    def pairs(results: Measured) -> list[tuple[float, float]]:
        samples = [sample for sample in results[0]["alone"] if sample["kind"] == kind]
        return [(sample["time_s"], predicted_s(kind, sample["payload_bytes"])) for sample in samples]

    check_within(measured, pairs)


# Of the exchanges in `ulysses` two follow another directly; before the others the ranks compute, and on a
# machine with fewer cores than ranks they do not end together: what they wait there is not the link's.
ALIGNED = {"model-2d": ("input", "output", "W1", "W2"), "ulysses": ("k", "v")}


@pytest.mark.parametrize("program", list(ALIGNED))
def test_programs_communicate_as_long_as_predicted(program: str, measured: Callable[[int], Measured]) -> None:
    check_within(measured, lambda results: [exchanges(program, results)])


def exchanges(program: str, measured: Measured) -> tuple[float, float]:
    """Measured and predicted seconds of a program's large exchanges.

    Per collective the shortest time of any rank, for who comes last waits for nobody; the best run.
    """
    took: dict[str, list[float]] = {}
    predicted = 0.0
    for number, runs in enumerate(zip(*(rank["inside"][program] for rank in measured), strict=True)):
        for rows in zip(*runs, strict=True):
            row = rows[0]
            if row["payload_bytes"] >= 8 << 20 and row["op"] in ALIGNED[program]:
                place = f"{row['op']} {row['collective']} {row['phase']}"
                took.setdefault(place, []).append(row["count"] * min(row["time_s"] for row in rows))
                if number == 0:
                    predicted += row["count"] * predicted_s(row["collective"], row["payload_bytes"])
    assert predicted > 0.1
    return sum(map(min, took.values())), predicted

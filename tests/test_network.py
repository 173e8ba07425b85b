"""Predicted against measured communication, over links whose speed is known.

Two hosts, each a network namespace with two ranks, joined by a virtual cable that a token bucket slows
down. The ranks talk over gloo, as on a real cluster. The prediction knows the cable's rate, nothing else.

The cable loses nothing and its rate is all there is to know of it: the bucket's queue is longer than what
can be under way, and TCP's congestion control is Reno, which without losses keeps the cable full. (BBR, the
default of many systems, makes its own model of the cable and leaves a third of it idle where both
directions are busy.)
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwise.cost.collective import collective_s
from meshwise.machine.hardware import Link

pytest.importorskip("torch")

from forks import Script, start_script
from network_worker import BURST_BYTES, COLLECTIVES, HOLD_S, RANKS_PER_HOST, RATE_BYTES_PER_S, address

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


def start_ranks(hosts: list[str], port: int, folder: Path, *words: str) -> list[Script]:
    """Start a script of this folder on every rank, with what srun or torchrun would say to each."""
    common = {"WORLD_SIZE": str(WORLD_SIZE), "GLOO_SOCKET_IFNAME": "cable"}
    common |= {"MASTER_ADDR": address(0), "MASTER_PORT": str(port)}
    path = str(Path(__file__).parent / words[0])
    ranks = []
    for rank in range(WORLD_SIZE):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % RANKS_PER_HOST)}
        host = hosts[rank // RANKS_PER_HOST]
        ranks.append(start_script(folder, [path, *words[1:]], common | own, host))
    return ranks


@pytest.fixture(scope="module")
def measured(hosts: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Start the ranks on their hosts and wait for what they measured."""
    ranks = start_ranks(hosts, 29512, tmp_path_factory.mktemp("measured"), "network_worker.py")
    failed = [rank.err.read_text() for rank in ranks if rank.end()]
    assert not failed, failed[0]
    result: list[dict[str, Any]] = json.loads(ranks[0].out.read_text().splitlines()[-1])
    return result


def predicted_s(kind: Any, payload_bytes: float) -> float:
    """Over all ranks. Both ranks of a host share the cable. gloo reduce-scatters by an all-reduce."""
    inside = Link(MEMORY_BYTES_PER_S, 0.0, RANKS_PER_HOST)
    links = inside, Link(LINK_BYTES_PER_S / RANKS_PER_HOST, 0.0, float("inf"))
    kind = "all_reduce" if kind == "reduce_scatter" else kind
    return HOLD_S + float(collective_s(kind, payload_bytes, WORLD_SIZE, links=links))


CASES = [("alone", kind) for kind in COLLECTIVES]
CASES += [("model-2d", "all_gather"), ("model-2d", "reduce_scatter"), ("ulysses", "all_to_all")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_communication_takes_the_predicted_time(name: str, kind: str, measured: list[dict[str, Any]]) -> None:
    """Each collective of 8 MiB and more, alone and where the programs issue it."""
    assert {(each["name"], each["kind"]) for each in measured} == set(CASES)
    found = [each for each in measured if (each["name"], each["kind"]) == (name, kind)]
    predicted = [predicted_s(kind, each["payload_bytes"]) for each in found]
    assert [each["time_s"] for each in found] == pytest.approx(predicted, rel=TOLERANCE)

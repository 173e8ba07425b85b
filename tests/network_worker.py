"""What each rank of `test_network.py` runs; the environment says which rank it is, as under torchrun.

Before each collective the ranks meet: they begin at one moment of the clock that all share, and in a state
of the cable that is known, not empty by chance. Datagrams sent just before spend what the token bucket has
saved up, and hold the cable for `HOLD_S`. In that time every rank enters the collective and posts what it
will receive. Without it the times depend on who comes first: gloo's notice that it is ready to receive waits
behind the data that it sends to the same rank, so two that are not ready together send one after the other,
and an all-to-all takes up to twice as long.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwise.core.ledger import Ledger
from meshwise.runtime import recorder, start
from meshwise.runtime.calibrate import collective_time_s
from meshwise.runtime.launch import RankPlace, launch
from meshwise.runtime.programs import find_program, parse_options
from meshwise.runtime.recorder import OpRecorder

RATE_BYTES_PER_S = 100e6 / 8
BURST_BYTES = 256 << 10  # a timer that is late by 20 ms costs the cable nothing
HOLD_S = 0.05
RANKS_PER_HOST = 2
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
PAYLOAD_BYTES = 8 << 20
REPEATS = 3
NUM_RUNS = 2
PROGRAMS = {
    "model-2d": "--seq 32768 --hidden 64 --ffn-hidden 64 --layers 1 --tp 4 --dtype fp32 --backward "
    "--no-after-ulysses",
    "ulysses": "--seq 4096 --hidden 1024 --heads 8 --dtype fp64 --attention flash --causal",
}

_DATAGRAM, _FRAME = 1472, 1514  # payload, and bytes on the cable
_MEET_S = 0.15  # longer than the word to meet takes to reach all ranks
_EARLY_S = 0.005


@dataclass(frozen=True)
class Took:
    """One collective: the seconds of the slowest rank, in the fastest repetition."""

    name: str
    kind: str
    payload_bytes: float
    time_s: float


class Cable:
    """This host's end of the cable."""

    def __init__(self, rank: int) -> None:
        host = rank // RANKS_PER_HOST
        self._speaks = rank % RANKS_PER_HOST == 0
        self._other = address(1 - host), 9
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        if self._speaks:
            self._socket.bind((address(host), 9))
            self._socket.setsockopt(socket.SOL_SOCKET, 33, 4 << 20)  # SO_SNDBUFFORCE: never wait

    def meet(self) -> None:
        """Return on every rank at the same moment, the cable held for `HOLD_S` from then."""
        now_s = torch.tensor([time.monotonic()], dtype=torch.float64)
        dist.all_reduce(now_s, op=dist.ReduceOp.MAX)
        begin_s = float(now_s) + _MEET_S
        _sleep_until(begin_s - _EARLY_S)
        if self._speaks:
            for _ in range(int((BURST_BYTES + RATE_BYTES_PER_S * (HOLD_S + _EARLY_S)) / _FRAME)):
                self._socket.sendto(bytes(_DATAGRAM), self._other)
        _sleep_until(begin_s)


def address(host: int) -> str:
    """The address of a host on the cable."""
    return f"10.231.0.{host + 1}"


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()))


class Together(OpRecorder):
    """A recorder of programs whose ranks meet before each collective: nobody waits for who comes last."""

    cable: Cable

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_collective = func.namespace in ("c10d", "_c10d_functional")
        if is_collective and "wait" not in func.__name__:
            self.cable.meet()
        return super().__torch_dispatch__(func, types, args, kwargs)


def measure(place: RankPlace) -> list[dict[str, Any]]:
    """Times of the collectives alone, and of each that the programs issue on this rank."""
    Together.cable = Cable(place.rank)
    meet = Together.cable.meet
    took = []
    for kind in COLLECTIVES:
        time_s = collective_time_s(place, kind, PAYLOAD_BYTES, repeats=REPEATS, meet=meet)  # type: ignore[arg-type]
        took.append(Took("alone", kind, PAYLOAD_BYTES, time_s))
    recorder.OpRecorder = Together  # type: ignore[misc]
    for name, words in PROGRAMS.items():
        options = parse_options(find_program(name), words.split())
        runs = [start.run_rank(place, name, options, 0, True).ledger for _ in range(NUM_RUNS)]
        took += [fastest(name, rows) for rows in zip(*map(large_collectives, runs), strict=True)]
    return [asdict(each) for each in took]


def large_collectives(ledger: Ledger) -> list[dict[str, Any]]:
    """The rows of the collectives of a program that are large, `time_s` that of the slowest rank."""
    rows = [row for row in ledger.rows() if row["collective"] and row["payload_bytes"] >= PAYLOAD_BYTES]
    slowest_s = torch.tensor([row["time_s"] for row in rows])
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    return [row | {"time_s": float(time_s)} for row, time_s in zip(rows, slowest_s, strict=True)]


def fastest(name: str, rows: Sequence[dict[str, Any]]) -> Took:
    """One collective of several runs."""
    kind, payload_bytes = rows[0]["collective"], rows[0]["payload_bytes"]
    return Took(name, kind, payload_bytes, min(row["time_s"] for row in rows))


if __name__ == "__main__":
    with suppress(OSError):  # on a busy machine the ranks come first, with all their threads
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    results = launch(measure, int(os.environ["WORLD_SIZE"]))
    if results is not None:
        print(json.dumps(results[0]))

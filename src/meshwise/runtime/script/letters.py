"""Python objects that ranks send each other, as pipeline stages do to agree on shapes.

A rank that waits for an object of another one starts the same program as that rank, and so on. The objects
are files in a folder that all of them share, read as data: plain values, tensors, and what pipeline stages
say of tensors. Only the rank asked for reports; the others end with it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist
from torch import load, save  # before stand-ins take their place
from torch.serialization import safe_globals

from meshwise.runtime.script.start import rank_environment
from meshwise.runtime.torch_private import MeshLayout, pipelining_utils

_WAIT_S, _POLL_S = 300.0, 0.05
FAILED = "failed-{}"


class Letters:
    """Objects by sender, receiver and number; `settings` are those of the hook."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings, self._rank = settings, settings["rank"]
        self._folder = Path(settings["folder"])
        self._counts: Counter[tuple[int, int]] = Counter()

    def send(self, given: list[Any], dst: int | None = None, group: Any = None, *_: Any, **how: Any) -> None:
        """In place of `send_object_list`."""
        path = self._next(self._rank, _peer(dst, group, how.get("group_dst")))
        partial = path.with_suffix(".partial")
        save(given, partial)
        partial.rename(path)

    def receive(self, into: list[Any], src: int | None = None, group: Any = None, *_: Any, **how: Any) -> int:
        """In place of `recv_object_list`."""
        sender = _peer(src, group, how.get("group_src"))
        path = self._next(sender, self._rank)
        self._start(sender)
        begin = time.monotonic()
        while not path.exists():
            if (self._folder / FAILED.format(sender)).exists():
                raise RuntimeError(f"rank {sender}, whose objects this rank waits for, failed")
            if time.monotonic() - begin > _WAIT_S:
                raise RuntimeError(f"rank {sender} has sent no object within {_WAIT_S:.0f} s")
            time.sleep(_POLL_S)
        into[:] = _read(path, sender)
        return sender

    def _next(self, sender: int, receiver: int) -> Path:
        self._counts[sender, receiver] += 1
        return self._folder / f"{sender}-{receiver}-{self._counts[sender, receiver]}"

    def _start(self, rank: int) -> None:
        """Start the program as `rank`, unless some rank has done so."""
        try:
            (self._folder / f"started-{rank}").touch(exist_ok=False)
        except FileExistsError:
            return
        command: Sequence[str] = self._settings["command"]
        program = sys.executable if command[0] in ("python", "python3") else command[0]
        environment = rank_environment(self._settings | {"rank": rank})
        silent = subprocess.DEVNULL
        subprocess.Popen([program, *command[1:]], env=environment, stdout=silent, stderr=silent)


def _read(path: Path, sender: int) -> list[Any]:
    """The objects of a file, none of which can run code."""
    stages = [found for found in vars(pipelining_utils).values() if is_dataclass(found)]
    try:
        with safe_globals([*stages, MeshLayout]):
            return load(path, weights_only=True)
    except UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        kind = found[1] if found else "some class"
        raise RuntimeError(f"rank {sender} sends an object of {kind}; send plain values or tensors") from None


def _peer(rank: int | None, group: Any, group_rank: int | None) -> int:
    """The global rank of a peer, which may be named by its place in `group`."""
    if group_rank is not None:
        return dist.get_global_rank(group or dist.group.WORLD, group_rank)
    return int(rank or 0)

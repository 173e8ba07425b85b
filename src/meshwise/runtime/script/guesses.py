"""What a program asked of a fake rank that it cannot know, what was assumed, and where in the code."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

_PACKAGES = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
_OURS = str(Path(__file__).parents[2])


class Guesses:
    """All guesses of a run, by what happened and where: what the program got, a way round, and how often."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], dict[str, Any]] = {}

    def add(self, what: str, assumed: str, remedy: str = "") -> None:
        """The program, where it stands now, did `what` and got `assumed`."""
        place = place_of(sys._getframe(1))
        guess = {"what": what, "place": place, "assumed": assumed, "remedy": remedy, "count": 0}
        self._found.setdefault((what, place), guess)["count"] += 1

    def to_json(self) -> list[dict[str, Any]]:
        """The guesses, in the order of their first."""
        return list(self._found.values())


def place_of(frame: Any) -> str:
    """File and line of the innermost frame of the user's own code; else of a package's."""
    frames = [(step.f_code.co_filename, line) for step, line in traceback.walk_stack(frame)]
    return _innermost(frames)


def place_of_error(error: BaseException) -> str:
    """File and line where the user's own code met `error`."""
    frames = [(step.f_code.co_filename, line) for step, line in traceback.walk_tb(error.__traceback__)]
    return _innermost(frames[::-1])


def _innermost(frames: list[tuple[str, int]]) -> str:
    outside = [frame for frame in frames if not frame[0].startswith((_OURS, "<"))]
    own = [frame for frame in outside if not _is_packaged(frame[0])]
    torchless = [frame for frame in outside if "/torch/" not in frame[0]]
    found = next((f"{file}:{line}" for file, line in (*own, *torchless, *outside)), "?")
    return found.rpartition("site-packages/")[2]


def _is_packaged(file: str) -> bool:
    return "site-packages" in file or any(file.startswith(folder) for folder in _PACKAGES if folder)

"""What a program asked of a fake rank that it cannot know, what was assumed, and where in the code."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_PACKAGES = tuple(map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
_OURS = str(Path(__file__).parents[2])


class Guesses:
    """All guesses of a run, by what happened and where: what the program got, a way round, and how often."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], dict[str, Any]] = {}

    def add(self, what: str, assumed: str, remedy: str = "") -> None:
        """The program, where it stands now, did `what` and got `assumed`."""
        place = place_of(traceback.walk_stack(sys._getframe(1)))
        guess = {"what": what, "place": place, "assumed": assumed, "remedy": remedy, "count": 0}
        self._found.setdefault((what, place), guess)["count"] += 1

    def to_json(self) -> list[dict[str, Any]]:
        """The guesses, in the order of their first."""
        return list(self._found.values())


def place_of(steps: Iterable[tuple[Any, int]]) -> str:
    """File and line of the innermost of these frames that is the user's own code; else of a package's."""
    frames = [(step.f_code.co_filename, line) for step, line in steps]
    outside = [frame for frame in frames if not frame[0].startswith((_OURS, "<"))]
    packaged = [frame for frame in outside if frame[0].startswith(_PACKAGES) or "site-packages" in frame[0]]
    own = [frame for frame in outside if frame not in packaged]
    torchless = [frame for frame in outside if "/torch/" not in frame[0]]
    found = next((f"{file}:{line}" for file, line in (*own, *torchless, *outside)), "?")
    return found.rpartition("site-packages/")[2]

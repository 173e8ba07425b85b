"""Why one plan takes longer than another: its keys changed one after the other, and what each change moves.

The order is greedy: of the keys that are left, the one that makes the step shortest goes first. Keys that
make no plan alone change together with others.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwise.core.errors import MeshwiseError
from meshwise.estimate.one_plan import Estimate
from meshwise.plan.plan import KEYS

MICROBATCH = "microbatch"


@dataclass(frozen=True, slots=True)
class Reason:
    """What `keys` add where they have the value of `run`, and not the one before it."""

    keys: tuple[str, ...]
    before: Estimate
    run: Estimate

    @property
    def gain_s(self) -> float:
        """How much shorter the step becomes."""
        return self.before.step_s - self.run.step_s

    @property
    def more_s(self) -> dict[str, float]:
        """How much longer each term becomes, the largest change first."""
        more = {name: second - self.before.time_s[name] for name, second in self.run.time_s.items()}
        return dict(sorted(more.items(), key=lambda term: -abs(term[1])))

    @property
    def more_bytes(self) -> float:
        """How much more memory the plan needs."""
        return self.run.memory_bytes["total"] - self.before.memory_bytes["total"]

    @property
    def text(self) -> str:
        """The change as a person says it: tp 8 to 4."""
        return ", ".join(f"{key} {_shown(key, self.before)} to {_shown(key, self.run)}" for key in self.keys)

    def to_json(self) -> dict[str, Any]:
        """The change, and what it moves."""
        moved = {name: getattr(self, name) for name in ("gain_s", "more_s", "more_bytes")}
        return {"change": self.text, "step_s": self.run.step_s, **moved, "fits": self.run.fits}


def reasons(asked: Estimate, best: Estimate) -> list[Reason]:
    """The changes that lead from a plan to another one of the same job, in their order."""
    found: list[Reason] = []
    here, start = asked, asked
    idle: list[str] = []  # what changes nothing yet is told with what it comes to matter with
    while left := _differing(here, best):
        reason = next(_changes(here, best, left), None)
        if reason is None:
            return found
        here = reason.run
        if reason.gain_s == reason.more_bytes == 0.0:
            idle += reason.keys
        else:
            found.append(replace(reason, keys=(*idle, *reason.keys), before=start))
            start, idle = here, []
    return found


def _changes(here: Estimate, best: Estimate, left: Sequence[str]) -> Iterator[Reason]:
    """The best change of one key, of two where one alone makes no plan, or of all."""
    for number in (1, 2, len(left)):
        tried = (_changed(here, best, left, keys) for keys in itertools.combinations(left, number))
        runs = [one for one in tried if one is not None]
        if runs:
            yield min(runs, key=lambda one: one.run.step_s)


def _changed(here: Estimate, best: Estimate, left: Sequence[str], keys: tuple[str, ...]) -> Reason | None:
    """The plan `here` with the best's values of `keys`; None where it is none, or they change others back."""
    try:
        run = here.changed(**{key: _value(key, best) for key in keys})
    except MeshwiseError:
        return None
    return Reason(keys, here, run) if {*_differing(run, best)} <= {*left} - {*keys} else None


def _differing(here: Estimate, best: Estimate) -> list[str]:
    """The keys whose values differ, those that follow from others included."""
    return [key for key in (*KEYS, MICROBATCH) if _value(key, here) != _value(key, best)]


def _value(key: str, found: Estimate) -> Any:
    return found.workload.microbatch if key == MICROBATCH else getattr(found.plan, key)


def _shown(key: str, found: Estimate) -> str:
    value, shown = _value(key, found), str if key == MICROBATCH else KEYS[key].show
    return (value is not None and shown(value)) or "default"

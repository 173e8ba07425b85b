"""The step log of verl or NeMo-RL beside the prediction, phase by phase, and what to change first.

verl prints `timing_s/gen:58.1 - timing_s/update_actor:28.0 - ...` a step, NeMo-RL a list of
`generation: 58.00s (51.8%)`; both send the same names to their trackers. Seconds are means over the steps
but the first few, in which kernels are compiled and memory is allocated.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from meshwise.core.columns import grouped
from meshwise.core.errors import DataError
from meshwise.core.files import read_catalog, read_text
from meshwise.core.notebook import Shown
from meshwise.core.refusals import told
from meshwise.rl.step import PHASES, RlStep

WARM_UP_STEPS = 3
"""Steps that are left out where a log has more than twice as many."""

_NAMES = read_catalog("rl_log.toml")
_PHASE_OF = {name: phase for phase, names in _NAMES["phases"].items() for name in names}
_ADVICE: dict[str, str] = _NAMES["advice"]
_VALUE = r"[\"']?[:=,]\s*(?:np\.float\d*\()?(?P<value>[\d.]+(?:e[-+]?\d+)?)"
_TIME = re.compile(r"(?:timing_s/|timing/train/|[•*] +)(?P<name>[\w ]+?)" + _VALUE)


@dataclass(frozen=True, slots=True)
class StepLog:
    """Mean seconds of a logged step by phase, and in all; `lengths`: tokens of a prompt and of its output."""

    phases_s: dict[str, float]
    step_s: float
    num_steps: int
    lengths: dict[str, float]

    @property
    def rest_s(self) -> float:
        """Seconds of a step that no phase of the log has."""
        return max(self.step_s - sum(self.phases_s.values()), 0.0)


def read_step_log(path: Path) -> StepLog:
    """A log of verl or NeMo-RL; DataError where it has no time of a step."""
    text = read_text(path, "step log")
    found = grouped(_TIME.finditer(text), lambda match: match["name"].strip())
    times = {name: [float(one["value"]) for one in same] for name, same in found.items()}
    totals = next((times[name] for name in _NAMES["step"] if name in times), [])
    if not totals:
        raise DataError(f"{path} is no log of verl (timing_s/step) or NeMo-RL (total step time)")
    first = WARM_UP_STEPS if len(totals) > 2 * WARM_UP_STEPS else 0
    phases_s = dict.fromkeys(PHASES, 0.0)
    for name, seconds in times.items():
        if name in _PHASE_OF and not (name == "generation" and "exposed_generation" in times):
            phases_s[_PHASE_OF[name]] += fmean(seconds[first:] or seconds)
    beside_s = sum(sum(times[name][first:]) for name in _NAMES["beside"] if name in times)
    num = len(totals) - first
    lengths = dict[str, float]()
    for name, logged in _NAMES["lengths"].items():
        tokens = [float(found["value"]) for found in re.finditer(f"(?:{logged}){_VALUE}", text)][first:]
        lengths |= {name: fmean(tokens)} if tokens else {}
    return StepLog(phases_s, fmean(totals[first:]) - beside_s / num, num, lengths)


@dataclass(frozen=True, slots=True, repr=False)
class RlExplanation(Shown):
    """A log beside the predicted `step`, if there is one."""

    log: StepLog
    step: RlStep | None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Seconds by phase, longest measured first; what no phase of the log has is `wait`."""
        measured = self.log.phases_s | {"wait": self.log.phases_s["wait"] + self.log.rest_s}
        predicted = self.step.phases_s if self.step else dict.fromkeys(PHASES)
        return [
            {"module": "step", "op": phase, "phase": phase}
            | {"predicted_s": predicted[phase], "measured_s": seconds}
            for phase, seconds in sorted(measured.items(), key=lambda item: -item[1])
        ]

    @property
    def findings(self) -> list[str]:
        """What to change first, in words."""
        rows, step_s, predicted_s = self.rows, self.log.step_s, self.step and self.step.step_s
        longest = rows[0]["phase"]
        names = {"longest": longest, "shortens": _ADVICE[longest], "frac": rows[0]["measured_s"] / step_s}
        if self.step is None or not predicted_s:
            return told("phases of a log", **names)
        longer_s = {row["phase"]: row["measured_s"] - row["predicted_s"] for row in rows}
        worst = max(longer_s, key=longer_s.__getitem__)
        names |= {"worst": worst, "longer_s": longer_s[worst], "advice": _ADVICE[worst], "step_s": step_s}
        between, change = self.step.step_s_interval, step_s / predicted_s - 1.0
        return told("step of a log", between=between, change=change, **names)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, with the keys of `explain`."""
        return {
            "step_s": {"predicted": self.step.step_s if self.step else None, "measured": self.log.step_s},
            "num_steps": self.log.num_steps,
            "rows": self.rows,
            "findings": self.findings,
        }

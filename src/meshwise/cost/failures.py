"""Failures: how often a large run is interrupted, and what share of its time survives.

A run on n devices is interrupted every M = device_s_between_interruptions / n seconds. It writes a
checkpoint (c seconds) after every tau seconds of work; an interruption costs a restart (R seconds)
and the work since the last checkpoint. With exponentially distributed interruptions, which may also
strike while writing and restarting, the time for tau seconds of work is

    M exp(R / M) (exp((tau + c) / M) - 1),

so the goodput, the share of time that is work kept, is tau over that. It is best near Young's
interval sqrt(2 c M); Daly's refinement is used here.

Sources: Young, CACM 17(9), 1974; Daly, Future Generation Computer Systems 22, 2006 (equations 13
and 37). The rate of interruptions is that of the Llama 3 report: see `catalog/failures.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwise.core.errors import WorkloadError
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse
from meshwise.core.units import Num

CHECKPOINT_BYTES_PER_PARAM = 14.0
"""fp32 weights, two Adam states and 16-bit weights, where nothing says otherwise."""


FAILURE_NUMBERS = ("device_s_between_interruptions", "storage_bytes_per_s", "restart_s")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Failures:
    """How often devices interrupt a run, and how fast it saves and restarts.

    `storage_bytes_per_s` is per device: storage grows with the cluster.
    """

    device_s_between_interruptions: float
    storage_bytes_per_s: float
    restart_s: float
    source: str = ""

    def __post_init__(self) -> None:
        refuse("failures", WorkloadError, of=self)

    @classmethod
    def llama3(cls) -> Failures:
        """419 interruptions in 54 days on 16,384 GPUs: one per 50.7 thousand GPU-hours."""
        entry = read_catalog("failures.toml")
        return cls(
            device_s_between_interruptions=entry["gpus"] * entry["days"] * 86400.0 / entry["interruptions"],
            storage_bytes_per_s=entry["storage_bytes_per_s"] / entry["gpus"],
            restart_s=entry["restart_s"],
            source=entry["source"],
        )

    def interruption_s(self, devices: Num) -> Num:
        """Mean time [s] between interruptions of a run on `devices`."""
        return self.device_s_between_interruptions / devices

    def checkpoint_s(self, num_bytes: Num, devices: Num) -> Num:
        """Time [s] to write a checkpoint of `num_bytes` from `devices` at once."""
        return num_bytes / (devices * self.storage_bytes_per_s)

    def goodput(self, num_bytes: Num, devices: Num) -> Num:
        """Share of time that is work kept, at the best interval between checkpoints of `num_bytes`."""
        mean_s, write_s = self.interruption_s(devices), self.checkpoint_s(num_bytes, devices)
        return goodput(checkpoint_interval_s(mean_s, write_s), mean_s, write_s, self.restart_s)


def checkpoint_interval_s(interruption_s: Num, checkpoint_s: Num) -> Num:
    """Daly's best time [s] of work between checkpoints: Young's with two more orders, M if c > 2 M."""
    ratio = checkpoint_s / (2 * interruption_s)
    refined = np.sqrt(2 * checkpoint_s * interruption_s) * (1 + np.sqrt(ratio) / 3 + ratio / 9)
    return np.where(ratio < 1, refined - checkpoint_s, interruption_s)


def goodput(interval_s: Num, interruption_s: Num, checkpoint_s: Num, restart_s: Num) -> Num:
    """Share of time that is work kept, checkpointing after every `interval_s` of work.

    Written with exp(-R/M) in front, so that a hopeless run has goodput zero and not an overflow.
    """
    period = np.minimum((interval_s + checkpoint_s) / interruption_s, 700.0)
    return np.exp(-restart_s / interruption_s) * (interval_s / interruption_s) / np.expm1(period)

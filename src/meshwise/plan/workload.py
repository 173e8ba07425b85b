"""What is done with the model in one step: how many sequences, how long, in what pieces."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwise.core.errors import WorkloadError

KINDS = ("train", "evaluate", "prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step: `batch` sequences of `seq` tokens in the whole world, `microbatch` of them at a time.

    `kind` is train, evaluate (forward only), prefill, or decode (one new token against `seq` cached).
    """

    batch: int
    seq: int
    microbatch: int = 1
    kind: str = "train"

    @property
    def num_tokens(self) -> int:
        """Tokens that one step processes in the whole world."""
        return self.batch * (1 if self.kind == "decode" else self.seq)

    def num_microbatches(self, dp: int) -> int:
        """Microbatches of one data-parallel rank; WorkloadError if the batch does not divide."""
        if self.batch % (dp * self.microbatch):
            raise WorkloadError(
                f"batch {self.batch} does not divide by dp={dp} x microbatch={self.microbatch}; "
                f"use a multiple of {dp * self.microbatch}"
            )
        return self.batch // (dp * self.microbatch)


def workload(batch: float, seq: float, microbatch: float = 1, kind: str = "train") -> Workload:
    """A checked `Workload`; WorkloadError names the number that is wrong."""
    if kind not in KINDS:
        raise WorkloadError(f"workload kind {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    numbers = {"batch": batch, "seq": seq, "microbatch": microbatch}
    for name, value in numbers.items():
        if not math.isfinite(value) or value < 1 or value != int(value):
            raise WorkloadError(f"{name} is {value}; it must be a whole number of at least 1")
    if batch % microbatch:
        raise WorkloadError(
            f"batch {batch} does not divide by microbatch {microbatch}; use a divisor of {batch}"
        )
    return Workload(batch=int(batch), seq=int(seq), microbatch=int(microbatch), kind=kind)

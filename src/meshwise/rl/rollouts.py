"""What a step of reinforcement learning generates: groups of samples of one prompt, and how long they are.

A length is lognormal, cut at the cap, where answers that would go on are ended. The stated mean is that of
the lengths that are cut already: with X lognormal (mu, sigma) and the cap c,

    E[min(X, c)] = exp(mu + sigma^2 / 2) N((ln c - mu - sigma^2) / sigma) + c (1 - N((ln c - mu) / sigma))

and mu is solved for. Half of the variance of the logarithm belongs to the prompt: hard prompts have long
answers in the whole group. Or lengths are drawn from those of a file.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwise.core.errors import DataError, WorkloadError
from meshwise.core.files import read_rows
from meshwise.core.refusals import refuse

SIGMA = 0.9
"""Deviation of the logarithm of lengths where nothing is stated: single tasks have 0.5 to 1.1."""

CAP_OVER_MEAN = 4
"""The cap over the mean of lengths where nothing is stated."""

PROMPT_VARIANCE_FRAC = 0.5
"""Share of the variance of the logarithm of lengths that the prompt decides."""

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """`prompts` groups of `samples` answers a step, to prompts of `prompt` tokens.

    Answers have `output` tokens on average and `max_output` at most; the logarithms of their lengths spread
    by `sigma`, or they are those of `lengths`. An answer of several `turns` waits `env_s` for its environment
    after each but the last, which adds `tool_tokens` to what the engine reads. `oversample`: groups that are
    generated for one that is trained on (DAPO drops those whose answers are all right, or all wrong).
    """

    prompts: int
    samples: int
    prompt: int
    output: float
    max_output: int
    sigma: float = SIGMA
    lengths: tuple[int, ...] = ()
    turns: int = 1
    env_s: float = 0.0
    tool_tokens: int = 0
    oversample: float = 1.0

    def __post_init__(self) -> None:
        refuse("rollouts", WorkloadError, of=self)

    @property
    def num_samples(self) -> int:
        """Answers that a step trains on."""
        return self.prompts * self.samples

    @property
    def num_groups(self) -> int:
        """Groups that a step generates."""
        return math.ceil(self.prompts * self.oversample)

    @property
    def longest(self) -> int:
        """Most tokens of a sample: prompt, answer and what tools return."""
        return self.prompt + self.max_output + (self.turns - 1) * self.tool_tokens

    def draw(self, groups: int, rng: np.random.Generator) -> Tokens:
        """Tokens of the answers of `groups` groups, by group and sample."""
        shape = (groups, self.samples)
        if self.lengths:
            return rng.choice(np.array(self.lengths), shape)
        if self.output == self.max_output:
            return np.full(shape, self.max_output)
        normal = math.sqrt(PROMPT_VARIANCE_FRAC) * rng.standard_normal((groups, 1))
        normal = normal + math.sqrt(1.0 - PROMPT_VARIANCE_FRAC) * rng.standard_normal(shape)
        logs = log_mean(self.output, self.sigma, self.max_output) + self.sigma * normal
        return np.clip(np.exp(logs).round(), 1, self.max_output).astype(np.int64)

    def sequences(self, answers: Tokens) -> Tokens:
        """Tokens that the trainer has of each sample: prompt, answer, what tools return."""
        return answers.ravel() + (self.longest - self.max_output)


def rollouts_of(
    max_seq: int, *, output: float | None, max_output: int | None, sigma: float | None, lengths: Path | None,
    prompt: int, turns: int, tool_tokens: int, **others: Any,
) -> Rollouts:  # fmt: skip
    """Rollouts of a model of `max_seq` tokens from what a user states; WorkloadError for contradictions."""
    names = {"lengths": lengths, "output": output, "sigma": sigma, "prompt": prompt, "max_seq": max_seq}
    room = max_seq - prompt - (turns - 1) * tool_tokens
    refuse("stated lengths", WorkloadError, room=room, **names)
    found = read_lengths(lengths) if lengths else ()
    mean = sum(found) / len(found) if found else output or 0.0
    usual = max(found) if found else min(CAP_OVER_MEAN * math.ceil(mean), room)
    cap = usual if max_output is None else max_output
    refuse("longest answer", WorkloadError, lengths=lengths, longest=max(found, default=0), cap=cap)
    return Rollouts(
        prompt=prompt, output=mean, max_output=cap, sigma=SIGMA if sigma is None else sigma, lengths=found,
        turns=turns, tool_tokens=tool_tokens, **others,
    )  # fmt: skip


def cut_mean(mu: float, sigma: float, cap: float) -> float:
    """Mean of min(X, cap) with X lognormal (see the top of this file)."""
    if sigma == 0.0:
        return min(math.exp(mu), cap)
    below = NormalDist().cdf((math.log(cap) - mu) / sigma)
    shifted = NormalDist().cdf((math.log(cap) - mu - sigma**2) / sigma)
    return math.exp(mu + sigma**2 / 2.0) * shifted + cap * (1.0 - below)


def log_mean(mean: float, sigma: float, cap: float) -> float:
    """The `mu` with which lengths cut at `cap` have the given mean, by bisection."""
    low, high = math.log(mean) - sigma**2 / 2.0 - 1.0, math.log(cap) + 10.0 * sigma + 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2.0
        low, high = (middle, high) if cut_mean(middle, sigma, cap) < mean else (low, middle)
    return (low + high) / 2.0


class _Length(msgspec.Struct):
    output: Annotated[int, msgspec.Meta(ge=1, le=10**12)]


def read_lengths(path: Path) -> tuple[int, ...]:
    """The column `output` of a CSV file: tokens of measured answers."""
    found = tuple(row.output for _, row in read_rows(path, _Length))
    if not found:
        raise DataError(f"{path} has no length; give a row for each measured answer")
    return found

"""Rollout and training at the same time: groups, a queue between the pools, a bound on staleness.

Every group is generated for one version of the weights, which it updates. While the engines have version v,
groups for versions up to v + bound may start, and at most bound batches of groups are under way: a slot is
free again when the longest sample of its group is complete. The trainer takes a batch when all of its groups
are complete. A sync stops all engines; where updates are in flight they go on with what they have, otherwise
the sync waits for every group that is under way.

With T the trainer's seconds of a batch, S of a sync and D of a batch's generation, equal lengths and bound 1,
a period is max(T, D) + S.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from meshwise.rl.engines import Engines, RolloutPool
from meshwise.rl.rollouts import Rollouts

WARM_UP, COUNTED = 2, 5
"""Steps before the flow is steady, beyond as many as the bound, whose groups may all start with the first
weights; and those at least whose mean is the answer, in cycles of bound + 1 batches that start together."""


@dataclass(frozen=True, slots=True)
class Steady:
    """Means over the counted steps.

    `wait_s`: what the trainer waits for samples, and a sync for groups under way; `busy_s`: what engines
    work; `staleness`: versions from a group's start to its update. `num_trained` are the groups.
    """

    wait_s: float
    busy_s: float
    staleness: float
    num_trained: int


class _Flow:
    """The engines and the trainer. A version's batch has `prompts` groups; versions count from 0."""

    def __init__(
        self, pool: RolloutPool, rollouts: Rollouts, rng: np.random.Generator, staleness: int, in_flight: bool
    ) -> None:
        self.rollouts, self.rng, self.bound, self.in_flight = rollouts, rng, staleness, in_flight
        self.engines = Engines(pool, rollouts, self._sample_ended)
        self.version = 0  # of the weights that engines have
        self.num_started = self.under_way = 0
        self.open: dict[int, int] = {}  # samples that a group still waits for
        self.started: dict[int, int] = {}  # the version with which a group began
        self.complete = defaultdict[int, list[float]](list)  # seconds at which a batch's groups were complete
        self.answers = np.empty((0, rollouts.samples), dtype=np.int64)

    def start_groups(self, second: float) -> None:
        """Start what the bound allows."""
        last = (self.version + self.bound + 1) * self.rollouts.num_groups
        while self.num_started < last and self.under_way < self.bound * self.rollouts.num_groups:
            if not len(self.answers):
                self.answers = self.rollouts.draw(self.rollouts.num_groups, self.rng)
            group, each = self.num_started, self.rollouts.samples
            for i, tokens in enumerate(self.answers[0].tolist()):
                self.engines.start(group * each + i, group, tokens, second)
            self.answers = self.answers[1:]
            self.open[group], self.started[group] = each, self.version
            self.num_started += 1
            self.under_way += 1

    def _sample_ended(self, sample: int, second: float) -> None:
        group = sample // self.rollouts.samples
        self.open[group] -= 1
        if not self.open[group]:
            del self.open[group]
            self.under_way -= 1
            self.complete[group // self.rollouts.num_groups].append(second)
            if not self.is_held:
                self.start_groups(second)

    is_held = False  # whether no group may start, as a sync waits for those under way

    def wait_for(self, version: int) -> float:
        """Engines work until the batch of a version is complete; when that was."""
        ends = self.complete[version]
        while len(ends) < self.rollouts.num_groups:
            self.engines.go_on()
        return max(ends)

    def drain(self) -> None:
        """Engines end what is under way; no group starts."""
        self.is_held = True
        while self.under_way:
            self.engines.go_on()
        self.is_held = False

    def sync(self, from_s: float, sync_s: float) -> float:
        """Engines get the next version; when they go on."""
        self.engines.run_until(from_s)
        self.version += 1
        self.engines.pause(from_s + sync_s)
        self.start_groups(from_s + sync_s)
        return from_s + sync_s


def steady(
    pool: RolloutPool,
    rollouts: Rollouts,
    rng: np.random.Generator,
    *,
    trains_s: float,
    sync_s: float,
    staleness: int,
    in_flight: bool,
) -> Steady:
    """The steady flow of a trainer that takes `trains_s` a batch and `sync_s` a sync of weights."""
    flow = _Flow(pool, rollouts, rng, staleness, in_flight)
    flow.start_groups(0.0)
    first, cycle = staleness + WARM_UP, staleness + 1
    num = -(-COUNTED // cycle) * cycle
    now, waits, busy = 0.0, [], []
    for version in range(first + num):
        busy.append(flow.engines.busy_s)
        ready_s = max(flow.wait_for(version), now)
        ended_s = ready_s + trains_s
        flow.engines.run_until(ended_s)
        drained_s = ended_s
        if not in_flight:
            flow.drain()
            drained_s = max(ended_s, *(max(ends) for ends in flow.complete.values()))
        waits.append(ready_s - now + drained_s - ended_s)
        now = flow.sync(drained_s, sync_s)
    trained = range(first * rollouts.num_groups, (first + num) * rollouts.num_groups)
    ages = [group // rollouts.num_groups - flow.started[group] for group in trained if group not in flow.open]
    return Steady(
        wait_s=sum(waits[first:]) / num,
        busy_s=(flow.engines.busy_s - busy[first]) / num,
        staleness=sum(ages) / len(ages),
        num_trained=len(ages),
    )

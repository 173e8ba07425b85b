"""One job of post-training: model, machine, how its GPUs are shared, what a step is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwise.core.errors import PlanError, WorkloadError
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan
from meshwise.rl.engines import RolloutPool, rollout_pool
from meshwise.rl.framework import OVERLAPPED, RlFramework, Transport, find_transport
from meshwise.rl.rollouts import Rollouts
from meshwise.serve.engine import parse_engine
from meshwise.serve.serving import serving

MODES = ("colocated", "split", "one_step_off", "async")
"""One pool of GPUs for both in turn; two pools in turn; two pools at a time, one step or several apart."""

ALGORITHMS = ("grpo", "rloo", "dapo", "ppo")
"""PPO has a critic, which scores and is trained; the others take a group's own mean as the baseline."""

MOST_UPDATES, MOST_STALENESS = 256, 64
"""Beyond which a step takes minutes to simulate."""

BIN_TOKENS = 8192
"""Tokens of a packed bin at least, where nothing is stated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RlJob:
    """What runs. `rollout_gpus` are those of the rollout pool (all, where colocated).

    `scorers` are models that judge each sample in a forward pass beside the policy's own: a reference, a
    reward model, a teacher, a critic. `updates`: optimizer steps of a rollout. `pack_length`: tokens of a
    packed bin in training, `score_tokens` in scoring. `staleness`: how many versions a sample may be behind.
    """

    model: Model
    cluster: Cluster
    rollouts: Rollouts
    mode: str
    rollout_gpus: int
    train_plan: Plan
    rollout_plan: Plan
    framework: RlFramework
    transport: Transport
    scorers: Sequence[tuple[str, Model]]
    scores_policy: bool
    critic: Model | None = None
    updates: int = 1
    pack_length: int
    score_tokens: int
    memory_frac: float
    staleness: int = 0
    in_flight: bool = False
    engine: str = ""

    def __post_init__(self) -> None:
        rollouts = self.rollouts
        if self.updates > MOST_UPDATES or self.staleness > MOST_STALENESS:
            raise WorkloadError(f"updates must be at most {MOST_UPDATES}, staleness at most {MOST_STALENESS}")
        if self.updates < 1 or rollouts.num_samples % self.updates:
            raise WorkloadError(
                f"{rollouts.num_samples} samples do not divide by updates={self.updates}; use a divisor"
            )
        if rollouts.longest > self.model.max_seq:
            most = f"the {self.model.max_seq} of {self.model.name}"
            raise WorkloadError(f"samples of {rollouts.longest} tokens are more than {most}; lower the cap")
        if self.pack_length < rollouts.longest or self.score_tokens < rollouts.longest:
            bins = f"bins of {min(self.pack_length, self.score_tokens)} tokens do not hold samples of"
            raise WorkloadError(f"{bins} {rollouts.longest}; raise pack_length and score_tokens")
        most_gpus = self.cluster.num_chips - self.is_split
        if not 0 < self.rollout_gpus <= most_gpus:
            raise PlanError(
                f"rollout_gpus={self.rollout_gpus} must be from 1 to {most_gpus}: GPUs for both pools"
            )
        if self.staleness < 0 or (self.staleness == 0 and self.mode in OVERLAPPED):
            raise WorkloadError(f"staleness={self.staleness} must be at least 1 in mode={self.mode}")
        if self.rollout_gpus % self.engine_gpus:
            each = f"an engine of {self.engine_gpus}; change tp x pp x dp of rollout_plan"
            raise PlanError(f"{self.rollout_gpus} rollout GPUs do not divide by {each}")
        if self.train_gpus % (self.train_plan.tp * self.train_plan.cp * self.train_plan.pp):
            raise PlanError(
                f"{self.train_gpus} training GPUs do not divide by tp x cp x pp; change train_plan"
            )

    @property
    def is_split(self) -> bool:
        """Whether rollout and training have GPUs of their own."""
        return self.mode != "colocated"

    @property
    def train_gpus(self) -> int:
        """GPUs that train."""
        return self.cluster.num_chips - self.rollout_gpus if self.is_split else self.cluster.num_chips

    @property
    def engine_gpus(self) -> int:
        """GPUs of one engine."""
        plan = self.rollout_plan
        return plan.tp * plan.pp * (plan.dp or max(plan.ep // plan.tp, 1))

    @property
    def train_cluster(self) -> Cluster:
        """The GPUs that train."""
        return replace(self.cluster, num_chips=self.train_gpus)

    @property
    def train_dp(self) -> int:
        """Data-parallel ranks of the trainer."""
        return self.train_plan.data_parallel(self.train_gpus)

    def pool(self) -> RolloutPool:
        """The engines."""
        cluster = replace(self.cluster, num_chips=self.engine_gpus)
        node = cluster.levels[0].ranks
        host_s = self.framework.host_s + self.framework.node_host_s * max(-(-self.engine_gpus // node) - 1, 0)
        rollouts = self.rollouts
        engine = replace(parse_engine(self.engine or self.framework.engine), on_chips=())
        one = serving(
            self.model, cluster, self.rollout_plan, prompt=rollouts.prompt, engine_s=host_s,
            output=rollouts.longest - rollouts.prompt, memory_frac=self.memory_frac, engine=engine,
        )  # fmt: skip
        num = self.rollout_gpus // self.engine_gpus
        return rollout_pool(one, num, engine, rollouts, max(self.staleness, 1))


def job(
    model: Model, cluster: Cluster, *, rollouts: Rollouts, framework: RlFramework, mode: str,
    rollout_gpus: int | None = None, train_plan: Plan, rollout_plan: Plan, transport: str = "",
    memory_frac: float | None = None, pack_length: int | None = None, score_tokens: int | None = None,
    staleness: int | None = None, in_flight: bool | None = None, scores_policy: bool | None = None,
    updates: int = 1, **others: Any,
) -> RlJob:  # fmt: skip
    """A job with the defaults of its framework."""
    if mode not in MODES:
        raise WorkloadError(f"mode={mode!r} must be one of {', '.join(MODES)}")
    split = mode != "colocated"
    if split and rollout_gpus is None:
        raise WorkloadError(f"mode={mode} needs rollout_gpus, the GPUs of the engines; or leave mode out")
    if not split and rollout_gpus not in (None, cluster.num_chips):
        raise WorkloadError("rollout_gpus is of two pools; leave it out where mode=colocated")
    if staleness is not None and mode not in OVERLAPPED:
        raise WorkloadError(f"staleness is of asynchronous steps; leave it out where mode={mode}")
    if mode == "one_step_off" and staleness not in (None, 1):
        raise WorkloadError("mode=one_step_off has staleness=1; use mode=async for more")
    frac = framework.split_memory_frac if split else framework.colocated_memory_frac
    pack = max(BIN_TOKENS, rollouts.longest) if pack_length is None else pack_length
    if memory_frac is not None and not 0 < memory_frac <= 1:
        raise WorkloadError(f"memory_frac={memory_frac:g} must be above 0 and at most 1")
    default = framework.split_transport if split else framework.colocated_transport
    return RlJob(
        model=model, cluster=cluster, rollouts=rollouts, framework=framework, mode=mode,
        rollout_gpus=rollout_gpus or cluster.num_chips, train_plan=train_plan, rollout_plan=rollout_plan,
        transport=find_transport(transport or default), pack_length=pack,
        score_tokens=framework.score_bins * pack if score_tokens is None else score_tokens,
        memory_frac=frac if memory_frac is None else memory_frac,
        staleness=staleness or (1 if mode in OVERLAPPED else 0),
        in_flight=framework.in_flight if in_flight is None else in_flight, updates=updates,
        scores_policy=updates > 1 or split if scores_policy is None else scores_policy, **others,
    )  # fmt: skip

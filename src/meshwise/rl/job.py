"""One job of post-training: model, machine, how its GPUs are shared, what a step is made of."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from meshwise.core.errors import PlanError, WorkloadError
from meshwise.core.expressions import formulas
from meshwise.core.refusals import refuse
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan
from meshwise.rl.engines import RolloutPool, rollout_pool
from meshwise.rl.framework import CATALOG, OVERLAPPED, RlFramework
from meshwise.rl.rollouts import Rollouts
from meshwise.serve.engine import parse_engine
from meshwise.serve.serving import serving

MODES = ("colocated", "split", "one_step_off", "async")
"""One pool of GPUs for both in turn; two pools in turn; two pools at a time, one step or several apart."""

BIN_TOKENS = 8192
"""Tokens of a packed bin at least, where nothing is stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJob:
    """What a user states of a job, by the options of `rl`; None, and "" as the mode, is open.

    `algorithm`: PPO has a critic, which scores and is trained; the others (GRPO, RLOO, DAPO) take a group's
    own mean as the baseline. `updates`: optimizer steps of a rollout. `pack_length`: tokens of a packed bin
    in training, `score_tokens` in scoring. `staleness`: how many versions a sample may be behind.
    """

    model: Model
    cluster: Cluster
    rollouts: Rollouts
    framework: RlFramework
    mode: str = ""
    rollout_gpus: int | None = None
    train_plan: Plan | None = None
    rollout_plan: Plan | None = None
    staleness: int | None = None
    memory_frac: float | None = None
    updates: int = 1
    partial: bool | None = None
    algorithm: str = "grpo"
    reference: bool = True
    old_logprobs: bool | None = None
    reward_model: Model | None = None
    teacher: Model | None = None
    engine: str = ""
    transport: str = ""
    pack_length: int | None = None
    score_tokens: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether anything of the layout is to be found."""
        return not self.mode or self.train_plan is None or self.rollout_plan is None

    @property
    def usual_memory_frac(self) -> float:
        """The share of memory that engines have in this mode, unless another is stated."""
        of = self.framework
        usual = of.colocated_memory_frac if self.mode == "colocated" else of.split_memory_frac
        return usual if self.memory_frac is None else self.memory_frac

    def job(self) -> RlJob:
        """The job with the defaults of its framework; WorkloadError where options contradict each other."""
        overlaps = self.mode in OVERLAPPED
        refuse("rl options", WorkloadError, of=self, modes=MODES, overlaps=overlaps)
        names = {"of": self, "overlaps": overlaps, "bin": BIN_TOKENS, "int": int, "max": max}
        usual = formulas({**CATALOG.usual, **self.framework.usual}, names)
        stated = {each.name: getattr(self, each.name) for each in fields(self)}
        return RlJob(**stated | {name: value for name, value in usual.items() if stated[name] in (None, "")})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RlJob(OpenJob):
    """A job of which nothing is open. `rollout_gpus` are those of the rollout pool (all, where colocated)."""

    rollout_gpus: int
    train_plan: Plan
    rollout_plan: Plan
    staleness: int
    memory_frac: float
    partial: bool
    old_logprobs: bool
    pack_length: int
    score_tokens: int

    def __post_init__(self) -> None:
        refuse(
            "rl job", WorkloadError, job=self, of=self.rollouts, overlaps=self.mode in OVERLAPPED,
            bins=min(self.pack_length, self.score_tokens),
        )  # fmt: skip
        refuse("rl pools", PlanError, job=self, most_gpus=self.cluster.num_chips - self.is_split)

    @property
    def scorers(self) -> dict[str, Model]:
        """The model of each scoring pass by what it is, `policy` where the policy itself makes one."""
        of, is_ppo = self.model, self.algorithm == "ppo"
        found = {"policy": of if self.old_logprobs else None, "reference": of if self.reference else None}
        found |= {"reward": self.reward_model, "teacher": self.teacher, "critic": of if is_ppo else None}
        return {name: model for name, model in found.items() if model is not None}

    @property
    def trained(self) -> list[Model]:
        """Models that an update trains: the policy, and PPO's critic of its shape."""
        return [self.model] * (2 if self.algorithm == "ppo" else 1)

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

    @property
    def update_samples(self) -> int:
        """Samples of an optimizer step."""
        return self.rollouts.num_samples // self.updates

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

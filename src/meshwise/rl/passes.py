"""Scoring and update: passes over packed samples, priced as `estimate` prices any step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from meshwise.estimate.one_plan import estimate
from meshwise.model.architecture import Model
from meshwise.plan.mesh import TRAINING_KEYS
from meshwise.plan.plan import DEFAULTS, Plan
from meshwise.plan.workload import Workload
from meshwise.rl.job import RlJob
from meshwise.rl.packing import PackedBatch, pack
from meshwise.rl.rollouts import Tokens

PERSISTENT = ("weights", "gradients", "optimizer")
"""What a trainer holds between its passes."""


@dataclass(frozen=True, slots=True)
class TrainerTimes:
    """Seconds of the trainer in a step: each scoring pass by name; all updates, of the critic too."""

    scoring_s: dict[str, float]
    train_s: float
    bins: int
    fill_frac: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.scoring_s.values()) + self.train_s


def trainer_times(job: RlJob, sequences: Tokens) -> TrainerTimes:
    """What the trainer does with the samples of a step, in the order in which they came."""
    scored = _packed(job, sequences, job.score_tokens)
    models = ([("policy", job.model)] if job.scores_policy else []) + list(job.scorers)
    scoring_s = {
        name: _slowdown(job, model) * _pass_s(job, model, scored, "evaluate") for name, model in models
    }
    train_s, bins = 0.0, 0
    for part in np.array_split(sequences, job.updates):
        packed = _packed(job, part, job.pack_length)
        bins += packed.bins
        for model in (job.model, job.critic):
            if model is not None:
                train_s += _slowdown(job, model) * _pass_s(job, model, packed, "train")
    fill = float(sequences.sum()) / (bins * job.train_dp * job.pack_length)
    return TrainerTimes(scoring_s, train_s, bins, fill)


def _packed(job: RlJob, sequences: Tokens, most_tokens: int) -> PackedBatch:
    plan = job.train_plan
    return pack(
        sequences, most_tokens, ranks=job.train_dp, token_multiple=2 * plan.tp * plan.cp,
        bin_multiple=plan.pp if plan.vpp > 1 else 1,
    )  # fmt: skip


def _slowdown(job: RlJob, model: Model) -> float:
    framework = job.framework
    own = framework.dense_slowdown if model.moe is None else framework.expert_slowdown
    return own * (1.0 if job.is_split else framework.colocated_slowdown)


def _pass_s(job: RlJob, model: Model, packed: PackedBatch, kind: str) -> float:
    work = Workload(
        batch=job.train_dp * packed.bins * packed.samples, seq=packed.sample_tokens,
        microbatch=packed.samples, kind=kind,
    )  # fmt: skip
    plan = job.train_plan if kind == "train" else _forward_plan(job.train_plan)
    return estimate(model, job.train_cluster, plan, work).step_s


def _forward_plan(plan: Plan) -> Plan:
    """`plan` without what only training has."""
    return replace(plan, **{key: DEFAULTS[key] for key in (*TRAINING_KEYS, "implementation")})


def trainer_bytes(job: RlJob) -> dict[str, float]:
    """Bytes of a training GPU by what they hold, in an update whose bins are full; of a critic too.

    Scoring holds less: no gradients, no activations kept. Of several models one works at a time.
    """
    plan = job.train_plan
    multiple = 2 * plan.tp * plan.cp
    seq = math.ceil(job.pack_length / multiple) * multiple
    work = Workload(batch=job.train_dp * plan.pp * plan.vpp, seq=seq)
    found = dict(estimate(job.model, job.train_cluster, plan, work).memory_bytes)
    del found["total"]
    if job.critic is not None:
        critic = estimate(job.critic, job.train_cluster, plan, work).memory_bytes
        found |= {name: found[name] + critic[name] for name in PERSISTENT}
    return found

"""Scoring and update: passes over packed samples, priced as `estimate` prices any step.

Samples are packed into bins of a number of tokens by first fit decreasing: longest first, each goes into the
first bin that has room. Trainers pack the samples of an optimizer step, and give every data-parallel rank as
many bins; the fullest rank sets the pace.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from meshwise.core.errors import PlanError
from meshwise.estimate.one_plan import Estimate, estimate
from meshwise.estimate.timing import overheads_of
from meshwise.model.architecture import Model
from meshwise.plan.plan import DEFAULTS, EVEN, TRAINING_KEYS, Plan
from meshwise.plan.rules import resolve
from meshwise.plan.workload import Workload
from meshwise.rl.job import RlJob
from meshwise.rl.rollouts import Tokens
from meshwise.serve.serving import without_experts


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """`bins` bins a data-parallel rank, of `fill` tokens each: `samples` samples of `sample_tokens` tokens.

    `sample_tokens` is the mean over tokens (of a token's sample, not of samples), so that attention, which
    grows with the square of each sample, comes out right.
    """

    bins: int
    fill: float
    samples: int
    sample_tokens: int


@lru_cache(64)  # many training plans are priced with the same samples
def num_bins(tokens: tuple[int, ...], most_tokens: int) -> int:
    """Bins of `most_tokens` that samples need by first fit decreasing."""
    rooms, used = np.full(len(tokens), most_tokens), 0
    for length in sorted(tokens, reverse=True):
        first = int(np.argmax(rooms >= length))
        rooms[first] -= length
        used = max(used, first + 1)
    return used


def pack(
    tokens: Tokens, most_tokens: int, *, ranks: int, token_multiple: int = 1, bin_multiple: int = 1
) -> PackedBatch:
    """The samples of a step over `ranks` data-parallel ranks.

    A sample's tokens are a multiple of `token_multiple` (ranks that cut it), a rank's bins of `bin_multiple`
    (stages of an interleaved pipeline).
    """
    most = ranks * bin_multiple
    lengths = tuple(tokens.tolist())
    bins = math.ceil(num_bins(lengths, max(most_tokens, *lengths)) / most) * bin_multiple
    fill = float(tokens.sum()) / (bins * ranks)
    of_a_token = float((tokens.astype(float) ** 2).sum() / tokens.sum())
    samples = max(round(fill / of_a_token), 1)
    return PackedBatch(bins, fill, samples, math.ceil(fill / samples / token_multiple) * token_multiple)


PERSISTENT = ("weights", "gradients", "optimizer")
"""What a trainer holds between its passes."""
EAGER = "torch-2023"
"""Software that runs modules of `transformers`: one kernel after another, with flash-attn's attention."""
SCORED_BYTES, TRAINED_BYTES = 24.0, 32.0
"""Of a token on its way to a trainer: id, mask, advantage, log-probability; of two models more to train."""


@dataclass(frozen=True, slots=True)
class TrainerTimes:
    """Seconds of the trainer in a step: each scoring pass by name; all updates, of the critic too."""

    scoring_s: dict[str, float]
    train_s: float
    fill_frac: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.scoring_s.values()) + self.train_s


def trainer_times(job: RlJob, sequences: Tokens, most: int | None = None) -> TrainerTimes:
    """What the trainer does with the samples of a step, in the order in which they came.

    `most`: so many updates at most are priced, the first ones, and stand for all.
    """
    judged = np.resize(sequences, job.rollouts.num_groups * job.rollouts.samples)  # groups are filtered then
    scored = {name: judged if name == "reward" else sequences for name in job.scorers}
    scoring_s = {name: _scores_s(job, job.scorers[name], tokens) for name, tokens in scored.items()}
    each_s = _sends_s(job, sequences, TRAINED_BYTES) + job.framework.sample_s * len(sequences) / job.train_dp
    parts = np.array_split(sequences, job.updates)[:most]
    updates = [_packed(job, part, job.pack_length) for part in parts]
    passes_s = sum(_priced(job, model, packed, "train").step_s for packed in updates for model in job.trained)
    bins, each = sum(packed.bins for packed in updates), job.updates / len(parts)
    fill = float(sequences.sum()) / (each * bins * job.train_dp * job.pack_length)
    return TrainerTimes(scoring_s, len(job.trained) * each_s + each * passes_s, fill)


def _scores_s(job: RlJob, model: Model, sequences: Tokens) -> float:
    """Seconds of a scoring pass."""
    packed = _packed(job, sequences, job.score_tokens)
    return _sends_s(job, sequences, SCORED_BYTES) + _priced(job, model, packed, "evaluate").step_s


def _packed(job: RlJob, sequences: Tokens, most_tokens: int) -> PackedBatch:
    plan = job.train_plan
    return pack(
        sequences, most_tokens, ranks=job.train_dp, token_multiple=2 * plan.tp * plan.cp,
        bin_multiple=plan.pp if plan.vpp > 1 else 1,
    )  # fmt: skip


def _sends_s(job: RlJob, sequences: Tokens, token_bytes: float) -> float:
    """Seconds in which the controller sends ranks the samples of their replica."""
    of, copies = job.framework, job.train_gpus / job.train_dp
    tokens = float(len(sequences) * sequences.max() if of.pads_samples else sequences.sum())
    return of.send_s_per_byte * token_bytes * tokens * (copies if of.sends_copies else 1.0)


def _priced(job: RlJob, model: Model, packed: PackedBatch, kind: str) -> Estimate:
    work = Workload(
        batch=job.train_dp * packed.bins * packed.samples, seq=packed.sample_tokens,
        microbatch=packed.samples, kind=kind,
    )  # fmt: skip
    plan = _as_run(job, model, work)
    waits = model.moe is not None and not job.framework.fuses_permutation
    overheads = replace(overheads_of(job.cluster.chip, plan), launches_block=True) if waits else None
    return estimate(model, job.train_cluster, plan, work, overheads=overheads)


def _as_run(job: RlJob, model: Model, work: Workload) -> Plan:
    """The training plan as the framework's trainers run it, where it leaves that open.

    Layers that divide are cut into even stages. FSDP2 trains the modules of `transformers`; beside tensor
    parallelism, which does not cut the tokens between matmuls, it hides no exchange (pytorch issue 137524).
    Where nobody knows what such modules keep, PyTorch's own parts stand for them.
    """
    plan = job.train_plan if model.moe else without_experts(job.train_plan)
    dropped = () if work.kind == "train" else (*TRAINING_KEYS, "implementation")
    asked = replace(plan, **{key: DEFAULTS[key] for key in dropped})
    divides = plan.stages is None and model.num_layers % (plan.pp * plan.vpp) == 0
    fusion = (plan.loss_fusion or job.framework.loss_fusion) if model.vocab and model.lm_head else None
    run = replace(asked, stages=EVEN if divides else plan.stages, loss_fusion=fusion)
    if not plan.done_by.parts:
        return run
    hides = asked.overlap_dp and (plan.tp == 1 or work.kind != "train")
    run = replace(run, implementation="huggingface", software=EAGER, sp=bool(plan.sp), overlap_dp=hides)
    try:
        resolve(model, run, work, job.train_cluster)
    except PlanError:
        return asked
    return run


def pass_bytes(job: RlJob) -> dict[str, dict[str, float]]:
    """Bytes of a training GPU by what they hold, in an update and in each scoring pass, whose bins are full.

    One model works at a time. Beside it stays what its framework does not move to the host, of GPUs that
    engines have in turn nothing. `judges`: weights of models that only score; a reference has none where it
    is the policy without adapters, or takes the place of the policy's weights.
    """
    away = {*job.framework.split_offloads} if job.is_split else {*PERSISTENT, "judges"}
    updates = [_full_bytes(job, model, job.pack_length, "train") for model in job.trained]
    states = {part: sum(one[part] for one in updates) for part in PERSISTENT}
    scored = {name: _full_bytes(job, of, job.score_tokens, "evaluate") for name, of in job.scorers.items()}
    trained = {"policy", "critic"} | ({"reference"} if job.train_plan.lora_rank else {"reference"} & away)
    judges = {name: scored[name]["weights"] for name in scored if name not in trained}
    kept = {} if "judges" in away else judges
    found = {"update": updates[0] | states | {"judges": sum(kept.values())}}
    for name, held in scored.items():
        idle = away - (set() if name in judges else {"weights"})
        stays = {part: size * (part not in idle) for part, size in states.items()}
        found[name] = held | stays | {"judges": sum((kept | {name: judges.get(name, 0.0)}).values())}
    return found


def _full_bytes(job: RlJob, model: Model, tokens: int, kind: str) -> dict[str, float]:
    """Bytes of a pass over bins of `tokens` tokens, by the names that the stated plan has for its states.

    (Modules of transformers count fp32 weights as the optimizer's.) ZeRO 3 shards the weights of scoring too.
    """
    plan, samples = job.train_plan, max(tokens // job.rollouts.longest, 1)
    multiple = 2 * plan.tp * plan.cp
    seq = math.ceil(tokens / samples / multiple) * multiple
    priced = _priced(job, model, PackedBatch(plan.pp * plan.vpp, float(tokens), samples, seq), kind)
    found = {part: size for part, size in priced.memory_bytes.items() if part != "total"}
    if kind == "train":
        stated = replace(plan, stages=priced.plan.stages)
        states = estimate(model, job.train_cluster, stated, priced.workload).memory_bytes
        return found | {part: states[part] for part in PERSISTENT}
    elsewhere = found["weights"] * (plan.zero >= 3) * (1.0 - plan.tp * plan.pp / job.train_gpus)
    pieces = elsewhere * overheads_of(job.cluster.chip, priced.plan).fragment_frac
    return found | {"weights": found["weights"] - elsewhere, "overhead": found["overhead"] - pieces}

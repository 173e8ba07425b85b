"""A step of GRPO on two pools of ranks: engines answer prompts, trainers score, update and send weights back.

The first `rollout_ranks` are engines: each holds the whole policy, reads the prompts of its samples in one
pass and adds token after token with a cache. Every rank then has all samples. The trainers, data-parallel
with shards of the optimizer (ZeRO 1), compute the log-probabilities that the answers had, and update the
policy in packed bins: a group's own mean is the baseline, and the ratio of probabilities is clipped (GRPO,
arXiv 2402.03300). The first trainer sends the weights to the engines in bf16. The reward is a toy: the share
of even tokens in an answer.

All answers have one length, so that a bin holds whole samples and closed form and run agree to the digit:
passes, tokens, matmuls, attention, payloads, and what both pools hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from meshwise.core.errors import WorkloadError
from meshwise.cost.collective import sent_bytes
from meshwise.estimate.one_plan import Estimate
from meshwise.estimate.one_plan import estimate as price
from meshwise.machine.hardware import find_cluster
from meshwise.model.architecture import Model
from meshwise.model.weights import num_params
from meshwise.plan.plan import Plan
from meshwise.plan.workload import Workload
from meshwise.program.tape import Tape
from meshwise.rl.packing import PackedBatch, pack
from meshwise.rl.step import SYNC_BYTES

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context

STATES_TOTALS_ONLY = True

TOKEN_BYTES = 8.0
"""Of a token number on its way from an engine (int64)."""

_CHIP = "h100-80g-sxm"  # counts depend on no chip


@dataclass(frozen=True, slots=True, kw_only=True)
class RlOptions:
    """What the command line may choose."""

    rollout_ranks: Annotated[int, Meta(ge=1, description="engines; the other ranks train")] = 2
    prompts: Annotated[int, Meta(ge=1, description="groups of samples in a step")] = 4
    samples: Annotated[int, Meta(ge=2, description="answers to each prompt")] = 4
    prompt: Annotated[int, Meta(ge=1, description="tokens of a prompt")] = 16
    output: Annotated[int, Meta(ge=2, description="tokens of an answer")] = 16
    updates: Annotated[int, Meta(ge=1, description="optimizer steps of a rollout")] = 1
    pack_length: Annotated[int, Meta(ge=0, description="tokens of a packed bin (0: two samples)")] = 0
    steps: Annotated[int, Meta(ge=1, description="steps, each with prompts of its own")] = 1
    layers: Annotated[int, Meta(ge=1, description="layers of the policy")] = 2
    hidden: Annotated[int, Meta(ge=2, description="its width")] = 64
    heads: Annotated[int, Meta(ge=1, description="its attention heads")] = 4
    ffn: Annotated[int, Meta(ge=1, description="its inner width")] = 128
    vocab: Annotated[int, Meta(ge=2, description="its vocabulary")] = 256
    lr: Annotated[float, Meta(gt=0, description="learning rate of Adam")] = 1e-3
    clip: Annotated[float, Meta(gt=0, description="how far a ratio of probabilities counts from 1")] = 0.2
    seed: Annotated[int, Meta(ge=0, description="seed of weights, prompts and answers")] = 0

    @property
    def num_samples(self) -> int:
        """Answers of a step."""
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        """Tokens of a sample: prompt and answer."""
        return self.prompt + self.output


Options = RlOptions


def check(options: RlOptions, ranks: int) -> None:
    """WorkloadError for what does not divide."""
    engines, trainers = options.rollout_ranks, ranks - options.rollout_ranks
    if trainers < 1:
        raise WorkloadError(
            f"rl: --rollout-ranks {engines} of {ranks} ranks leaves no trainer; use at most {ranks - 1}"
        )
    for what, number, divisor in (
        ("prompts", options.prompts, engines),
        ("hidden width", options.hidden, options.heads),
        ("samples of a step", options.num_samples, options.updates),
        ("weights", num_params(the_model(options)), trainers),
    ):
        if number % divisor:
            raise WorkloadError(f"rl: {number} {what} do not divide by {divisor}; use a multiple")
    if 0 < options.pack_length < options.length:
        raise WorkloadError(
            f"rl: --pack-length {options.pack_length} holds no sample of {options.length} tokens; raise it"
        )
    if (options.hidden // options.heads) % 2:
        raise WorkloadError(
            f"rl: heads of {options.hidden // options.heads} numbers cannot be rotated in pairs"
        )
    bins = bins_of(options, trainers)
    if bins.bins * bins.samples * trainers * options.updates != options.num_samples:
        raise WorkloadError(
            f"rl: {options.num_samples} samples do not fill the bins of {trainers} trainers, {bins.samples} "
            f"samples each; change --samples, --pack-length or --updates"
        )


def the_model(options: RlOptions) -> Model:
    """The policy: a small Llama with as many key-value heads as heads."""
    return Model(
        name="rl-policy", num_layers=options.layers, hidden=options.hidden, ffn_hidden=options.ffn,
        num_heads=options.heads, num_kv_heads=options.heads, head_dim=options.hidden // options.heads,
        vocab=options.vocab, max_seq=options.length, activation="swiglu", norm="rmsnorm", positions="rotary",
        linear_bias=False, qkv_bias=False, out_bias=False, tied_embedding=False,
    )  # fmt: skip


def bins_of(options: RlOptions, trainers: int) -> PackedBatch:
    """How the samples of an update are packed."""
    lengths = np.full(options.num_samples // options.updates, options.length)
    return pack(lengths, options.pack_length or 2 * options.length, ranks=trainers)


# --- closed form -------------------------------------------------------------------------------


def estimate(options: RlOptions, tape: Tape) -> None:
    """Write on `tape` what `meshwise estimate` says of this rank's passes, and what the pools exchange."""
    engines, trainers = options.rollout_ranks, tape.world_size - options.rollout_ranks
    share = options.num_samples // engines
    samples_bytes = TOKEN_BYTES * share * options.length
    _broadcast(tape, "rollouts", tape.world_size, samples_bytes, engines, options)
    weights_bytes = SYNC_BYTES * num_params(the_model(options))
    if tape.rank <= engines:
        _broadcast(tape, "sync", engines + 1, weights_bytes, 1, options)
    if tape.rank < engines:
        last = None
        for last in _generation(options, share):
            _write(tape, last, options.steps)
        assert last is not None
        cached = (options.length - 1.0) / options.length  # the last token is not read
        held = {
            "engine weights": last.memory_bytes["weights"],
            "cache": cached * _cache_bytes(options, share),
        }
        tokens, passes = share * options.output, options.output
    else:
        packed = bins_of(options, trainers)
        _write(
            tape,
            _training(options, packed, trainers, "evaluate", packed.bins * options.updates),
            options.steps,
        )
        update = _training(options, packed, trainers, "train", packed.bins)
        _write(tape, update, options.steps * options.updates)
        held = {name: update.memory_bytes[name] for name in ("weights", "gradients", "optimizer")}
        tokens = options.num_samples // trainers * options.length
        passes = 2 * packed.bins * options.updates
    _states(tape, held, {"tokens": tokens * options.steps, "passes": passes * options.steps})


def _generation(options: RlOptions, sequences: int) -> Iterator[Estimate]:
    """The passes of an engine: the prompts, then each token but the last."""
    for seq in range(options.prompt, options.length):
        kind = "prefill" if seq == options.prompt else "decode"
        yield _price(options, 1, Plan(), batch=sequences, seq=seq, microbatch=sequences, kind=kind)


def _cache_bytes(options: RlOptions, sequences: int) -> float:
    """Bytes of the cache of all tokens of an engine's samples."""
    whole = _price(options, 1, Plan(), batch=sequences, seq=options.length, kind="prefill")
    return whole.memory_bytes["cache"]


def _training(options: RlOptions, packed: PackedBatch, trainers: int, kind: str, bins: int) -> Estimate:
    """Passes of the trainers over so many bins each."""
    plan = Plan(zero=1) if kind == "train" else Plan()
    return _price(
        options, trainers, plan, batch=trainers * bins * packed.samples, seq=packed.sample_tokens,
        microbatch=packed.samples, kind=kind,
    )  # fmt: skip


def _price(options: RlOptions, ranks: int, plan: Plan, **work: Any) -> Estimate:
    return price(the_model(options), find_cluster(f"{_CHIP}:{ranks}"), plan, Workload(**work))


def _write(tape: Tape, priced: Estimate, times: int) -> None:
    """The rows of a rank of `priced`, so many times over."""
    for row in priced.rank_ledger(0).rows():
        name = row.pop("op")
        del row["live_bytes"]
        if row["module"] != "memory":
            tape.op(name, **row | {"count": row["count"] * times})


def _broadcast(
    tape: Tape, axis: str, group_size: int, payload_bytes: float, times: int, options: RlOptions
) -> None:
    tape.op(
        "broadcast", collective="broadcast", axis=axis, group_size=group_size, payload_bytes=payload_bytes,
        sent_bytes=float(sent_bytes("broadcast", payload_bytes, group_size)), count=times * options.steps,
    )  # fmt: skip


def _states(tape: Tape, held: dict[str, float], counted: dict[str, int]) -> None:
    """What a rank holds between passes, in bytes, and what it did, in numbers."""
    for name, size_bytes in held.items():
        tape.op(name, module="states", phase="step", weight_bytes=float(size_bytes))
    for name, number in counted.items():
        tape.op(name, module="states", phase="step", count=number)


# --- run ---------------------------------------------------------------------------------------


def main(options: RlOptions, context: Context) -> dict[str, Any]:
    """`steps` steps; the mean reward of each (none on fake tensors)."""
    from meshwise.runtime.programs.grpo import GrpoEngine, GrpoTrainer

    engines, trainers = options.rollout_ranks, context.world_size - options.rollout_ranks
    pool = GrpoEngine if context.rank < engines else GrpoTrainer
    rank = pool(options, the_model(options), context, bins_of(options, trainers))
    rewards = [rank.step(number) for number in range(options.steps)]
    _states(context.recorder.tape, rank.held_bytes(), {"tokens": rank.tokens, "passes": rank.passes})
    return {} if context.is_fake else {"rewards": rewards}

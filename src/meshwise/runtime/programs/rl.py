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

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwise.core.errors import PlanError, WorkloadError
from meshwise.core.refusals import refuse
from meshwise.cost.collective import sent_bytes
from meshwise.estimate.one_plan import Estimate, estimate as price
from meshwise.machine.hardware import find_cluster
from meshwise.model.architecture import Model
from meshwise.model.find import find_model
from meshwise.model.weights import num_params
from meshwise.plan.plan import Plan
from meshwise.plan.workload import Workload
from meshwise.program.tape import Tape
from meshwise.rl.passes import PERSISTENT, PackedBatch, pack
from meshwise.rl.step import SYNC_BYTES
from meshwise.runtime.programs import program_options

if TYPE_CHECKING:
    from meshwise.runtime.programs.context import Context


Options = program_options(
    __name__,
    "rl",
    num_samples=property(lambda options: options.prompts * options.samples, doc="Answers of a step."),
    length=property(lambda options: options.prompt + options.output, doc="Tokens of a sample."),
)
STATES = "totals"


def check(options: Any, ranks: int) -> None:
    """PlanError or WorkloadError for what does not divide."""
    model, trainers = the_model(options), ranks - options.rollout_ranks
    names: dict[str, Any] = {"of": options, "trainers": trainers}
    refuse("pools of program rl", WorkloadError, "rl: ", ranks=ranks, **names)
    refuse("parts of program rl", PlanError, "rl: ", num_weights=num_params(model), **names)
    names |= {"head_dim": model.head_dim, "bins": bins_of(options, trainers)}
    refuse("bins of program rl", WorkloadError, "rl: ", **names)


def the_model(options: Any) -> Model:
    """The policy: a small Llama with as many key-value heads as heads."""
    return replace(
        find_model("llama2-7b"), name="rl-policy", num_layers=options.layers, hidden=options.hidden,
        ffn_hidden=options.ffn, num_heads=options.heads, num_kv_heads=options.heads,
        head_dim=options.hidden // options.heads, vocab=options.vocab, max_seq=options.length,
    )  # fmt: skip


def bins_of(options: Any, trainers: int) -> PackedBatch:
    """How the samples of an update are packed."""
    lengths = np.full(options.num_samples // options.updates, options.length)
    return pack(lengths, options.pack_length or 2 * options.length, ranks=trainers)


TOKEN_BYTES = 8.0
"""Of a token number on its way from an engine (int64)."""

_CHIP = "h100-80g-sxm"  # counts depend on no chip


# --- closed form -------------------------------------------------------------------------------


def estimate(options: Any, tape: Tape) -> None:
    """Write on `tape` what `meshwise estimate` says of this rank's passes, and what the pools exchange."""
    engines, trainers = options.rollout_ranks, tape.world_size - options.rollout_ranks
    share = options.num_samples // engines
    _broadcast(tape, "rollouts", tape.world_size, TOKEN_BYTES * share * options.length, engines, options)
    if tape.rank <= engines:
        _broadcast(tape, "sync", engines + 1, SYNC_BYTES * num_params(the_model(options)), 1, options)
    if tape.rank < engines:
        for seq in range(options.prompt, options.length):  # the prompts, then each token but the last
            kind = "prefill" if seq == options.prompt else "decode"
            last = _price(options, 1, Plan(), batch=share, seq=seq, microbatch=share, kind=kind)
            tape.priced(last.rank_ledger(0), options.steps)
        whole = _price(options, 1, Plan(), batch=share, seq=options.length, kind="prefill")
        cached = (options.length - 1.0) / options.length  # the last token is not read
        held = {"engine weights": last.memory_bytes["weights"]}
        held |= {"cache": cached * whole.memory_bytes["cache"]}
        tokens, passes = share * options.output, options.output
    else:
        packed = bins_of(options, trainers)
        scored = _training(options, packed, trainers, "evaluate", packed.bins * options.updates)
        tape.priced(scored.rank_ledger(0), options.steps)
        update = _training(options, packed, trainers, "train", packed.bins)
        tape.priced(update.rank_ledger(0), options.steps * options.updates)
        held = {name: update.memory_bytes[name] for name in PERSISTENT}
        tokens = options.num_samples // trainers * options.length
        passes = 2 * packed.bins * options.updates
    _states(tape, held, {"tokens": tokens * options.steps, "passes": passes * options.steps})


def _training(options: Any, packed: PackedBatch, trainers: int, kind: str, bins: int) -> Estimate:
    """Passes of the trainers over so many bins each."""
    return _price(
        options, trainers, Plan(zero=1), batch=trainers * bins * packed.samples, seq=packed.sample_tokens,
        microbatch=packed.samples, kind=kind,
    )  # fmt: skip


def _price(options: Any, ranks: int, plan: Plan, **work: Any) -> Estimate:
    return price(the_model(options), find_cluster(f"{_CHIP}:{ranks}"), plan, Workload(**work))


def _broadcast(tape: Tape, axis: str, size: int, payload_bytes: float, times: int, options: Any) -> None:
    sent = float(sent_bytes("broadcast", payload_bytes, size))
    told: dict[str, Any] = {"collective": "broadcast", "axis": axis, "group_size": size, "sent_bytes": sent}
    tape.op("broadcast", payload_bytes=payload_bytes, count=times * options.steps, **told)


def _states(tape: Tape, held: dict[str, float], counted: dict[str, int]) -> None:
    """What a rank holds between passes, in bytes, and what it did, in numbers."""
    tape.states(held)
    for name, number in counted.items():
        tape.op(name, module="states", phase="step", count=number)


# --- run ---------------------------------------------------------------------------------------


def main(options: Any, context: Context) -> dict[str, Any]:
    """`steps` steps; the mean reward of each (none on fake tensors)."""
    from meshwise.runtime.programs.grpo import GrpoEngine, GrpoTrainer

    engines, trainers = options.rollout_ranks, context.world_size - options.rollout_ranks
    pool = GrpoEngine if context.rank < engines else GrpoTrainer
    rank = pool(options, the_model(options), context, bins_of(options, trainers))
    rewards = [rank.step(number) for number in range(options.steps)]
    _states(context.recorder.tape, rank.held, {"tokens": rank.tokens, "passes": rank.passes})
    return {} if context.is_fake else {"rewards": rewards}

"""What the program `rl` may be told, and what does not go together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from msgspec import Meta

from meshwise.core.errors import WorkloadError
from meshwise.model.architecture import Model
from meshwise.model.find import find_model
from meshwise.model.weights import num_params
from meshwise.rl.packing import PackedBatch, pack


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
    return replace(
        find_model("llama2-7b"), name="rl-policy", num_layers=options.layers, hidden=options.hidden,
        ffn_hidden=options.ffn, num_heads=options.heads, num_kv_heads=options.heads,
        head_dim=options.hidden // options.heads, vocab=options.vocab, max_seq=options.length,
    )  # fmt: skip


def bins_of(options: RlOptions, trainers: int) -> PackedBatch:
    """How the samples of an update are packed."""
    lengths = np.full(options.num_samples // options.updates, options.length)
    return pack(lengths, options.pack_length or 2 * options.length, ranks=trainers)

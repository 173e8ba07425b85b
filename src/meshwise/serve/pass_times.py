"""Seconds of every pass that an engine may form, tabulated once and interpolated.

A pass gives each of `sequences` one token behind `context` cached ones and works on `chunks` of prompts
(first and last token of each). Its time is the sum of
- everything but the core of attention, by the tokens of the pass,
- attention of the decoding sequences, by their number and mean context,
- attention of each chunk: A(end) - A(start), with A(n) that of a whole prompt of n tokens.
The tables are passes priced like any other (`serving.price_pass`). All of it is of one group (a dp rank, or
one of the batches in its pipeline); groups run in step, and requests are spread evenly, so that a pass takes
as long as that of the busiest group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwise.core.units import Num
from meshwise.serve.engine import Engine
from meshwise.serve.engine_pass import attending, graphed_pass, host_s, run_by
from meshwise.serve.fitted import fitted
from meshwise.serve.serving import (
    PREFILL_TOKENS,
    PricedPass,
    Serving,
    decode_pass,
    encoding_token_s,
    expert_token_s,
    launches_s,
    price_pass,
    shares_experts,
)

POINTS = 256
"""Points of a table along the tokens of a prompt."""

TILE, MOST_POINTS = 32, 512
"""Points along the tokens of a pass are multiples of a tile of matmuls, where times jump; at most so many."""

CONTEXTS = 8
"""Points along the mean context, in which attention of one query is all but linear."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Values at 0, `step`, 2 `step`, ...; a line between them and beyond the last."""

    values: Sequence[float]
    step: float

    def __call__(self, x: float) -> float:
        """The value at `x` >= 0."""
        place = x / self.step
        i = min(int(place), len(self.values) - 2)
        low = self.values[i]
        return low + (place - i) * (self.values[i + 1] - low)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """The tables. `decode_rest` and `decode_attention` by number of sequences of a group, from 0 on.

    `prompt_experts` is what `prompt_rest` leaves out, of the tokens of all groups where these share them
    (`shares_experts`), `expert_token_s` what a token adds to it in a large pass; slowdowns are those of
    `serve.fitted.Constants` and `serve.engine.Engine`.
    `prompt_host_s`: time of the host to launch a pass with prompts, during which the chip may wait;
    `guess_host_s`: what it adds to a pass without prompts for each sequence, `pass_s` to every pass.
    `encoding_token_s`: what a token
    of a prompt stands for of encoding its images and sound.
    """

    decode_rest: Sequence[float]
    decode_attention: Sequence[Curve]
    prompt_rest: Curve
    prompt_attention: Curve
    prompt_experts: Curve = Curve((0.0, 0.0), 1.0)
    expert_token_s: float = 0.0
    groups: int = 1
    shares_experts: bool = False
    prompt_host_s: float = 0.0
    guess_host_s: float = 0.0
    prompt_slowdown: float = 1.0
    expert_slowdown: float = 1.0
    encoding_token_s: float = 0.0
    decode_slowdown: float = 1.0
    pass_s: float = 0.0

    def decode_s(self, sequences: int, context: float) -> float:
        """Seconds of a pass without prompts."""
        each = -(-sequences // self.groups)
        kernels_s = self.decode_rest[each] + self.decode_attention[each](context)
        return self.decode_slowdown * kernels_s + each * self.guess_host_s + self.pass_s

    def mixed_s(self, chunks: Sequence[tuple[int, int]], sequences: int = 0, context: float = 0.0) -> float:
        """Seconds of a pass with the tokens from start to end of some prompts."""
        tokens = attention_s = largest = 0.0
        for start, end in chunks:
            tokens += end - start
            largest = max(largest, end - start)
            attention_s += self.prompt_attention(end) - self.prompt_attention(start)
        each = -(-sequences // self.groups)
        busiest = max(tokens / self.groups, largest)  # of all groups
        prompt_s = self.prompt_rest(busiest + each) + attention_s * busiest / tokens
        routed = tokens / self.groups if self.shares_experts else busiest
        experts_s = self.prompt_experts(routed + each)
        experts_s += (self.expert_slowdown - 1.0) * self.expert_token_s * (routed + each)
        device_s = self.prompt_slowdown * prompt_s + experts_s + self.decode_attention[each](context)
        device_s = max(device_s, self.prompt_host_s)
        return device_s + busiest * self.encoding_token_s + self.pass_s


def tabulate(serving: Serving, engine: Engine, longest: int, most_sequences: int) -> PassTimes:
    """The tables of `serving` for requests of at most `longest` tokens, `most_sequences` in a group."""
    counts = np.arange(most_sequences + 1.0)
    context_step = max(longest / CONTEXTS, 1.0)
    contexts = np.maximum(np.arange(CONTEXTS + 1) * context_step, 1.0)
    rest = np.broadcast_to(_rest(graphed_pass(serving, engine, counts, 1.0)), counts.shape)
    decode = decode_pass(attending(serving, engine), np.maximum(counts, 1.0), contexts[:, None])
    attention = np.broadcast_to(decode.time_s["attention"], (contexts.size, counts.size)) * (counts > 0)

    most_tokens = max(engine.max_tokens + most_sequences, longest)
    token_step = float(TILE * math.ceil(most_tokens / TILE / MOST_POINTS))
    tokens = np.maximum(np.arange(0.0, most_tokens + token_step, token_step), 1.0)
    prompted = run_by(serving, engine)
    prompts = price_pass(prompted, prompted.prefill(tokens / serving.prompt))
    experts = prompts.time_s["experts"]
    length_step = longest / POINTS
    prompt = np.maximum(np.arange(POINTS + 1) * length_step, 1.0)
    together = np.maximum(PREFILL_TOKENS / prompt, 1.0)
    alone = price_pass(serving, serving.prefill(together, prompt))
    prompt_attention = np.broadcast_to(alone.time_s["attention"] / together, prompt.shape).copy()
    prompt_attention[0] = 0.0
    return PassTimes(
        decode_rest=rest.tolist(),
        decode_attention=[Curve(column, context_step) for column in attention.T.tolist()],
        prompt_rest=Curve(np.broadcast_to(_rest(prompts) - experts, tokens.shape).tolist(), token_step),
        prompt_experts=Curve(np.broadcast_to(experts, tokens.shape).tolist(), token_step),
        expert_token_s=float(expert_token_s(prompted)),
        prompt_attention=Curve(prompt_attention.tolist(), length_step),
        groups=serving.groups,
        shares_experts=bool(shares_experts(serving)),
        prompt_host_s=0.0 if engine.graphs_prompts else launches_s(serving.model),
        guess_host_s=host_s(serving, engine),
        encoding_token_s=encoding_token_s(serving),
        prompt_slowdown=engine.prompt_slowdown,
        expert_slowdown=fitted().constants.expert_slowdown,
        decode_slowdown=engine.decode_slowdown,
        pass_s=engine.pass_s,
    )


def _rest(priced: PricedPass) -> Num:
    return priced.total_s - priced.time_s["attention"]

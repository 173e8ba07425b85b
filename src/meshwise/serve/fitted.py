"""What is fitted to measured serving points: seven constants of all engines, and how far predictions lie off.

`catalog/serving.toml`, written by `meshwise fit --only serving`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import msgspec

from meshwise.core.files import read_catalog
from meshwise.estimate.intervals import Interval, Spread


class Constants(msgspec.Struct, frozen=True):
    """Overheads that kernels do not have, the same for all engines, models and chips.

    `front_s` + `front_token_s` x prompt: HTTP, tokenizer and network before the scheduler sees a request;
    `reply_s`: the server's one process answers running requests in turn, each of which takes it so long;
    `prompt_slowdown`: time of passes with prompts over the sum of their kernels; `expert_slowdown`: time that
    the choices of a token add to experts over that of their kernels, unless the token is sent to them: it is
    sorted and brought back into order;
    `launched_op_s`: the host's time to launch a kernel of such a pass, in models with latent attention or
    recurrences, as no graph replays it;
    `guess_host_s`: its time for each sequence of a pass that checks guesses, where none is planned meanwhile.
    """

    front_s: float
    front_token_s: float
    reply_s: float
    prompt_slowdown: float
    expert_slowdown: float
    launched_op_s: float
    guess_host_s: float


class Fitted(msgspec.Struct, frozen=True):
    """The catalog: the constants, and percentiles of measured over predicted, by quantity and regime."""

    constants: Constants
    spreads: Mapping[str, Mapping[str, Spread]]


@cache
def fitted() -> Fitted:
    """The constants and spreads of `catalog/serving.toml`, read once."""
    return msgspec.convert(read_catalog("serving.toml"), Fitted)


def interval_of(quantity: str, value: float, regime: str) -> Interval:
    """Between which values a measurement of the prediction `value` lies, 8 times of 10."""
    spread = fitted().spreads[quantity][regime]
    reason = f"judging by {spread.num_runs} points of {spread.num_sources} models, none by its own"
    return Interval(p10=value * spread.p10, p90=value * spread.p90, reason=reason)

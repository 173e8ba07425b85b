"""Servers whose passes take what a test says, for closed forms to hold against."""

from dataclasses import replace
from typing import Any

from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.plan.plan import Plan
from meshwise.serve.engine import ENGINES, Engine
from meshwise.serve.instance import ServingWorker
from meshwise.serve.pass_times import Curve, PassTimes
from meshwise.serve.prefix_cache import Tier
from meshwise.serve.requests import Requests
from meshwise.serve.serving import Serving, serving
from meshwise.serve.simulate import Pools, Served, simulate

NO_LIMIT = 10**9
BARE: dict[str, Any] = dict.fromkeys(("front_s", "front_token_s", "reply_s"), 0.0)
BARE |= {"prompt_slowdown": 1.0, "lag_passes": 0}
VLLM = replace(ENGINES["vllm"], **BARE)
ONE_AT_A_TIME = replace(ENGINES["trtllm"], max_tokens=1, **BARE)
"""First come, first served, one prompt a pass: a queue with one server."""


def server(
    model: str = "llama3-8b", cluster: str = "h100-80g-sxm:1", *, prompt: int = 2048, output: int = 256,
    **plan: Any,
) -> Serving:  # fmt: skip
    """An instance of the catalog's `model` on `cluster`."""
    return serving(find_model(model), find_cluster(cluster), Plan(**plan), prompt=prompt, output=output)


def passes(
    fixed_s: float = 0.0, token_s: float = 0.0, *, decode_s: float = 0.0, past_s: float = 0.0,
    engine: Engine = VLLM,
) -> PassTimes:  # fmt: skip
    """A pass takes `fixed_s`, `token_s` a prompt token, `decode_s` and `past_s` a cached token a sequence."""
    most, rest, nothing = 5000, Curve([fixed_s, fixed_s + token_s], 1.0), Curve([0.0, 0.0], 1.0)
    return PassTimes(
        engine=engine, decode_rest=[fixed_s] * most, prompt_rest=rest, prompt_attention=nothing,
        decode_attention=[Curve([n * decode_s, n * (decode_s + past_s)], 1.0) for n in range(most)],
    )  # fmt: skip


def alone(requests: Requests, engine: Engine, times: PassTimes, cache: int) -> Served:
    """What one instance does."""
    return simulate(requests, Pools(ServingWorker(replace(times, engine=engine), cache)))


def on(requests: Requests, cache: int = NO_LIMIT, *tiers: Tier, **pools: Any) -> Served:
    """What a fleet of vLLM does, whose passes take 2 ms and 10 us a prompt token."""
    return simulate(requests, Pools(ServingWorker(passes(2e-3, 1e-5), cache, tiers), **pools))

"""Serving under load: what clients measure when `requests` meet an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwise.core.errors import WorkloadError
from meshwise.serve.engine import Engine
from meshwise.serve.pass_times import tabulate
from meshwise.serve.requests import Requests, at_rate, in_closed_loop
from meshwise.serve.serving import Serving, max_sequences, room_bytes, sequence_bytes
from meshwise.serve.simulate import Seconds, Served, simulate

OPEN_LOOP_REQUESTS = 1000
"""Requests that arrive at a rate, unless the caller says; a closed loop has ten of each client."""


def traffic(
    prompt: int,
    output: int,
    *,
    rate: float | None = None,
    concurrency: int | None = None,
    trace: Requests | None = None,
    num_requests: int | None = None,
    burstiness: float | None = None,
    length_ratio: float | None = None,
) -> Requests | None:
    """The requests that are asked for; None without a load. WorkloadError for what contradicts itself."""
    loads = {"rate": rate, "concurrency": concurrency, "requests": trace}
    stated = [name for name, load in loads.items() if load is not None]
    if len(stated) > 1:
        raise WorkloadError(f"{' and '.join(stated)} are two loads; give one of rate, concurrency, requests")
    shape = {"num_requests": num_requests, "burstiness": burstiness, "length_ratio": length_ratio}
    for name, number in {"rate": rate, "concurrency": concurrency, **shape}.items():
        if number is not None and not 0 < number < math.inf:
            raise WorkloadError(f"{name}={number:g} must be above zero")
        if number is not None and name in shape and (not stated or trace is not None):
            raise WorkloadError(f"{name} needs a load; give rate or concurrency too")
    ratio = 1.0 if length_ratio is None else length_ratio
    if ratio > 1:
        raise WorkloadError(f"length_ratio={ratio:g} must be at most 1: lengths go from there to the stated")
    if trace is not None:
        return trace
    if concurrency is not None:
        if burstiness is not None:
            raise WorkloadError("burstiness is of arrivals at a rate; a closed loop has none")
        return in_closed_loop(concurrency, prompt, output, num=num_requests or 10 * concurrency, ratio=ratio)
    if rate is not None:
        num = num_requests or OPEN_LOOP_REQUESTS
        return at_rate(rate, prompt, output, num=num, burstiness=burstiness or 1.0, ratio=ratio)
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What `requests` get from `engine` on `serving`; `ttft_s` and `tpot_s` are limits, if any."""

    serving: Serving
    requests: Requests
    engine: Engine
    served: Served
    cache_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens over the time from the first request to the last token."""
        return self.served.num_tokens / self.served.span_s

    @property
    def within_limits_frac(self) -> float | None:
        """Share of the requests that meet all limits; None without any."""
        if self.ttft_s is None and self.tpot_s is None:
            return None
        served, more = self.served, self.served.output > 1
        meets = served.ttft_s <= (math.inf if self.ttft_s is None else self.ttft_s)
        meets[more] &= served.tpot_s <= (math.inf if self.tpot_s is None else self.tpot_s)
        return float(meets.mean())

    @property
    def notes(self) -> list[str]:
        """What a reader should know about the figures."""
        served, found = self.served, []
        waits_s = served.ttft_s
        last_s = waits_s[-(len(waits_s) // 4) - 1 :].mean()  # 1.75 x the mean where a queue grows
        is_busy = served.busy_s > 0.95 * served.span_s
        if self.requests.arrival_s and is_busy and last_s > 1.5 * waits_s.mean():
            found.append(
                f"the queue grows: no more than {len(waits_s) / served.span_s:.3g} requests/s are served; "
                "the time to the first token depends on how many requests there are"
            )
        if served.num_preemptions:
            found.append(f"the cache was full: {served.num_preemptions} times a sequence was computed again")
        return found

    def to_json(self) -> dict[str, Any]:
        """The keys that a load adds to the document of `meshwise serve --json`."""
        served, num_chips = self.served, self.serving.cluster.num_chips
        within = self.within_limits_frac
        done_per_s = len(served.output) / served.span_s
        return {
            "engine": f"{self.engine.name} {self.engine.version}",
            "num_requests": len(served.output),
            "requests_per_s": done_per_s,
            "ttft_s": statistics(served.ttft_s),
            "tpot_s": statistics(served.tpot_s),
            "e2e_s": statistics(served.last_s - served.sent_s),
            "output_tokens_per_s_per_gpu": self.output_tokens_per_s / num_chips,
            "within_limits_frac": within,
            "goodput_per_s": None if within is None else within * done_per_s,
            "busy_frac": served.busy_s / served.span_s,
            "peak_sequences": served.peak_sequences,
            "peak_cache_frac": served.peak_cache_tokens / self.cache_tokens,
            "num_preemptions": served.num_preemptions,
        }


def statistics(seconds: Seconds) -> dict[str, float | None]:
    """Mean and percentiles; None where there is nothing to count."""
    if not seconds.size:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99)).tolist()
    return {"mean": float(seconds.mean()), "p50": p50, "p90": p90, "p99": p99}


def cache_tokens(serving: Serving) -> int:
    """Tokens of all sequences for which the caches of the instance have room."""
    token_bytes = sequence_bytes(serving) / (serving.prompt + serving.output)
    return max(int(room_bytes(serving) / token_bytes), 0) * serving.dp


def under_load(
    serving: Serving,
    requests: Requests,
    engine: Engine,
    *,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
) -> Load | None:
    """Serve `requests`; None where there is no room for one sequence beside the weights."""
    if requests.longest > serving.model.max_seq:
        raise WorkloadError(
            f"a request of {requests.longest} tokens is more than the {serving.model.max_seq} of "
            f"{serving.model.name}; leave longer ones out"
        )
    if not max_sequences(serving):
        return None
    tokens = cache_tokens(serving)
    if requests.longest > tokens:
        raise WorkloadError(
            f"a request of {requests.longest} tokens is more than the cache of {tokens}; use more GPUs or a "
            "narrower kv_dtype"
        )
    most = -(
        -min(requests.concurrency or len(requests.prompt), engine.max_sequences * serving.dp) // serving.dp
    )
    times = tabulate(serving, engine, requests.longest, most)
    served = simulate(requests, engine, times, tokens)
    return Load(serving, requests, engine, served, tokens, ttft_s, tpot_s)

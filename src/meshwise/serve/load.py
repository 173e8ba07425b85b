"""Serving under load: what clients measure when `requests` meet an engine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwise.core.errors import PlanError, WorkloadError
from meshwise.core.refusals import refuse, told
from meshwise.cost.power import chip_watts, node_watts
from meshwise.estimate.intervals import Interval
from meshwise.estimate.token_budget import usd_per_gpu_hour
from meshwise.machine.hardware import Cluster, host_bytes_per_s
from meshwise.model.weights import num_active_params
from meshwise.serve.engine import Engine, interval_of
from meshwise.serve.instance import ServingWorker
from meshwise.serve.pass_times import mean_pass, tabulate
from meshwise.serve.prefix_cache import Offload
from meshwise.serve.requests import Lengths, RateCurve, Requests, Turns, at_rate, in_closed_loop, in_sessions
from meshwise.serve.router import ROUND_ROBIN, RouterPolicy
from meshwise.serve.serving import Serving, memory_bytes, memory_of_one, prompt_s, room_bytes
from meshwise.serve.simulate import NO_LIMITS, Autoscaling, LatencyLimits, Pools, Seconds, Served, simulate
from meshwise.serve.stationary import CountedWindow, RequestStream, settled


def traffic(
    prompt: int, output: int, *, rate: float | None = None, concurrency: int | None = None,
    trace: Requests | None = None, num_requests: int | None = None, burstiness: float | None = None,
    length_ratio: float | None = None, length_sigma: float | None = None, shared_prefix: int | None = None,
    turns: Turns | None = None, rates: RateCurve | None = None, most: float = math.inf,
) -> Requests | RequestStream | None:  # fmt: skip
    """What is asked for: so many requests or a trace, else a stream of them; None without a load.

    `most`: tokens of a request for which there is a context. WorkloadError for what contradicts itself.
    """
    refuse("lengths", WorkloadError, prompt=prompt, output=output)
    arrives = trace is not None and bool(trace.arrival_s)
    loads = {"rate": rate, "rates": rates, "concurrency": concurrency, "requests": trace if arrives else None}
    stated = [name for name, load in loads.items() if load is not None]
    shape = {
        "num_requests": num_requests, "burstiness": burstiness, "length_ratio": length_ratio,
        "length_sigma": length_sigma, "shared_prefix": shared_prefix, "turns": turns.turns if turns else None,
    }  # fmt: skip
    for name, number in {"rate": rate, "concurrency": concurrency, **shape}.items():
        if number is not None and not 0 < number < math.inf:
            raise WorkloadError(f"{name}={number:g} must be above zero")
        if number is not None and name in shape and (not stated or arrives):
            raise WorkloadError(f"{name} needs a load; give rate or concurrency too")
    kinds = {"length_ratio": length_ratio, "length_sigma": length_sigma, "requests": trace}
    drawn = [name for name, given in kinds.items() if given is not None]
    refuse(
        "load", WorkloadError, stated=stated, loads=" and ".join(stated), drawn=drawn, rates=rates, rate=rate,
        kinds=" and ".join(drawn), arrives=arrives, trace=trace, length_ratio=length_ratio,
        burstiness=burstiness, num_requests=num_requests,
    )  # fmt: skip
    if arrives or not stated:
        return trace
    pairs = tuple(zip(trace.prompt, trace.output, strict=True)) if trace else ()
    lengths = Lengths(prompt, output, length_ratio or 1.0, length_sigma or 0.0, pairs, most)
    each = turns.turns if turns else 1

    def draw(num: int) -> Requests:
        num = -(-num // each)
        if rates is not None:
            found = rates.requests(lengths, each)
        elif rate is not None:
            found = at_rate(rate / each, lengths, num=num, burstiness=burstiness or 1.0)
        else:
            found = in_closed_loop(concurrency or 0, lengths, num=num)
        if shared_prefix is not None and shared_prefix >= min(found.prompt):
            raise WorkloadError(f"shared_prefix={shared_prefix} leaves nothing of a prompt; make it shorter")
        if turns is not None:
            return in_sessions(found, turns, shared_prefix or 0)
        if shared_prefix is None:
            return found
        return replace(found, blocks=((0,),) * len(found.prompt), block_tokens=shared_prefix)

    return draw(num_requests or 1) if num_requests or rates else RequestStream(draw, rate, concurrency or 0)


@dataclass(frozen=True, slots=True)
class Fleet:
    """`workers` instances of `serving`; with `prefill`, `prefill_workers` more that only take prompts.

    A `router` sends requests to them; with `scaling`, `workers` is how many there are at the start.
    """

    serving: Serving
    workers: int = 1
    prefill: Serving | None = None
    prefill_workers: int = 1
    router: RouterPolicy = ROUND_ROBIN
    offload: Offload | None = None
    scaling: Autoscaling | None = None

    def __post_init__(self) -> None:
        refuse("workers", WorkloadError, of=self)
        if self.serving.mesh.cp > 1:
            raise PlanError(f"cp={self.serving.mesh.cp:g} cuts prompts alone; give it in prefill_plan")

    @property
    def num_chips(self) -> int:
        """GPUs of all workers, of all pools."""
        return sum(cluster.num_chips * workers for cluster, workers in self.clusters)

    @property
    def clusters(self) -> list[tuple[Cluster, int]]:
        """The GPUs of an instance of each pool, and how many instances there are."""
        return [(of.cluster, workers) for of, workers in self.pools]

    @property
    def pools(self) -> list[tuple[Serving, int]]:
        """The instances of each pool and how many there are, those that only take prompts first."""
        prefill = [(self.prefill, self.prefill_workers)] if self.prefill else []
        return [*prefill, (self.serving, self.workers)]

    @property
    def transfer_token_s(self) -> float:
        """Seconds that a token's cache takes from a prefill rank over the outermost link of its cluster.

        Each rank sends what it holds; latents (MLA), which all tp ranks hold alike, are sent once.
        """
        if self.prefill is None:
            return 0.0
        return token_bytes(self.prefill) / self.prefill.cluster.levels[-1].bytes_per_s


@dataclass(frozen=True, slots=True, eq=False)
class LoadResult:
    """What `requests` get from `engine` on `fleet`.

    `simulated` has all requests, `served` those that count: between warm-up and end where a stream is served
    until it has settled (`window`), else all.
    """

    fleet: Fleet
    requests: Requests
    engine: Engine
    simulated: Served
    limits: LatencyLimits = NO_LIMITS
    window: CountedWindow | None = None

    @property
    def served(self) -> Served:
        """The requests that count."""
        return self.window.served if self.window else self.simulated

    @property
    def requests_per_s(self) -> float:
        """Requests that end in a second; without a window of all, from the first one to the last token."""
        if self.window:
            return self.window.requests_per_s
        return len(self.simulated.output) / self.simulated.span_s

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens generated in a second, by the same rule."""
        if self.window:
            return self.window.output_tokens_per_s
        return self.simulated.num_tokens / self.simulated.span_s

    @property
    def queue_grows(self) -> bool:
        """Whether more requests come than can be served, so that times depend on how long one measures."""
        return self.window is not None and self.window.queue_grows

    @property
    def within_limits_frac(self) -> float | None:
        """Share of the requests that meet all limits; None without any."""
        return float(self.limits.kept(self.served).mean()) if self.limits.any else None

    @property
    def mean_workers(self) -> float:
        """Workers that are paid for, on average."""
        if self.fleet.scaling is None:
            return self.fleet.workers
        return sum(stop - start for start, stop in self.simulated.lives_s) / self.simulated.span_s

    @property
    def mean_chips(self) -> float:
        """GPUs that are paid for, on average."""
        return self.fleet.num_chips + (self.mean_workers - self.fleet.workers) * self.fleet.serving.num_chips

    @property
    def regime(self) -> str:
        """What moves the error of its figures: a cache that requests wait for, or separate pools."""
        if self.simulated.was_full:
            return "full cache"
        return "separate pools" if self.fleet.prefill else "room in the cache"

    @property
    def notes(self) -> list[str]:
        """What a reader should know about the figures."""
        halves = self.window.half_frac.items() if self.window else ()
        first, later = (self._interval(name, 1.0) for name in ("ttft_s", "tpot_s"))
        return told(
            "load notes", window=self.window, num=self.simulated.num_preemptions, of=self.requests,
            longest=self.fleet.serving.model.max_seq, drawn=len(self.requests.prompt),
            first=first, later=later,
            halves=", ".join(f"{name} +-{half:.0%}" for name, half in halves),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The keys that a load adds to the document of `meshwise serve --json`."""
        served, run, fleet, of = self.served, self.simulated, self.fleet, self.fleet.serving
        prompt_tokens, percentile = sum(self.requests.prompt), self.limits.percentile
        within, scaling = self.within_limits_frac, fleet.scaling
        own = ("requests_per_s", "queue_grows", "within_limits_frac")
        figures: dict[str, Any] = {
            "ttft_s": statistics(served.ttft_s, percentile),
            "tpot_s": statistics(served.tpot_s, percentile),
            "output_tokens_per_s_per_gpu": self.output_tokens_per_s / self.mean_chips,
        }
        between = {name: self._interval(name, value) for name, value in figures.items()}
        return {
            "num_gpus": fleet.num_chips,
            "workers": fleet.workers,
            "prefill_workers": fleet.prefill_workers if fleet.prefill else 0,
            "engine": self.engine.title,
            "num_requests": len(served.output),
            "window": self.window and self.window.to_json(),
            **{name: getattr(self, name) for name in own},
            **figures,
            **{f"{name}_interval": one and one.to_json() for name, one in between.items()},
            "e2e_s": statistics(served.last_s - served.sent_s, percentile),
            "goodput_per_s": None if within is None else within * self.requests_per_s,
            "busy_frac": run.busy_s / run.span_s,
            "peak_cache_frac": run.peak_cache_tokens * of.engines / cache_tokens(of),
            "prompt_tokens_found_frac": run.num_found / prompt_tokens,
            "prompt_tokens_loaded_frac": {name: num / prompt_tokens for name, num in run.loaded_from.items()},
            "router": fleet.router.policy,
            "autoscale": scaling and scaling.to_json(run.lives_s, run.span_s),
            **{name: getattr(run, name) for name in ("peak_sequences", "num_preemptions")},
        }

    @property
    def columns(self) -> dict[str, list[Any]]:
        """A row for each request, as benchmark clients write them: who, when [s], how long [s], tokens.

        `counts`: whether it is in the figures, not in warm-up or end.
        """
        run, requests = self.simulated, self.requests
        number = np.arange(len(run.output))
        sent = self.served.sent_s
        found: dict[str, Any] = {
            "request": number,
            "session": requests.sessions if requests.after else number,
            **{name: getattr(run, name) for name in ("replica", "sent_s", "start_s")},
            **{"first_token_s": run.first_s, "last_token_s": run.last_s, "prompt": requests.prompt},
            **{name: getattr(run, name) for name in ("output", "found", "loaded", "ttft_s")},
            "tpot_s": [s if num > 1 else None for s, num in zip(run.token_s, run.output, strict=True)],
            "e2e_s": run.last_s - run.sent_s,
            "within_limits": self.limits.kept(run),
            "counts": (run.sent_s >= sent.min()) & (run.sent_s <= sent.max()),
        }
        return {name: np.asarray(column).tolist() for name, column in found.items()}

    def _interval(self, name: str, value: float | dict[str, float | None]) -> Interval | None:
        """Between which a measured mean would be, 8 times of 10."""
        mean = value["mean"] if isinstance(value, dict) else value
        return interval_of(name, mean, self.regime, self.fleet.serving.cluster.chip) if mean else None


def pool_usd_per_hour(cluster: Cluster, workers: float, price: Mapping[str, float]) -> float:
    """Dollars an hour of `workers` instances on `cluster`, at a price of each chip (`""`: of any)."""
    return usd_per_gpu_hour(cluster, price) * cluster.num_chips * workers


def usd_per_hour(fleet: Fleet, price: Mapping[str, float]) -> float:
    """Dollars an hour of all workers."""
    return sum(pool_usd_per_hour(*pool, price) for pool in fleet.clusters)


def cost(load: LoadResult, price: Mapping[str, float]) -> dict[str, float]:
    """What tokens cost, at a price of each chip (`""`: of any).

    Prompts pay for the share of the time that they take (the prefill pool, where there is one), which is that
    of the tokens that no cache held; generated tokens pay for the rest.
    """
    fleet, run, num = load.fleet, load.simulated, len(load.requests.prompt)
    prompt_tokens, found_tokens = sum(load.requests.prompt) / num, run.num_found / num
    workers = load.mean_workers
    last, first = pool_usd_per_hour(fleet.serving.cluster, workers, price), 0.0
    if fleet.prefill:
        first = pool_usd_per_hour(fleet.prefill.cluster, fleet.prefill_workers, price)
    else:
        lengths = (max(round(tokens), 1) for tokens in (prompt_tokens, found_tokens))
        whole_s, found_s = (prompt_s(replace(fleet.serving, prompt=tokens)) for tokens in lengths)
        prompts_frac = load.requests_per_s * (whole_s - found_s) / (fleet.serving.groups * workers)
        first = last * min(prompts_frac * run.span_s / run.busy_s, 1.0)
        last -= first
    return {
        "usd_per_hour": first + last,
        "usd_per_million_input_tokens": 1e6 * first / (3600.0 * load.requests_per_s * prompt_tokens),
        "usd_per_million_output_tokens": 1e6 * last / (3600.0 * load.output_tokens_per_s),
    }


def energy(load: LoadResult, pue: float = 1.0, carbon: float | None = None) -> dict[str, Any]:
    """Watts of GPUs, and of their nodes at the wall; by the latter joules an output token, kWh a million.

    The building draws `pue` times what the nodes do; with `carbon` grams of CO2 a kWh, kilograms of it.

    By the model of `cost.power`: a GPU waits while its engine has no pass, and in a pass for the kernels of
    communication; in the rest it does the matrix FLOP of the tokens that it computes, two for each active
    parameter, of prompts what no cache held. The kernels' share is that of a decode pass of the mean batch.
    None where no power limit is published.
    """
    fleet, run = load.fleet, load.simulated
    output_frac = run.num_tokens / (run.num_tokens + sum(load.requests.prompt) - run.num_found)
    pools = [(fleet.serving, load.mean_workers, output_frac if fleet.prefill else 1.0)]
    if fleet.prefill:
        pools.append((fleet.prefill, float(fleet.prefill_workers), 1.0 - output_frac))
    if not all(cluster.chip.power_watts for cluster, _ in fleet.clusters):
        return {"power_watts": None, "joule_per_output_token": None, "kwh_per_million_output_tokens": None}
    watts = [(num * of.num_chips, _chip_watts(load, of, num, share)) for of, num, share in pools]
    wall_watts = sum(chips * float(node_watts(each)) for chips, each in watts)
    joule = pue * wall_watts / load.output_tokens_per_s
    emitted = {} if carbon is None else {"co2_kg_per_million_output_tokens": joule / 3.6 * carbon / 1e3}
    return emitted | {
        "power_watts": {"gpus": sum(chips * each for chips, each in watts), "wall": wall_watts},
        "joule_per_output_token": joule,
        "kwh_per_million_output_tokens": joule / 3.6,
    }


def _chip_watts(load: LoadResult, of: Serving, workers: float, token_share: float) -> float:
    """Mean watts of a GPU of one pool, which computes `token_share` of all tokens."""
    run, chip, dtype = load.simulated, of.cluster.chip, of.mesh.plan.dtype
    busy_frac = min(max(run.busy_s / run.span_s, 1e-6), 1.0)
    running = float((run.last_s - run.first_s).sum()) / run.span_s / workers / of.groups
    time_s = mean_pass(of, max(running, 1.0), load.engine).time_s
    spent = {name: float(part) for name, part in time_s.items()}
    exchanged = sum(part for name, part in spent.items() if name.startswith("comm"))
    working_frac = busy_frac * (1.0 - exchanged / sum(spent.values()))
    tokens = run.num_tokens + sum(load.requests.prompt) - run.num_found
    flop = 2.0 * num_active_params(of.model) * tokens * token_share
    flop_per_s = flop / (workers * of.num_chips * run.span_s * working_frac)
    sustained_flop_per_s = of.machine.overheads.sustained_flop_per_s(dtype, chip.power_watts)
    matrix_frac = flop_per_s / min(sustained_flop_per_s, chip.matrix_peak(dtype))
    return float(chip_watts(chip.power_watts, waiting_frac=1.0 - working_frac, matrix_frac=matrix_frac))


def statistics(seconds: Seconds, percentile: float = 90.0) -> dict[str, float | None]:
    """Mean and percentiles, one more if stated; None where there is nothing to count."""
    percentiles = sorted({50.0, 90.0, 99.0, percentile})
    names = [f"p{number:g}" for number in percentiles]
    if not seconds.size:
        return dict.fromkeys(("mean", *names))
    found = zip(names, np.percentile(seconds, percentiles).tolist(), strict=True)
    return {"mean": float(seconds.mean()), **dict(found)}


def token_bytes(serving: Serving) -> float:
    """Bytes of the cache of one token on a rank, the mean of a sequence."""
    return memory_of_one(serving)["cache"] / (serving.prompt + serving.output)


def cache_tokens(serving: Serving) -> int:
    """Tokens of all sequences for which the caches of the instance have room."""
    memory = memory_bytes(serving, 1.0)
    token = float(memory["cache"]) / (serving.prompt + serving.output)
    return max(int(room_bytes(serving, memory) / token), 0) * serving.dp


def under_load(
    fleet: Fleet, requests: Requests | RequestStream, engine: Engine, limits: LatencyLimits = NO_LIMITS
) -> LoadResult | None:
    """Serve `requests`, a stream until it has settled; None where one sequence has no room."""

    if not has_room(fleet):
        return None

    def serve(drawn: Requests) -> Served:
        return simulate(drawn, pools_of(fleet, drawn, engine))

    if isinstance(requests, Requests):
        return LoadResult(fleet, requests, engine, serve(requests), limits)
    window, served, drawn = settled(requests, serve)
    return LoadResult(fleet, drawn, engine, served, limits, window)


def has_room(fleet: Fleet) -> bool:
    """Whether every dp rank of each pool has room for one request."""
    return all(cache_tokens(of) >= (of.prompt + of.output) * of.dp for of, _ in fleet.pools)


def pools_of(fleet: Fleet, requests: Requests, engine: Engine) -> Pools:
    """The workers of `fleet`, which has room for a sequence, with the times of their passes."""
    serving = fleet.serving
    refuse("longest request", WorkloadError, longest=requests.longest, model=serving.model, of=requests)
    first, transfer_s = None, 0.0
    if fleet.prefill is not None:
        transfer_s = fleet.prefill.cluster.levels[-1].latency_s
        first = _worker(fleet.prefill, requests, engine.of_prompts, fleet.offload)
        engine = replace(engine, align_passes=0)  # where others take the prompts, there are none to align
    worker = _worker(serving, requests, engine, fleet.offload)
    num_first = fleet.prefill_workers * (fleet.prefill.engines if fleet.prefill else 1)
    return Pools(
        worker, fleet.workers * serving.engines, first, num_first, transfer_s, fleet.transfer_token_s,
        fleet.router, fleet.scaling,
    )  # fmt: skip


def _worker(serving: Serving, requests: Requests, engine: Engine, offload: Offload | None) -> ServingWorker:
    """One engine of an instance."""
    serving = replace(serving, mesh=replace(serving.mesh, dp=serving.mesh.dp / (engines := serving.engines)))
    tokens, engine = cache_tokens(serving), engine.on(serving.cluster.chip, serving.dp)
    refuse("request in a cache", WorkloadError, longest=requests.longest, tokens=tokens)
    clients = min(requests.concurrency or len(requests.prompt), engine.max_sequences * serving.groups)
    if serving.speculation is not None:  # the simulation counts a pass for each token that one gives
        each = serving.speculation.tokens_per_pass
        waits = ("lag_passes", "poll_passes", "align_passes")
        engine = replace(engine, **{name: round(each * getattr(engine, name)) for name in waits})
    times = tabulate(serving, engine, requests.longest, -(-clients // serving.groups))
    tiers = offload.tiers(token_bytes(serving), host_bytes_per_s(serving.cluster.chip)) if offload else ()
    return ServingWorker(times, tokens, tiers, serving.dp, engines)

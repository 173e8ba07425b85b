"""What a load needs within its latency limits: screen all layouts, then simulate the finalists.

Each layout, and each pair of layouts for separate pools, gets the largest batch that keeps the limits in
closed form (`serve.screen`), and as many workers as the rate asks for. Of each chip, with one pool and with
two, those that cost least are simulated under the load, until what is left costs more than one that holds;
where too many requests miss a limit, a worker is added. The answer is the cheapest of these, by dollars where
prices are stated, else by GPUs, and of equal ones the farthest from the limits. Pools of two different chips
of one vendor are tried where their closed form costs less than what one chip takes.

*Trade-offs* are what no other choice beats in both tokens/s a user and tokens/s a GPU, of all GPUs. Pools are
matched in rate there, as if workers could be shared out in any ratio.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product, takewhile
from time import perf_counter
from typing import Any

import numpy as np

from meshwise.core.columns import grouped, pareto_front
from meshwise.core.each import HEARS, all_of
from meshwise.core.errors import WorkloadError
from meshwise.core.refusals import refuse
from meshwise.machine.hardware import Cluster
from meshwise.serve import screen as screening
from meshwise.serve.engine import Engine
from meshwise.serve.load import Fleet, LoadResult, under_load, usd_per_hour
from meshwise.serve.prefix_cache import Offload
from meshwise.serve.requests import Requests
from meshwise.serve.router import ROUND_ROBIN, RouterPolicy
from meshwise.serve.screen import BATCHES, Grid, Mask, Screen, layout_text, screen
from meshwise.serve.serving import Serving
from meshwise.serve.simulate import LatencyLimits
from meshwise.serve.stationary import RequestStream, at_most, faster

FINALISTS, MAX_SIMULATIONS = 4, 12
"""Choices of each kind (chips, pools) that are simulated, and how often, workers being added."""
SEARCH_REQUESTS, ANSWER_REQUESTS, HEADROOM_REQUESTS = 8_000, 32_000, 16_000
"""Requests of a simulation at most: of finalists, of one that holds and has not settled, of more traffic."""
SAMPLE_REQUESTS = 2_000
"""That say how long prompts are, and how much of them a cache may hold."""
MORE_TRAFFIC = (1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 3.0)
"""Of the load's rate, what is tried to see how much more there may be."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Instances of one layout, or pools of two, with steadily `sequences` on a dp rank at most; closed form.

    Its latencies are those of the batch that the asked rate needs, without one those of `sequences`.
    `binds`: what keeps the batch from growing, memory or a limit; or the rate, where it asks for less; or
    prompts, where most GPUs only take these.
    `load`: what was simulated of it, if it was.
    """

    fleet: Fleet
    sequences: int
    ttft_s: float
    tpot_s: float
    tokens_per_s_per_gpu: float
    binds: str = ""
    load: LoadResult | None = None
    usd_per_gpu_hour: Mapping[str, float] | None = None

    @property
    def kind(self) -> tuple[str | None, str]:
        """The chips of its prefill pool (None: it has none), and of its workers."""
        first, last = self.fleet.prefill, self.fleet.serving
        return first.cluster.chip.name if first else None, last.cluster.chip.name

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars of all its GPUs; None without prices."""
        return None if self.usd_per_gpu_hour is None else usd_per_hour(self.fleet, self.usd_per_gpu_hour)

    @property
    def rank(self) -> tuple[float, ...]:
        """What it costs, to compare: dollars or GPUs, GPUs, whether pools are two, then how near limits are.

        That is how much of a limit it takes under the load; until it is simulated the time of a token.
        """
        num, usd, load = self.fleet.num_chips, self.usd_per_hour, self.load
        nearness = load.limits.taken_frac(load.served) if load else self.tpot_s
        return (num if usd is None else usd), num, self.fleet.prefill is not None, nearness

    @property
    def within_frac(self) -> float:
        """Share of the simulated requests that keep the limits; all, where there are none."""
        return 0.0 if self.load is None else float(self.load.limits.kept(self.load.served).mean())

    @property
    def holds(self) -> bool:
        """Whether enough requests keep the limits."""
        load = self.load
        return load is not None and not load.queue_grows and load.limits.hold(load.served)

    def to_json(self) -> dict[str, Any]:
        """Its layouts in words, its figures, and what was simulated of it."""
        fleet, first = self.fleet, _instance(self.fleet.prefill, self.fleet.prefill_workers)
        found = _instance(fleet.serving, fleet.workers)
        found |= {f"prefill_{key}": value for key, value in first.items()}
        found |= {"num_gpus": fleet.num_chips, "batch": self.sequences}
        found["max_sequences_per_dp_rank"] = self.sequences
        figures = ("usd_per_hour", "ttft_s", "tpot_s", "tokens_per_s_per_gpu", "binds")
        found |= {name: getattr(self, name) for name in figures}
        found["tokens_per_s_per_user"] = 1.0 / self.tpot_s
        if self.load:
            load = self.load.to_json()
            names = ("ttft_s", "tpot_s", "output_tokens_per_s_per_gpu", "within_limits_frac", "goodput_per_s")
            found["max_sequences_per_dp_rank"] = self.load.engine.on(fleet.serving.cluster.chip).max_sequences
            found |= {"holds": self.holds} | {f"simulated_{name}": load[name] for name in names}
        return found


def _instance(of: Serving | None, workers: int) -> dict[str, Any]:
    """One pool in words; None for each of them where there is no such pool."""
    keys = ("chip", "layout", "plan_text", "gpus_per_worker", "workers")
    if of is None:
        return dict.fromkeys(keys)
    layout = f"tp={of.plan['tp']}" + (f" dp={of.dp} ep={of.plan['ep']}" if of.model.moe else "")
    chip = of.cluster.chip.name
    return dict(zip(keys, (chip, layout, layout_text(of), of.cluster.num_chips, workers), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Sizing:
    """What was screened and simulated; `best` is the cheapest that holds, None if nothing does.

    `least_ttft_s` and `least_tpot_s`: the least of any layout that fits, alone; None where none does.
    `rate`: requests a second. `headroom_frac`: how much more the best holds, of MORE_TRAFFIC.
    `too_large`: the cheapest in closed form, where the clusters have too few GPUs for any.
    """

    num_considered: int
    elapsed_s: float
    simulated: tuple[Choice, ...]
    trade_offs: tuple[Choice, ...]
    choices: tuple[Choice, ...]
    least_ttft_s: float | None
    least_tpot_s: float | None
    rate: float | None = None
    headroom_frac: float | None = None
    too_large: Choice | None = None

    @property
    def best(self) -> Choice | None:
        """The cheapest simulated choice that holds; None if none does."""
        return _best(self.simulated)

    @property
    def bests(self) -> list[Choice]:
        """The best of each chip with one pool and with two, the cheapest first."""
        held = sorted((one for one in self.simulated if one.holds), key=lambda one: one.rank)
        return [alike[0] for alike in grouped(held, lambda one: one.kind).values()]

    @property
    def nearest(self) -> Choice | None:
        """Where nothing holds, what most requests are within the limits with."""
        return max(self.simulated, key=lambda one: one.within_frac, default=None)

    @property
    def chosen(self) -> Choice | None:
        """The best, else the nearest; of no rate the last of the trade-offs."""
        return self.best or self.nearest if self.rate else next(reversed(self.trade_offs), None)

    def to_json(self) -> dict[str, Any]:
        """The keys that sizing adds to the document of `meshwise serve --json`."""
        best, nearest = self.best, self.nearest
        figures = ("elapsed_s", "least_ttft_s", "least_tpot_s", "rate", "headroom_frac")
        ones = {"best": best, "nearest_miss": None if best else nearest, "too_large": self.too_large}
        several = {"best_of_each": self.bests, "simulated": self.simulated, "pareto": self.trade_offs}
        return {
            "configurations_considered": self.num_considered,
            "configurations_per_s": self.num_considered / self.elapsed_s,
            **{name: getattr(self, name) for name in figures},
            **{name: one and one.to_json() for name, one in ones.items()},
            **{name: [one.to_json() for one in choices] for name, choices in several.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """A load and its limits on servers of `engine`: `rate` requests a second, or (None) only trade-offs.

    `router` and `offload` are those of each fleet. `pools`: "one", "two", or "" for either.
    `usd_per_gpu_hour` by chip ("" is any). WorkloadError for clients in a closed loop.
    """

    engine: Engine
    requests: Requests | RequestStream | None
    limits: LatencyLimits
    router: RouterPolicy = ROUND_ROBIN
    offload: Offload | None = None
    pools: str = ""
    usd_per_gpu_hour: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        refuse("sizing", WorkloadError, of=self)

    @property
    def rate(self) -> float | None:
        """Requests a second; None without requests."""
        return self.requests.rate if self.requests is not None else None


def size(
    instance: Callable[..., Serving], clusters: Sequence[Cluster], fixed: Mapping[str, Sequence[Any]],
    wanted: Wanted,
) -> Sizing:  # fmt: skip
    """The fewest GPUs of one of `clusters` (or of two, one for each pool) that hold what is `wanted`."""
    began = perf_counter()
    screened = _screened(instance, clusters, fixed, wanted)
    most = {cluster.chip.name: cluster.num_chips for cluster in clusters}
    wide = [one for one in screened.choices(None) if _is_within(one.fleet, most)]
    ranked = sorted(screened.choices(wanted.rate) if wanted.rate else [], key=lambda one: one.rank)
    elapsed_s = max(perf_counter() - began, 1e-9)
    simulated: list[Choice] = []
    for choice in _finalists(ranked, wanted, most):
        simulated.append(choice)
        holds = f"; {best.fleet.num_chips:,} GPUs hold the load" if (best := _best(simulated)) else ""
        HEARS.get()(f"layouts simulated: {len(simulated)}{holds}")
    _settle(simulated, wanted, most)
    best = _best(simulated)
    is_large = best is None and ranked and not _is_within(ranked[0].fleet, most)
    return Sizing(
        screened.num_considered, elapsed_s, tuple(simulated), _trade_offs(wide), tuple(wide),
        screened.least_ttft_s, screened.least_tpot_s, wanted.rate,
        _headroom_frac(best, wanted) if best else None, ranked[0] if is_large else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Screened:
    """All layouts of each cluster at every batch, for what is `wanted`."""

    screens: Sequence[Screen]
    wanted: Wanted

    @property
    def pairs(self) -> list[tuple[Screen, Screen]]:
        """Clusters of a prefill pool and of the workers behind it: chips of one vendor."""
        both = product(self.screens, self.screens)
        return [(first, last) for first, last in both if first.vendor == last.vendor]

    @property
    def num_considered(self) -> int:
        """Layouts and batches of one pool and of two."""
        num = sum(one.pass_s.size for one in self.screens)
        return num + sum(len(first.instances) * last.pass_s.size for first, last in self.pairs)

    @property
    def least_ttft_s(self) -> float | None:
        """Seconds to the first token of the fastest layout that fits, alone."""
        fit = [one.alone_s[one.fits[:, 0]] for one in self.screens]
        return min((float(of.min()) for of in fit if of.size), default=None)

    @property
    def least_tpot_s(self) -> float | None:
        """Seconds of a token of the fastest layout that fits, at its smallest batch."""
        fit = [one.pass_s[one.fits] for one in self.screens]
        return min((float(of.min()) for of in fit if of.size), default=None)

    def choices(self, rate: float | None) -> list[Choice]:
        """The largest batch of each layout, or pair of them, within the limits; without a rate several."""
        limits, pools = self.wanted.limits, self.wanted.pools
        together = (choice for one in self.screens for choice in _together(one, limits, rate))
        apart = (choice for first, last in self.pairs for choice in _apart(first, last, limits, rate))
        found = [*(together if pools != "two" else ()), *(apart if pools != "one" else ())]
        return [replace(choice, usd_per_gpu_hour=self.wanted.usd_per_gpu_hour) for choice in found]


def _screened(
    instance: Callable[..., Serving], clusters: Sequence[Cluster], fixed: Mapping[str, Sequence[Any]],
    wanted: Wanted,
) -> _Screened:  # fmt: skip
    """The layouts of `clusters` for requests as the load sends them."""
    missing_frac, requests = 1.0, wanted.requests
    if requests is not None:
        drawn = requests if isinstance(requests, Requests) else requests.draw(SAMPLE_REQUESTS)
        missing_frac = 1.0 - drawn.found_frac
        if drawn.after:  # a turn's prompt is all that was said before
            prompt, output = drawn.mean_tokens
            instance = partial(instance, prompt=prompt, output=output)
    of_cluster = partial(screen, instance, fixed=fixed, engine=wanted.engine, missing_frac=missing_frac)
    return _Screened([one for one in all_of(of_cluster, clusters) if one is not None], wanted)


def _settle(simulated: list[Choice], wanted: Wanted, most: Mapping[str, int]) -> None:
    """Simulate the best choice for longer until its figures settle; what no longer holds gets more GPUs."""
    while (best := _best(simulated)) and best.load and best.load.window and not best.load.window.is_settled:
        assert wanted.requests is not None
        longer = _under(best, wanted, at_most(wanted.requests, ANSWER_REQUESTS))
        simulated[simulated.index(best)] = longer
        if longer.holds or longer.load is None:
            return
        known = {one.fleet for one in simulated}
        larger = replace(best, fleet=_larger(best.fleet, longer.load, known, most))
        simulated += _simulated([larger], wanted, most, known)


def _best(choices: Sequence[Choice]) -> Choice | None:
    return min((one for one in choices if one.holds), key=lambda one: one.rank, default=None)


# --- choices in closed form ----------------------------------------------------------------------


def _together(of: Screen, limits: LatencyLimits, asked: float | None) -> Iterator[Choice]:
    """Each layout taking prompts and decoding: at the largest batch within the limits, or at several."""
    token_s, first_s, rate = of.token_s, of.first_s, of.rate
    for i, j in _cells(of.fits & (token_s <= limits.tpot_s) & (first_s <= limits.ttft_s), asked):
        num = math.ceil(asked / rate[i, j]) if asked else 1
        runs = _running(num * rate[i], asked, j)
        yield Choice(
            Fleet(of.instances[i], num), int(BATCHES[j]), float(first_s[i, runs]), float(token_s[i, runs]),
            float(rate[i, j] * of.output / of.num_chips[i, 0]),
            _binds(of, i, j, token_s, limits, asked, num * rate[i, j]),
        )  # fmt: skip


def _apart(first: Screen, last: Screen, limits: LatencyLimits, asked: float | None) -> Iterator[Choice]:
    """Pairs of layouts for separate pools. Without a rate, workers are matched to each other's."""
    alone_s, prompt_s = first.alone_s[:, 0], first.prompt_s[:, 0]
    fits, token_s = (first.most >= 1)[:, 0], last.pass_s
    for i, j in _cells(last.fits & (token_s <= limits.tpot_s), asked):
        left_s = limits.ttft_s - alone_s - token_s[i, j]
        shares = 2.0 * np.maximum(left_s, 0.0) / prompt_s
        busy = np.minimum(1.0 - 1.0 / (1.0 + shares), screening.PREFILL_UTILIZATION)
        rate = busy * first.dp[:, 0] / prompt_s
        works = fits & (rate > 0.0)
        if not works.any():
            continue
        decode_rate = float(last.decode_rate[i, j])
        num = math.ceil(asked / decode_rate) if asked else 1
        workers = (asked or decode_rate) / np.maximum(rate, 1e-30)
        gpus = np.where(works, (workers, np.ceil(workers)), np.inf) * first.num_chips[:, 0]
        k = int(np.lexsort(gpus)[0] if asked else gpus[0].argmin())  # fewest GPUs, then with most to spare
        num_prefill = math.ceil(workers[k])
        waits_s = busy[k] * prompt_s[k] / (2.0 * (1.0 - busy[k]))
        each_s = float(token_s[i, _running(num * last.decode_rate[i], asked, j)])
        binds = _binds(last, i, j, token_s, limits, asked, num * decode_rate)
        if asked and num_prefill * first.num_chips[k, 0] > num * last.num_chips[i, 0]:
            binds = "prompts"
        yield Choice(
            Fleet(last.instances[i], num, first.instances[k], num_prefill), int(BATCHES[j]),
            float(alone_s[k] + waits_s + each_s), each_s,
            float(decode_rate * last.output / (gpus[0, k] + last.num_chips[i, 0])), binds,
        )  # fmt: skip


def _cells(holds: Mask, rate: float | None) -> Iterator[tuple[int, int]]:
    """The largest batch of each layout where something `holds`; without a rate every fourth batch too."""
    for i, row in enumerate(holds):
        found = np.flatnonzero(row)
        if found.size:
            yield from ((i, int(j)) for j in (found[-1:] if rate else {*found[::4], found[-1]}))


def _running(rates: Grid, asked: float | None, most: int) -> int:
    """The place of the batch that the `asked` rate needs, of all rates of the workers; at `most` that."""
    return most if asked is None else min(int(np.searchsorted(rates, asked)), most)


def _binds(
    of: Screen, i: int, j: int, token_s: Grid, limits: LatencyLimits, asked: float | None, rate: float
) -> str:
    """What keeps the batch from growing; the rate, where half of it would do."""
    if asked and rate > 2.0 * asked:
        return "rate"
    if j + 1 == BATCHES.size or BATCHES[j + 1] > of.most[i, 0]:
        return "memory"
    if token_s[i, j + 1] > limits.tpot_s:
        return "token"
    return "first token" if limits.ttft_s < math.inf else ""


def _trade_offs(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Those that no other beats in both tokens/s a user and tokens/s a GPU."""
    ordered = sorted(choices, key=lambda one: (one.tpot_s, -one.tokens_per_s_per_gpu))
    return tuple(pareto_front(ordered, lambda one: -one.tokens_per_s_per_gpu))


# --- finalists under the load --------------------------------------------------------------------


def _finalists(ranked: Sequence[Choice], wanted: Wanted, most: Mapping[str, int]) -> Iterator[Choice]:
    """The simulated choices of each kind; of pools of two chips only what may cost less than others take."""
    kinds = grouped(_near(ranked, most), lambda one: one.kind)
    least = math.inf
    for first, last in sorted(kinds, key=lambda kind: kind[0] not in (None, kind[1])):
        members = kinds[first, last]
        if first in (None, last) or members[0].rank[0] < least:
            for choice in _simulated(members[:FINALISTS], wanted, most):
                least = min(least, choice.rank[0]) if choice.holds else least
                yield choice


def _near(ranked: Sequence[Choice], most: Mapping[str, int]) -> Iterator[Choice]:
    """Those that the clusters hold, or do with a worker less: the closed form may ask for too many."""
    for choice in ranked:
        fleets = (choice.fleet,) if _is_within(choice.fleet, most) else _smaller(choice.fleet)
        yield from (replace(choice, fleet=fleet) for fleet in fleets if _is_within(fleet, most))


def _simulated(
    ranked: Sequence[Choice], wanted: Wanted, most: Mapping[str, int], known: Iterable[Fleet] = ()
) -> Iterator[Choice]:
    """Finalists under the load, while none that holds is cheaper; a worker more where one does not hold.

    Where one holds, a worker less; between numbers that were tried, half of what lies there. What is `known`
    is not simulated again.
    """
    order, held, tried = count(), math.inf, set(known)
    heap, most_tried = [(one.rank[0], next(order), one) for one in ranked], len(tried) + MAX_SIMULATIONS
    while heap and wanted.requests is not None and len(tried) < most_tried:
        cost, _, choice = heapq.heappop(heap)
        if cost > held:
            return
        if not _is_within(choice.fleet, most) or choice.fleet in tried:
            continue
        tried.add(choice.fleet)
        found = _under(choice, wanted, at_most(wanted.requests, SEARCH_REQUESTS))
        if found.load is None:
            continue
        yield found
        held = min(held, cost) if found.holds else held
        more = [] if found.holds else [_larger(choice.fleet, found.load, tried, most)]
        for fleet in more or _smaller(choice.fleet, tried):
            other = replace(choice, fleet=fleet)
            heapq.heappush(heap, (other.rank[0], next(order), other))


def _under(choice: Choice, wanted: Wanted, requests: Requests | RequestStream) -> Choice:
    """`choice` with what requests get of an engine as it starts, or, if more hold, of one of `sequences`."""
    found = _on(choice, wanted, requests, wanted.engine)
    if found.load is None or found.holds or found.load.queue_grows:
        return found
    most = min(wanted.engine.on(choice.fleet.serving.cluster.chip).max_sequences, choice.sequences)
    fewer = _on(choice, wanted, requests, wanted.engine.having(max_sequences=most))
    return max(found, fewer, key=lambda one: one.within_frac)


def _on(choice: Choice, wanted: Wanted, requests: Requests | RequestStream, engine: Engine) -> Choice:
    """`choice` under the load with this engine."""
    fleet = replace(choice.fleet, router=wanted.router, offload=wanted.offload)
    return replace(choice, load=under_load(fleet, requests, engine, wanted.limits))


def _headroom_frac(choice: Choice, wanted: Wanted) -> float:
    """How much more traffic `choice` holds."""
    assert wanted.requests is not None and choice.load is not None
    load, engine = at_most(wanted.requests, HEADROOM_REQUESTS), choice.load.engine
    held = takewhile(lambda by: _on(choice, wanted, faster(load, by), engine).holds, MORE_TRAFFIC)
    return max(held, default=1.0) - 1.0


def _is_within(fleet: Fleet, most: Mapping[str, int]) -> bool:
    """Whether the clusters have so many chips."""
    used = grouped(fleet.clusters, lambda pool: pool[0].chip.name).items()
    return all(sum(cluster.num_chips * num for cluster, num in pools) <= most[chip] for chip, pools in used)


def _smaller(fleet: Fleet, tried: Iterable[Fleet] = ()) -> Iterator[Fleet]:
    """Fewer workers, of either pool that has several."""
    pools = ("workers", "prefill_workers")
    yield from (_with_other(fleet, name, -1, tried) for name in pools if getattr(fleet, name) > 1)


def _larger(fleet: Fleet, load: LoadResult, tried: Iterable[Fleet], most: Mapping[str, int]) -> Fleet:
    """An eighth more workers, where the clusters hold these, of the pool that more requests waited for."""
    served, limits = load.served, load.limits
    is_late, waits_s = served.ttft_s > limits.ttft_s, served.start_s - served.sent_s
    by_prompts = is_late & (waits_s >= served.placed_s)
    by_tokens = (served.token_s > limits.tpot_s) | (is_late & ~by_prompts)
    name = "prefill_workers" if fleet.prefill and by_prompts.mean() >= by_tokens.mean() else "workers"
    first, second = (_with_other(fleet, name, step, tried) for step in (getattr(fleet, name) // 8 or 1, 1))
    return first if _is_within(first, most) else second


def _with_other(fleet: Fleet, name: str, step: int, tried: Iterable[Fleet]) -> Fleet:
    """`step` workers more of a pool, or half of those up to the nearest number that was `tried` there."""
    num = getattr(fleet, name)
    away = (getattr(one, name) - num for one in tried if replace(one, **{name: num}) == fleet)
    far = min((abs(one) for one in away if one * step > 0), default=2 * abs(step)) // 2
    return replace(fleet, **{name: num + (far if step > 0 else -far)})

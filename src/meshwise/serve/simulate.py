"""A fleet under load: clients send requests to a router, it to replicas; each has a clock of its own.

Replicas meet only where a request is sent, ends, or is handed over. So these are the events, in a heap by
their time, and in between each replica goes on alone: one is brought up to an event only if it may have
something to say before it (`Instance.next_s`), and then takes equal passes in one go.

With separate pools, prefill workers hand each prompt's cache over to a decode worker, from which the client
gets the first token and all others.

An autoscaler may start and stop replicas, each of which is to take `requests_per_s`. Every `every_s` it
counts what arrived since the last time and what still waits, and asks for enough replicas to serve that in
one interval. A new replica takes requests `start_s` later (its node, image, weights and graphs). Fewer are
kept only when no interval of the last `hold_s` asked for more (Kubernetes' stabilization window, 300 s); one
that stops takes no more requests and ends with the last that it has. Replicas are paid for from when they are
asked for.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.each import HEARS
from meshwise.core.errors import WorkloadError
from meshwise.core.refusals import refuse
from meshwise.serve.instance import NO_RANK, EngineSequence, Instance, ServingWorker
from meshwise.serve.pass_times import PassTimes
from meshwise.serve.requests import Requests
from meshwise.serve.router import ROUND_ROBIN, Router, RouterPolicy


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """From `least` to `most` replicas, each for `requests_per_s`."""

    requests_per_s: float
    least: int = 1
    most: int = 64
    every_s: float = 30.0
    start_s: float = 180.0
    hold_s: float = 300.0

    def to_json(self, lives_s: Sequence[tuple[float, float]], span_s: float) -> dict[str, Any]:
        """The rule, and how many replicas there were."""
        times = sorted({start for start, _ in lives_s})
        return {
            **asdict(self),
            "mean_replicas": sum(stop - start for start, stop in lives_s) / span_s,
            "most_replicas": max(sum(start <= at < stop for start, stop in lives_s) for at in times),
            "num_started": len(lives_s),
        }


Seconds = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """When each request was sent, got its first token and its last [s]; and what the engines did.

    `start_s`: when its engine first took it up; `replica`: which one that was. `placed_s`: how long it waited
    for a place to decode, where prompts have their own pool. `found`: tokens of its prompt
    that were in a cache, `loaded` those of them that were below the chip (`loaded_from`: by tier).
    `lives_s`: from when to when each replica was paid for; `busy_s`: seconds in passes, the mean of all
    replicas over the whole span. `num_tokens` counts every token that a pass gave; `peak_cache_tokens` is
    the fullest that the cache of a worker was, `was_full` whether a request waited for room in one.
    """

    sent_s: Seconds
    start_s: Seconds
    placed_s: Seconds
    first_s: Seconds
    last_s: Seconds
    output: Counts
    found: Counts
    loaded: Counts
    loaded_from: dict[str, int]
    replica: Counts
    lives_s: tuple[tuple[float, float], ...]
    busy_s: float
    num_tokens: int
    num_preemptions: int
    peak_cache_tokens: int
    peak_sequences: int
    was_full: bool

    @property
    def num_found(self) -> int:
        """Prompt tokens that were found in a cache."""
        return int(self.found.sum())

    @property
    def ttft_s(self) -> Seconds:
        """Time to the first token, from when the client sent the request."""
        return self.first_s - self.sent_s

    @property
    def token_s(self) -> Seconds:
        """Time per output token after the first; 0 for a request of one token."""
        return (self.last_s - self.first_s) / np.maximum(self.output - 1, 1)

    @property
    def tpot_s(self) -> Seconds:
        """The same, of the requests that have more than one."""
        return self.token_s[self.output > 1]

    @property
    def span_s(self) -> float:
        """From the first request to the last token."""
        return float(self.last_s.max() - self.sent_s.min())


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """`num` workers behind a `router`; where prompts have their own pool, `num_prefill` workers `prefill`.

    Handing a prompt's cache over takes `transfer_s` and `transfer_token_s` for each of its tokens.
    `scaling`: `num` workers at the start, more or fewer as it says.
    """

    worker: ServingWorker
    num: int = 1
    prefill: ServingWorker | None = None
    num_prefill: int = 1
    transfer_s: float = 0.0
    transfer_token_s: float = 0.0
    router: RouterPolicy = ROUND_ROBIN
    scaling: Autoscaling | None = None

    def with_times(self, changed: Callable[[PassTimes], PassTimes]) -> Pools:
        """The same workers, whose passes are `changed`."""
        first, worker = self.prefill, replace(self.worker, times=changed(self.worker.times))
        return replace(self, worker=worker, prefill=first and replace(first, times=changed(first.times)))


class _Pool:
    """Replicas of one kind behind a router: `ready` ones take requests, `all` were ever started."""

    def __init__(self, router: Router, make: Callable[[], Instance], num: int) -> None:
        self.router, self.make = router, make
        self.all: list[Instance] = []
        self.ready = [self.start(0.0) for _ in range(num)]

    def start(self, second: float) -> Instance:
        replica = self.make()
        replica.number, replica.start_s = len(self.all), second
        self.all.append(replica)
        return replica


class _Run:
    """The clients, the pools that they send to, and what is to happen."""

    def __init__(self, requests: Requests, pools: Pools) -> None:
        self.requests, self.pools = requests, pools
        self.sequences: list[EngineSequence | None] = [None] * len(requests.prompt)
        self.home: list[Instance | None] = [None] * len(requests.prompt)
        self.order = count()
        self.bounds: list[tuple[float, int, Instance]] = []  # a heap; older ones of a replica are stale
        first = pools.prefill or pools.worker
        self.front = first.times.engine
        make = partial(Instance, pools.worker, requests, self._ended)
        self.last = self.first = _Pool(Router(pools.router), make, pools.num)
        if pools.prefill is not None:
            make = partial(Instance, first, requests, self._computed, only_prompts=True)
            self.first = _Pool(Router(pools.router), make, pools.num_prefill)
        self.followers, self.sessions = requests.followers, requests.sessions
        self.heads = [i for i in range(len(requests.prompt)) if not requests.after or requests.after[i] < 0]
        self.num_sent, self.num_ended = 0, 0
        begin = [0.0] * requests.concurrency or [requests.arrival_s[i] for i in self.heads]
        self.events: list[tuple[float, int, Callable[[float, Any], None], Any]] = [
            (second, next(self.order), self._send, i) for second, i in zip(begin, self.heads, strict=False)
        ]
        heapq.heapify(self.events)
        self.next_head = len(self.events)
        self.num_before, self.asked = 0, list[tuple[float, int]]()  # at the last look; replicas by the second
        if pools.scaling:
            self._at(pools.scaling.every_s, self._scale, None)

    def _at(self, second: float, do: Callable[[float, Any], None], what: Any) -> None:
        heapq.heappush(self.events, (second, next(self.order), do, what))

    # --- events ----------------------------------------------------------------------------------

    def _send(self, second: float, index: int) -> None:
        """A client sends a request; a router passes it on."""
        prompt = self.requests.prompt[index]
        arrival = second + self.front.front_s + self.front.front_token_s * prompt
        sequence = EngineSequence(index, second, arrival, prompt, self.requests.output[index])
        self.sequences[index] = sequence
        self.num_sent += 1
        self._arrive(second, (self.first, sequence))

    def _arrive(self, _: float, at: tuple[_Pool, EngineSequence]) -> None:
        """A request comes to a pool: from its client, or its prompt computed elsewhere."""
        pool, sequence = at
        index, sequence.rank = sequence.index, NO_RANK
        replica = pool.router.choose(pool.ready, sequence, self.sessions[index] if self.sessions else index)
        self.home[index] = replica
        replica.sent += 1
        replica.sent_tokens += sequence.total
        replica.put(sequence)
        self._bound(replica)

    def _computed(self, sequence: EngineSequence, second: float) -> None:
        """A prefill worker has computed a prompt; its cache is sent on."""
        self._at(second, self._left, (self.home[sequence.index], sequence.total))
        arrival = second + self.pools.transfer_s + self.pools.transfer_token_s * sequence.total
        sequence.arrival = arrival
        self._at(arrival, self._arrive, (self.last, sequence))

    def _ended(self, sequence: EngineSequence, second: float) -> None:
        """A client has its last token: it sends the next request of its session, or of another one."""
        index, requests = sequence.index, self.requests
        self.num_ended += 1
        self._at(second, self._left, (self.home[index], requests.prompt[index]))
        for follower in self.followers.get(index, ()):
            self._at(second + requests.think_s[follower], self._send, follower)
        if requests.concurrency and index not in self.followers and self.next_head < len(self.heads):
            self._at(second, self._send, self.heads[self.next_head])
            self.next_head += 1

    def _left(self, second: float, of: tuple[Instance, int]) -> None:
        replica, tokens = of
        replica.sent -= 1
        replica.sent_tokens -= tokens
        self._stop_if_idle(replica, second)

    # --- scaling ---------------------------------------------------------------------------------

    def _scale(self, second: float, _: None) -> None:
        """Start or stop replicas as the load of the last interval asks for."""
        pool, scaling = self.last, self.pools.scaling
        assert scaling
        waiting = sum(len(one.queue) for one in pool.ready)
        alive = [one for one in pool.all if one.stop_s is None and (one in pool.ready or one.sent == 0)]
        num = self._wanted(scaling, second, waiting)
        for new in [pool.start(second) for _ in range(num - len(alive))]:
            self._at(second + scaling.start_s, self._is_ready, new)
        least_busy = sorted(pool.ready, key=lambda one: (one.sent, -one.number))
        for replica in least_busy[: max(len(alive) - num, 0)]:
            if len(pool.ready) > scaling.least:
                pool.ready.remove(replica)
                self._stop_if_idle(replica, second)
        if self.num_ended < len(self.sequences):
            self._at(second + scaling.every_s, self._scale, None)

    def _wanted(self, scaling: Autoscaling, second: float, num_waiting: int) -> int:
        """Replicas for the requests that were sent since the last look, and those that wait."""
        rate = (self.num_sent - self.num_before + num_waiting) / scaling.every_s
        self.num_before = self.num_sent
        self.asked = [one for one in self.asked if one[0] > second - scaling.hold_s]
        self.asked.append((second, math.ceil(rate / scaling.requests_per_s)))
        return min(max(max(num for _, num in self.asked), scaling.least), scaling.most)

    def _is_ready(self, second: float, replica: Instance) -> None:
        replica.now = replica.seen = second
        self.last.ready.append(replica)

    def _stop_if_idle(self, replica: Instance, second: float) -> None:
        if not replica.sent and self.pools.scaling and replica not in self.last.ready:
            replica.stop_s = second

    # --- time ------------------------------------------------------------------------------------

    def _bound(self, replica: Instance) -> None:
        """Note when a replica may next have something to say."""
        bound_s = replica.next_s
        if bound_s != replica.bound_s:
            replica.bound_s = bound_s
            if bound_s < math.inf:
                heapq.heappush(self.bounds, (bound_s, next(self.order), replica))

    def run(self) -> None:
        """Serve all requests."""
        events, bounds, hear = self.events, self.bounds, HEARS.get()
        while events or bounds:
            hear("")
            until_s = events[0][0] if events else math.inf
            if not bounds or bounds[0][0] >= until_s:
                second, _, do, what = heapq.heappop(events)
                do(second, what)
                continue
            bound_s, _, replica = heapq.heappop(bounds)
            if bound_s != replica.bound_s:
                continue
            others_s = bounds[0][0] if bounds else math.inf
            replica.bound_s = math.inf
            replica.go_on(min(until_s, others_s))
            self._bound(replica)


def simulate(requests: Requests, pools: Pools) -> Served:
    """Serve `requests`; none may be longer than the cache."""
    run = _Run(requests, pools)
    run.run()
    replicas = run.last.all if run.first is run.last else [*run.first.all, *run.last.all]

    def column(name: str) -> Any:
        return np.array([getattr(sequence, name) for sequence in run.sequences])

    def total(name: str) -> Any:
        return sum(getattr(one, name) for one in replicas)

    times = {name: column(name) for name in ("start_s", "placed_s", "first_s", "last_s", "found", "loaded")}
    ends_s = float(times["last_s"].max())
    lives_s = tuple((one.start_s, ends_s if one.stop_s is None else one.stop_s) for one in replicas)
    sent_s = column("sent")
    span_s = ends_s - float(sent_s.min())
    alive_s = sum(stop - start for start, stop in lives_s) if pools.scaling else span_s * len(replicas)
    return Served(
        sent_s=sent_s,
        **times,
        output=np.array(requests.output),
        loaded_from={
            tier.name: sum(one.loaded_from[i] for one in replicas)
            for i, tier in enumerate(pools.worker.tiers)
        },
        replica=np.array([one.number for one in run.home if one is not None]),
        lives_s=lives_s,
        busy_s=total("busy_s") * span_s / alive_s,
        num_tokens=total("num_tokens"),
        num_preemptions=total("num_preemptions"),
        peak_cache_tokens=max(one.peak_cache for one in run.last.all),
        peak_sequences=sum(one.peak_sequences for one in run.last.all),
        was_full=any(one.was_full for one in replicas),
    )


# --- limits of latency ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """At most `ttft_s` to the first token, `tpot_s` for each after it, for `percentile` % of the requests."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    percentile: float = 90.0

    def __post_init__(self) -> None:
        refuse("limits", WorkloadError, of=self, tpot_ms=1e3 * self.tpot_s, ttft_ms=1e3 * self.ttft_s)

    @property
    def any(self) -> bool:
        """Whether anything is limited."""
        return min(self.ttft_s, self.tpot_s) < math.inf

    @property
    def token_s(self) -> float | None:
        """The limit of a token; None without one."""
        return self.tpot_s if self.tpot_s < math.inf else None

    def kept(self, served: Served) -> NDArray[np.bool_]:
        """Whether each request keeps all limits."""
        return (served.ttft_s <= self.ttft_s) & (served.token_s <= self.tpot_s)

    def hold(self, served: Served) -> bool:
        """Whether enough requests keep all limits."""
        return float(self.kept(served).mean()) >= self.percentile / 100.0

    def taken_frac(self, served: Served) -> float:
        """How much of the nearest limit is taken by as many requests as must keep it."""
        taken = (
            np.percentile(seconds, self.percentile) / limit_s
            for seconds, limit_s in ((served.ttft_s, self.ttft_s), (served.token_s, self.tpot_s))
        )
        return float(max(taken))


NO_LIMITS = LatencyLimits()


def limits_of(ttft_s: float | None, tpot_s: float | None, percentile: float = 90.0) -> LatencyLimits:
    """Limits as a user states them, None where there is none; WorkloadError for a limit of nothing."""
    first_s, token_s = (math.inf if limit_s is None else limit_s for limit_s in (ttft_s, tpot_s))
    return LatencyLimits(first_s, token_s, percentile)

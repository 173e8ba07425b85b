"""A server that has settled: how many requests to simulate, which of them count, how sure a mean is.

A server begins empty, so its first requests are served too well, and so are its last, when no more are sent.
Twice as many requests are simulated each time, until of those in between the mean time to the first token
and per token after it are known within `PRECISION`:
- the *warm-up* is left out by MSER-5: so many batches of requests that the standard error of the mean of the
  others is least (White, Cobb, Spratt, WSC 2000), the later of what both series say; at most half;
- the end: requests that are sent less than the mean duration of one before the last;
- the interval of a mean holds it 19 times of 20, judging by how long a request is like those before it.

A queue grows without end where more and more requests are under way, 9,999 times of 10,000 not by chance, in
two simulations of which the second has twice as many requests. Then times depend on how long one measures,
and the rate at which requests end is the most that the server can hold. Nothing has settled while the number
rises by more than its standard error. The rate at which requests come is known, not how many came by chance:
what these add to the number is taken out as far as it follows them (control variates: Lavenberg, Welch
1981). Of a server that never waits that is nothing; of one that always has work it is all of them, and the
rate of those that end, which is far steadier, is compared to the rate that was asked for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.serve.requests import Requests
from meshwise.serve.simulate import Seconds, Served

PRECISION = 0.05
"""Half of the interval of a settled mean, over the mean."""

FIRST_REQUESTS, MOST_REQUESTS = 2_000, 64_000
"""Requests of the first simulation (ten of each client, if that is more), and about those of the last."""

LEAST_LENGTHS, SOKAL = 50, 5.0
"""For how many tau a series must go on until tau is known; of which tau is the sum."""

NUM_SPANS, STUDENT_9999 = 20, 4.590
"""Spans of time in which the number under way is compared; Student's t of one less, one sided at 99.99 %."""

NORMAL_95 = 1.96

RULE = (
    f"requests are simulated until both means are known within {PRECISION:.0%}, 19 times of 20; "
    "warm-up (MSER-5) and end are left out"
)


@dataclass(frozen=True, slots=True, eq=False)
class RequestStream:
    """Requests that go on: `draw` makes so many of them. `rate` a second, or clients in a closed loop.

    `most`: about how many are simulated at most.
    """

    draw: Callable[[int], Requests]
    rate: float | None = None
    concurrency: int = 0
    most: int = MOST_REQUESTS


def at_most(requests: Requests | RequestStream, num: int) -> Requests | RequestStream:
    """`requests`, of a stream no more than about `num`."""
    return requests if isinstance(requests, Requests) else replace(requests, most=num)


def faster(requests: Requests | RequestStream, factor: float) -> Requests | RequestStream:
    """The same requests, `factor` times as many a second."""

    def sooner(drawn: Requests) -> Requests:
        return replace(drawn, arrival_s=tuple(second / factor for second in drawn.arrival_s))

    if isinstance(requests, Requests):
        return sooner(requests)
    draw, rate = requests.draw, factor * (requests.rate or 0.0)
    return replace(requests, draw=lambda num: sooner(draw(num)), rate=rate)


@dataclass(frozen=True, slots=True, eq=False)
class CountedWindow:
    """The requests that count: `served`, those of `num_simulated` that were sent from `start_s` to `stop_s`.

    `requests_per_s` and `output_tokens_per_s`: what ends in between. `half_frac`: half of the interval of a
    mean, by quantity, over the mean. `rise`: how many more requests are under way from one twentieth of the
    time to the next, over the standard error of that. `queue_grows`: without end.
    """

    served: Served
    num_simulated: int
    num_warm_up: int
    requests_per_s: float
    output_tokens_per_s: float
    half_frac: dict[str, float]
    rise: float
    queue_grows: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether its figures do not depend on how long one measures."""
        return self.rise < 1.0 and max(self.half_frac.values(), default=0.0) <= PRECISION

    def to_json(self) -> dict[str, Any]:
        """How the figures under load were counted."""
        names = ("num_simulated", "num_warm_up", "is_settled", "queue_grows")
        counted = {"num_counted": len(self.served.output), "half_width_95_frac": self.half_frac}
        return {"rule": RULE} | {name: getattr(self, name) for name in names} | counted


def settled(
    stream: RequestStream, serve: Callable[[Requests], Served]
) -> tuple[CountedWindow, Served, Requests]:
    """What `stream` gets of a server that has settled, or never does; the last simulation, its requests."""
    num, grew = max(FIRST_REQUESTS, 10 * stream.concurrency), False
    while True:
        requests = _staggered(stream.draw(num))
        served = serve(requests)
        least_s, most_s = _full_sessions(requests, served)
        is_last = 2 * num > max(stream.most, 20 * stream.concurrency)
        if most_s < 4.0 * least_s and not is_last:
            num *= 2
            continue
        found = window(served, least_s, most_s, stream.rate)
        is_long = num >= 10 * served.peak_sequences  # so that most are served while no more find room
        grows = found.rise > STUDENT_9999 and not stream.concurrency
        if grows and ((grew and is_long) or is_last):
            return _growing(found, served), served, requests
        if found.is_settled or is_last:
            return _of_all_that_come(found, stream), served, requests
        num, grew = 2 * num, grows


def _of_all_that_come(found: CountedWindow, stream: RequestStream) -> CountedWindow:
    """`found` with the rate that was asked for: a settled server serves all that come.

    What a window of some hundred random arrivals counts is a few percent off.
    """
    if not (found.is_settled and stream.rate and found.requests_per_s):
        return found
    tokens_per_s = found.output_tokens_per_s * stream.rate / found.requests_per_s
    return replace(found, requests_per_s=stream.rate, output_tokens_per_s=tokens_per_s)


def _growing(found: CountedWindow, served: Served) -> CountedWindow:
    """`found` with what a server gives where requests always wait: of the middle half of those that end."""
    order = np.argsort(served.last_s)
    middle = order[len(order) // 4 : 3 * len(order) // 4]
    over_s = float(served.last_s[middle[-1]] - served.last_s[middle[0]])
    return replace(
        found, requests_per_s=len(middle) / over_s, half_frac={}, queue_grows=True,
        output_tokens_per_s=float(served.output[middle].sum()) / over_s,
    )  # fmt: skip


def _staggered(requests: Requests) -> Requests:
    """Clients in a closed loop begin in the midst of a request each, evenly, as one would find them."""
    num = 0 if requests.after else requests.concurrency
    left = [math.ceil(requests.output[i] * (i + 1) / num) for i in range(num)]
    return replace(requests, output=(*left, *requests.output[num:]))


def _full_sessions(requests: Requests, served: Served) -> tuple[float, float]:
    """Between which times as many sessions begin as end: after two mean ones, before the last begins."""
    if not requests.after:
        return 0.0, math.inf
    ends = np.append(np.array(requests.after)[1:], -1) < 0
    sent_s = served.sent_s[np.array(requests.after) < 0]
    return float(sent_s.min() + 2.0 * (served.last_s[ends] - sent_s).mean()), float(sent_s.max())


def window(
    served: Served, least_s: float = 0.0, most_s: float = math.inf, rate: float | None = None
) -> CountedWindow:
    """The requests of a simulation that count, between its warm-up and its end; sent in these times.

    `rate`: requests a second that were asked for; None of clients in a closed loop.
    """
    order = np.argsort(served.sent_s, kind="stable")
    sent_s, last_s = served.sent_s[order], served.last_s[order]
    stop_s = min(sent_s[-1] - (last_s - sent_s).mean(), most_s)
    in_time = max(int(np.searchsorted(sent_s, stop_s)), len(order) // 2)
    series = [served.ttft_s[order][:in_time], served.token_s[order][:in_time]]
    warm_up = max(int(np.searchsorted(sent_s[:in_time], least_s)), *(_warm_up(one) for one in series))
    warm_up = min(warm_up, in_time // 2)
    counted = order[warm_up:in_time]
    start_s, stop_s = float(sent_s[warm_up]), float(sent_s[in_time - 1])
    ends = (last_s > start_s) & (last_s <= stop_s)
    over_s = max(stop_s - start_s, 1e-9)
    names = ("ttft_s", "tpot_s")
    return CountedWindow(
        served=restricted(served, counted), num_simulated=len(order), num_warm_up=warm_up,
        requests_per_s=float(ends.sum()) / over_s,
        output_tokens_per_s=float(served.output[order][ends].sum()) / over_s,
        half_frac={name: _half_frac(one[warm_up:]) for name, one in zip(names, series, strict=True)},
        rise=_rise(sent_s, last_s, np.linspace(start_s, stop_s, NUM_SPANS + 1), rate),
    )  # fmt: skip


def restricted(served: Served, which: NDArray[np.int64]) -> Served:
    """`served` with the times of some requests; what engines did is that of all."""
    columns = {field.name: getattr(served, field.name) for field in fields(served)}
    some: dict[str, Any] = {name: of[which] for name, of in columns.items() if isinstance(of, np.ndarray)}
    return replace(served, **some)


def _warm_up(series: Seconds) -> int:
    """How many of the first are left out, at most half: MSER-5."""
    size = max(5, len(series) // 1000)
    num = len(series) // size
    if num < 4:
        return 0
    means = series[: num * size].reshape(num, size).mean(axis=1)[::-1]
    count = np.arange(1, num + 1)
    variance = np.cumsum(means**2) / count - (np.cumsum(means) / count) ** 2
    error = (np.maximum(variance, 0.0) / count)[::-1]  # by batches left out
    return int(error[: num // 2 + 1].argmin()) * size


def _half_frac(series: Seconds) -> float:
    """Half of the interval of the mean of `series`, over the mean.

    Requests that follow each other are alike where a queue is long: n of them tell as much as n / tau
    independent ones. tau sums the correlations up to `SOKAL` times itself (Sokal 1997). It is an estimate,
    too: with fewer than 50 tau (the least that emcee trusts) the interval widens by the square of 50 tau / n.
    """
    num, off = len(series), series - series.mean()
    if not num or (off**2).mean() <= 1e-18 * series.mean() ** 2:
        return 0.0
    size = 1 << (2 * num - 1).bit_length()
    transformed = np.fft.rfft(off, size)
    correlation = np.fft.irfft(np.abs(transformed) ** 2, size)[:num]
    sums = 2.0 * np.cumsum(correlation / correlation[0]) - 1.0
    outside = np.flatnonzero(np.arange(num) >= SOKAL * sums)
    tau = max(float(sums[outside[0] if outside.size else -1]), 1.0)
    wider = max(LEAST_LENGTHS * tau / num, 1.0) ** 2
    return NORMAL_95 * float(series.std() / series.mean()) * min(wider * (tau / num) ** 0.5, 1.0)


def _rise(sent_s: Seconds, last_s: Seconds, edges: Seconds, rate: float | None) -> float:
    """How much the number of requests under way rises between `edges`, over the standard error of that."""
    came, ended = (np.diff(np.searchsorted(of_s, edges)) for of_s in (sent_s, np.sort(last_s)))
    gained = came - ended
    if rate is not None and (by_chance := came - rate * np.diff(edges)).any():
        gained = gained - np.cov(gained, came)[0, 1] / came.var(ddof=1) * by_chance
    error = float(gained.std(ddof=1)) / len(gained) ** 0.5
    return float(gained.mean()) / error if error else 0.0

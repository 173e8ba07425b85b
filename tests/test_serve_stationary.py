"""Figures of a server that has settled: closed forms, a queue that grows, clients of equal requests."""

from typing import Any

import numpy as np
import pytest

from meshwise.serve.engine import ENGINES
from meshwise.serve.instance import ServingWorker
from meshwise.serve.load import Fleet, LoadResult, traffic, under_load
from meshwise.serve.requests import Lengths, at_rate
from meshwise.serve.simulate import Pools, simulate
from meshwise.serve.stationary import MOST_REQUESTS, CountedWindow, RequestStream, settled
from servers import NO_LIMIT, ONE_AT_A_TIME, passes, server


def one_server(load: float, most: int = MOST_REQUESTS) -> CountedWindow:
    """A queue with one server that takes 1 s for each request, at `load` requests a second."""
    worker = ServingWorker(passes(token_s=1e-3, engine=ONE_AT_A_TIME), NO_LIMIT)
    stream = RequestStream(lambda num: at_rate(load, Lengths(1000, 1), num=num), load, most=most)
    return settled(stream, lambda requests: simulate(requests, Pools(worker)))[0]


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_settled_mean_is_that_of_the_queue(load: float) -> None:
    """M/D/1: the service and load / (2 (1 - load)) of it; the interval says how far off the mean may be."""
    found = one_server(load)
    mean = 1.0 + load / (2.0 * (1.0 - load))
    assert found.is_settled
    assert found.requests_per_s == pytest.approx(load, rel=0.03)
    assert found.served.ttft_s.mean() == pytest.approx(mean, rel=1.5 * found.half_frac["ttft_s"])
    assert found.half_frac["ttft_s"] <= 0.05


@pytest.mark.parametrize("load", [1.01, 1.05, 4.0])
def test_a_queue_that_grows_says_what_is_served(load: float) -> None:
    found = one_server(load)
    assert found.queue_grows and not found.is_settled
    assert found.requests_per_s == pytest.approx(1.0, rel=0.01)


def test_a_queue_near_its_limit_is_not_settled() -> None:
    found = one_server(0.995, most=16_000)
    assert not found.queue_grows and not found.is_settled
    assert found.num_simulated == 16_000


def served(**asked: Any) -> LoadResult:
    """llama3-8b on an H100."""
    return under_load(Fleet(server()), traffic(2048, 256, **asked), ENGINES["vllm"])


def test_the_rate_that_is_served_is_where_the_queue_ceases_to_grow() -> None:
    over = served(rate=15.0)
    assert over.queue_grows
    below, above = (served(rate=share * over.requests_per_s) for share in (0.93, 1.05))
    assert above.queue_grows and not below.queue_grows
    counted = len(below.simulated.output) / below.simulated.span_s
    assert below.requests_per_s == pytest.approx(counted, rel=0.05)


def test_clients_of_equal_requests_do_not_run_in_step() -> None:
    """Sent at once they come back at once, for ever: 0.98 s in the median, where others wait 0.15 s."""
    together, equal, unequal = (
        served(concurrency=64, **more) for more in ({"num_requests": 640}, {}, {"length_ratio": 0.9})
    )
    median = [float(np.median(one.served.ttft_s)) for one in (together, equal, unequal)]
    assert median[1] == pytest.approx(median[2], rel=0.15)
    assert median[0] > 5 * median[1]


def test_command_says_what_counts_and_whether_it_holds(meshwise: Any) -> None:
    base = ("serve", "llama3-8b", "--cluster", "h100-80g-sxm:1", "--sequences", "8", "--rate")
    document = meshwise(*base, "5", "--json").document
    window, first_s = document["window"], document["ttft_s"]
    assert 0 < first_s["p50"] <= first_s["p90"] <= first_s["p99"]
    assert window["is_settled"] and window["num_counted"] < window["num_simulated"]
    assert meshwise(*base, "5", "--num-requests", "100", "--json").document["window"] is None
    no = meshwise(*base, "20")
    assert no.code == 1
    assert "the queue grows without end: 11." in " ".join(no.out.split())

"""CPU time of a simulated fleet 100,000 requests to 16 replicas, by router, and with sessions."""

import time
from typing import Any

from benchmarks.timing import report
from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.plan.plan import parse_plan
from meshwise.serve import serving as est
from meshwise.serve.engine import ENGINES
from meshwise.serve.load import Fleet, pools_of
from meshwise.serve.requests import Lengths, Requests, Turns, at_rate, in_sessions
from meshwise.serve.router import parse_router
from meshwise.serve.simulate import simulate

NUM, REPLICAS = 100_000, 16


def line(name: str, requests: Requests, **fleet: Any) -> None:
    """The tables of pass times are part of it."""
    of = est.serving(
        find_model("llama3-8b"), find_cluster("h100-80g-sxm:1"), parse_plan("tp=1"), prompt=1024, output=128
    )
    start = time.process_time()
    pools = pools_of(Fleet(of, REPLICAS, **fleet), requests, ENGINES["vllm"])
    assert pools is not None
    served = simulate(requests, pools)
    spent = time.process_time() - start
    busy = f"{served.busy_s / served.span_s:.0%} busy, {served.num_found / sum(requests.prompt):.0%} found"
    report(f"{name}: {busy}", spent, 10.0)


def main() -> None:
    drawn = Lengths(1024, 128, 0.8)
    for each in (4.0, 12.0):
        requests = at_rate(REPLICAS * each, drawn, num=NUM)
        for router in ("round-robin", "least-loaded"):
            line(f"{router}, {REPLICAS * each:g} requests/s", requests, router=parse_router(router))
    first = at_rate(REPLICAS * 8.0 / 10, drawn, num=NUM // 10)
    sessions = in_sessions(first, Turns(turns=10, prompt=256, think_s=10.0), shared_prefix=512)
    for router in ("round-robin", "session", "prefix", "prefix=8"):
        line(f"sessions of 10 turns, {router}", sessions, router=parse_router(router))

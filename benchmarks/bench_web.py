"""The page under load: 50 clients at once, each with estimates of other plans, against one server."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

CLIENTS, REQUESTS = 50, 20
PLANS = [f"tp={tp},pp={pp},vpp={vpp}" for tp in (1, 2, 4, 8) for pp in (2, 4, 8, 16) for vpp in (1, 2, 3)]


@contextmanager
def running_server() -> Iterator[int]:
    """`meshwise web` in a process of its own; its port."""
    command = [sys.executable, "-m", "meshwise", "web", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            yield int(server.stderr.readline().rstrip("/\n").rpartition(":")[2])
        finally:
            server.terminate()


def main() -> None:
    """Print the latencies of all requests: the estimate, then its charts, then the values of its form."""
    with running_server() as port, ThreadPoolExecutor(CLIENTS) as clients:
        for view, wanted in (("explore", "; target: p95 below 300 ms"), ("ops", ""), ("options", "")):
            _client(port, view, 0)
            latencies = clients.map(partial(_client, port, view), range(CLIENTS))
            found = sorted(seconds for client in latencies for seconds in client)
            shares = {"p50": 0.5, "p95": 0.95, "max": 1}
            at = {name: found[int(share * (len(found) - 1))] for name, share in shares.items()}
            shown = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in at.items())
            print(f"page: {CLIENTS} clients x {REQUESTS} of {view}: {shown}{wanted}", flush=True)


def _client(port: int, view: str, number: int) -> list[float]:
    """The latencies [s] of one client, which asks again as soon as it has its answer."""
    connection, seconds = http.client.HTTPConnection("127.0.0.1", port), []
    for i in range(REQUESTS):
        plan = PLANS[(number * REQUESTS + i) % len(PLANS)]
        state = {
            "model": "gpt3-175b",
            "cluster": "a100-80g-sxm:512",
            "plan": plan,
            "batch": str(512 * (1 + number)),
        }
        started = time.perf_counter()
        connection.request("POST", f"/api/{view}", json.dumps(state), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        assert reply.status == 200, reply.status
        seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    main()

"""The page under load: 50 clients at once, each with estimates of other plans, against one server."""

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
    with running_server() as port:
        for view, wanted in (("explore", "; target: p95 below 300 ms"), ("ops", ""), ("options", "")):
            print(under_load(port, view, REQUESTS) + wanted, flush=True)


def under_load(port: int, view: str, num_requests: int) -> str:
    """The latencies of 50 clients at once, and how many of them were told to ask again later."""
    _client(port, view, 0, 0)
    with ThreadPoolExecutor(CLIENTS) as clients:
        latencies = clients.map(partial(_client, port, view, num_requests), range(CLIENTS))
        asked = [request for client in latencies for request in client]
    found = sorted(seconds for seconds, is_answered in asked if is_answered)
    shares = {"p50": 0.5, "p95": 0.95, "max": 1}
    at = {name: found[int(share * (len(found) - 1))] for name, share in shares.items()}
    shown = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in at.items())
    num_refused = len(asked) - len(found)
    refused = f", {num_refused} of {len(asked)} told that the line is full" if num_refused else ""
    return f"page: {CLIENTS} clients x {num_requests} of {view}: {shown}{refused}"


def _client(port: int, view: str, num_requests: int, number: int) -> list[tuple[float, bool]]:
    """The latencies [s] of a client, which asks again as soon as it has an answer, and whether it had one."""
    connection, asked = http.client.HTTPConnection("127.0.0.1", port), []
    for i in range(num_requests):
        plan = PLANS[(number * REQUESTS + i) % len(PLANS)]
        if view == "search":
            job = {"model": "llama3-8b", "cluster": "h100-80g-sxm:16", "seq": "4096", "plan": "zero=1"}
        else:
            job = {"model": "gpt3-175b", "cluster": "a100-80g-sxm:512", "plan": plan}
        state = json.dumps(job | {"batch": str(512 * (1 + number + CLIENTS * i * (view == "search")))})
        started = time.perf_counter()
        connection.request("POST", f"/api/{view}", state, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        found = json.loads(reply.read())
        assert reply.status == 200, reply.status
        asked.append((time.perf_counter() - started, "error" not in found))
    return asked


if __name__ == "__main__":
    main()

"""To which replica a router sends a request.

- `round-robin`: the next one; with `round-robin=N` a proxy spreads requests at random over N frontends, each
  of which counts on its own (srt-slurm's default for Dynamo: ten).
- `least-loaded`: the one with the fewest requests under way.
- `session`: all requests of a session to one, the first of it to the least loaded.
- `prefix`, or `prefix=WEIGHT`: where WEIGHT x the prompt tokens to compute, of this request and of those
  that wait there, and the prompts under way there are fewest together (the cost of NVIDIA Dynamo's KV router,
  whose weight is 1 too; caches are known as they are, as from engines' events). More weight finds more, less
  spreads the load more evenly. It chooses the dp rank too, whose cache holds most; other policies leave the
  ranks of a replica to take turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from random import Random

from meshwise.core.errors import WorkloadError
from meshwise.core.refusals import refuse
from meshwise.plan.fields import number, read_field, whole
from meshwise.serve.instance import EngineSequence, Instance

POLICIES = ("round-robin", "least-loaded", "session", "prefix")
_FIELDS = {"round-robin": whole("frontends", 1, 10**9), "prefix": number("weight", 0, 1e9)}
_NUMBERS = {"round-robin": "frontends", "prefix": "weight"}
"""What the number behind a policy is, and what it may be."""


@dataclass(frozen=True, slots=True)
class RouterPolicy:
    """A policy, the frontends that count for `round-robin`, and what `prefix` weighs tokens to compute by."""

    policy: str = "round-robin"
    frontends: int = 1
    weight: float = 1.0


ROUND_ROBIN = RouterPolicy()


def parse_router(text: str) -> RouterPolicy:
    """`least-loaded`, `prefix`, `prefix=4`, `round-robin=10`."""
    policy, equals, value = text.partition("=")
    known = _NUMBERS if equals else POLICIES
    refuse("router", WorkloadError, text=text, policy=policy, known=known, policies=", ".join(POLICIES))
    numbers = {_NUMBERS[policy]: read_field(policy, value, _FIELDS, WorkloadError)} if equals else {}
    return RouterPolicy(policy, **numbers)


class Router:
    """Chooses replicas as `routing` says."""

    def __init__(self, routing: RouterPolicy) -> None:
        self.routing, self.turn = routing, -1
        self.proxy = Random(0)
        self.counts: dict[int, int] = {}  # of each frontend, the requests that it has passed on
        self.of_session: dict[int, Instance] = {}

    def choose(self, replicas: Sequence[Instance], sequence: EngineSequence, session: int) -> Instance:
        """One of `replicas` for a request; equal ones take turns."""
        self.turn += 1
        num, turn = len(replicas), self.turn
        if self.routing.policy == "round-robin":
            return replicas[(turn if self.routing.frontends == 1 else self._counted()) % num]
        in_turn = [replicas[(turn + i) % num] for i in range(num)]
        if self.routing.policy == "prefix":
            return self._cheapest(in_turn, sequence)
        least_loaded = min(in_turn, key=attrgetter("sent"))
        if self.routing.policy != "session":
            return least_loaded
        if self.of_session.get(session) not in in_turn:
            self.of_session[session] = least_loaded
        return self.of_session[session]

    def _counted(self) -> int:
        """How many requests the frontend that the proxy chose has passed on; the first has a random count."""
        frontend = self.proxy.randrange(self.routing.frontends)
        count = self.counts.get(frontend, self.proxy.randrange(1000))
        self.counts[frontend] = count + 1
        return count

    def _cheapest(self, replicas: Sequence[Instance], sequence: EngineSequence) -> Instance:
        cheapest, least = replicas[0], float("inf")
        for one in replicas:
            if one.sent_tokens >= least:  # no cache makes it cheaper
                continue
            waits = one.pending_tokens if one.queue or one.prefilling else 0
            rank, found = one.best_rank(sequence)
            missing = sequence.total - found
            cost = self.routing.weight * (waits + missing) + one.sent_tokens
            if cost < least:
                cheapest, least, sequence.missing, sequence.rank = one, cost, missing, rank
        return cheapest

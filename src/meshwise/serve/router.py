"""To which replica a router sends a request.

- `round-robin`: the next one.
- `least-loaded`: the one with the fewest requests under way.
- `session`: all requests of a session to one, the first of it to the least loaded.
- `prefix`: where the tokens of the prompt that no cache holds and the prompts under way are fewest together
  (the cost of NVIDIA Dynamo's KV router, with equal weights; caches are known as they are, as from engines'
  events).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from meshwise.serve.instance import EngineSequence, Instance

Policy = Literal["round-robin", "least-loaded", "session", "prefix"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


class Replica:
    """An instance and what a router knows of it: `num` requests under way, `tokens` of their prompts.

    `start_s` and `stop_s`: when it was asked for, and when it was given back.
    """

    __slots__ = ("bound_s", "instance", "num", "number", "start_s", "stop_s", "tokens")

    def __init__(self, number: int, instance: Instance, start_s: float = 0.0) -> None:
        self.number, self.instance, self.start_s = number, instance, start_s
        self.stop_s: float | None = None
        self.bound_s = float("inf")  # before which nothing happens that others hear of
        self.num = self.tokens = 0


class Router:
    """Chooses replicas by `policy`."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.turn = policy, -1
        self.of_session: dict[int, Replica] = {}

    def choose(self, replicas: Sequence[Replica], sequence: EngineSequence, session: int) -> Replica:
        """One of `replicas` for a request; equal ones take turns."""
        self.turn += 1
        num, turn = len(replicas), self.turn
        if self.policy == "round-robin" or num == 1:
            return replicas[turn % num]
        in_turn = [replicas[(turn + i) % num] for i in range(num)]
        if self.policy == "prefix":
            return min(in_turn, key=lambda one: one.tokens - one.instance.found_tokens(sequence))
        if self.policy == "session":
            known = self.of_session.get(session)
            if known in in_turn:
                return known
            self.of_session[session] = found = min(in_turn, key=_num)
            return found
        return min(in_turn, key=_num)


def _num(one: Replica) -> int:
    return one.num

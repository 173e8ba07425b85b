"""An engine under load, pass by pass: who waits, who is admitted, when each token comes.

Before every pass the engine admits requests in the order of their arrival, while there is room in the pass,
among the running sequences and in the cache. A pass that ends a prompt gives its first token. As long as
nothing can be admitted, passes differ only in the lengths of the caches, in which their time is linear: the
passes to the next completion, arrival or full cache are taken in one go.

The dp ranks of an instance, and the batches in its pipeline, run in step and share the requests evenly, so
they are simulated as one engine with the sum of their room. Several instances (*workers*) take requests in
turn, each with a clock of its own; the one that is behind goes on. With separate pools, prefill workers hand
each prompt's cache over to a decode worker, from which the client gets the first token and all others.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.serve.engine import Engine
from meshwise.serve.pass_times import PassTimes
from meshwise.serve.requests import Requests

Seconds = NDArray[np.float64]
Blocks = tuple[int, ...]
"""Names of the blocks that a prompt begins with."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """When each request was sent, got its first token and its last [s]; and what the engine did.

    `num_tokens` counts every token that a pass gave, `num_found` prompt tokens found in a cache;
    `peak_cache_tokens` is the fullest that the cache of a worker was, `was_full` whether a request waited for
    room in one.
    """

    sent_s: Seconds
    first_s: Seconds
    last_s: Seconds
    output: NDArray[np.int64]
    busy_s: float
    num_tokens: int
    num_found: int
    num_preemptions: int
    peak_cache_tokens: int
    peak_sequences: int
    was_full: bool

    @property
    def ttft_s(self) -> Seconds:
        """Time to the first token, from when the client sent the request."""
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> Seconds:
        """Time per output token after the first, of the requests that have more than one."""
        more = self.output > 1
        return (self.last_s - self.first_s)[more] / (self.output[more] - 1)

    @property
    def span_s(self) -> float:
        """From the first request to the last token."""
        return float(self.last_s.max() - self.sent_s.min())


class EngineSequence:
    """A request in an engine: `total` tokens to prefill, of which `past` are cached; `left` to generate."""

    __slots__ = ("arrival", "end", "first_s", "index", "last_s", "late_s", "left", "past", "sent", "total")

    def __init__(self, index: int, sent: float, arrival: float, prompt: int, output: int) -> None:
        self.index, self.sent, self.arrival = index, sent, arrival
        self.total, self.left, self.past = prompt, output, 0
        self.end = -1  # the pass that gives the last token; -1 while it does not run
        self.first_s = self.last_s = math.nan
        self.late_s = 0.0  # by which its tokens come to the client after their passes

    @property
    def has_ended(self) -> bool:
        """Whether a request that was admitted has got its last token, or has left for another worker."""
        return self.end < 0 and self.past == self.total


@cache
def until_all_have_one(ranks: int) -> float:
    """Mean number of requests until each of `ranks` has one, each going to any (coupon collector)."""
    return sum(ranks / (i + 1) for i in range(ranks))


@dataclass(frozen=True, slots=True, eq=False)
class ServingWorker:
    """What an instance is: its engine, the seconds of its passes, tokens for which its caches have room."""

    engine: Engine
    times: PassTimes
    cache_tokens: int


class Instance:
    """A worker with its queue, its running sequences and its clock.

    `held` are the tokens that the cache holds or must hold of admitted prompts, `context` those of running
    sequences, `left` what admitted requests have yet to generate. Sequences `leave` with their last token;
    where there are `only_prompts`, with their prompt computed.
    """

    def __init__(
        self,
        worker: ServingWorker,
        requests: Requests,
        leave: Callable[[EngineSequence, float], None],
        *,
        reply_s: float = 0.0,
        only_prompts: bool = False,
    ) -> None:
        self.engine, self.times, self.cache = worker.engine, worker.times, worker.cache_tokens
        self.blocks: Sequence[Blocks] | Mapping[int, Blocks] = requests.blocks  # by index of a sequence
        self.block_tokens = requests.block_tokens
        self.leave, self.only_prompts, self.reply_s = leave, only_prompts, reply_s
        self.now = self.seen = self.busy_s = 0.0
        self.step = self.num_tokens = self.num_preemptions = self.peak_cache = self.peak_sequences = 0
        self.was_full = False  # whether a request waited for room in the cache
        self.alone_since = 0  # the pass since when a prompt waits for more of them
        self.held = self.context = self.left = self.num_found = 0
        self.queue: deque[EngineSequence] = deque()
        self.prefilling: list[EngineSequence] = []
        self.running: list[tuple[int, int, EngineSequence]] = []  # a heap by the pass of the last token
        self.admitted: list[EngineSequence] = []  # in order; those that have ended are removed late
        self.kept = OrderedDict.fromkeys(requests.kept)  # blocks of prompts, the last used behind
        self.most_tokens = self.engine.max_tokens * self.times.groups
        self.most_sequences = self.engine.max_sequences * self.times.groups

    def put(self, sequence: EngineSequence) -> None:
        """Queue a request; those that come from another worker may come out of order."""
        place = len(self.queue)
        while sequence.past and place and self.queue[place - 1].arrival > sequence.arrival:
            place -= 1
        self.queue.insert(place, sequence)

    @property
    def ready_s(self) -> float:
        """When it can go on; infinite without work."""
        if self.running or self.prefilling:
            return self.now
        return max(self.now, self.queue[0].arrival) if self.queue else math.inf

    @property
    def next_end_s(self) -> float:
        """About when the next sequence can end, no later; infinite without work."""
        if self.prefilling or not self.running:
            return self.ready_s
        num = len(self.running)
        return self.now + (self.running[0][0] - self.step) * self.times.decode_s(num, self.context / num)

    def go_on(self, until_s: float) -> None:
        """A pass; or several alike, as long as none begins after `until_s`, when others may send work."""
        chunks = [] if self._preempt() else self._admit()
        if chunks:
            self._prompt_pass(chunks)
        elif self.running:
            self._decode_passes(until_s)
        elif self.queue:
            self.now = self.seen = max(self.now, self.queue[0].arrival)

    # --- who takes part --------------------------------------------------------------------------

    def _fits(self, sequence: EngineSequence) -> bool:
        """Whether a request may join those that are admitted."""
        if len(self.running) + len(self.prefilling) >= self.most_sequences:
            return False
        held = self.held + sequence.total + len(self.running)  # which grow by a token each in the next pass
        to_come = 0 if self.only_prompts else self.left + sequence.left
        if held + self.engine.reserve_frac * to_come <= self.cache or not (self.running or self.prefilling):
            return True
        self.was_full = True
        return False

    def _admit(self) -> list[tuple[EngineSequence, int, int]]:
        """The chunks of prompts in the next pass: those begun, then requests that wait."""
        chunks: list[tuple[EngineSequence, int, int]] = []
        engine, budget = self.engine, self.most_tokens
        if engine.mixes:
            budget -= len(self.running)
        for sequence in self.prefilling:
            taken = min(sequence.total - sequence.past, engine.max_tokens, budget)
            if taken > 0:
                chunks.append((sequence, sequence.past, sequence.past + taken))
                budget -= taken
        waits = self._waits_for_more()
        while not waits and self.queue and self.queue[0].arrival <= self.seen and self._fits(self.queue[0]):
            sequence = self.queue[0]
            is_cached = sequence.past == sequence.total
            if self.blocks and not is_cached:
                sequence.past = max(sequence.past, self._found(sequence))
            missing = sequence.total - sequence.past
            taken = min(missing, engine.max_tokens, budget) if engine.chunks else missing
            if not is_cached and (taken <= 0 or (taken > budget and chunks)):
                break
            self.queue.popleft()
            self.admitted.append(sequence)
            self.held += sequence.total
            self.left += sequence.left
            if is_cached:
                self._first_token(sequence)
                continue
            self.num_found += sequence.past
            self.prefilling.append(sequence)
            chunks.append((sequence, sequence.past, sequence.past + taken))
            budget -= taken
        self._complete()
        return chunks

    def _waits_for_more(self) -> bool:
        """Whether prompts wait until each group has one and they fill enough of a pass."""
        engine, groups = self.engine, self.times.groups
        if not engine.align_passes or not self.running:
            return False
        needed, enough = engine.fill_frac * self.most_tokens - len(self.running), until_all_have_one(groups)
        arrived = tokens = 0
        for sequence in self.queue:
            if sequence.arrival > self.seen or (arrived >= enough and tokens >= needed):
                break
            arrived += 1
            tokens += sequence.total
        if not arrived:
            self.alone_since = self.step
        is_enough = arrived >= enough and tokens >= needed
        return not is_enough and self.step - self.alone_since < engine.align_passes

    def _preempt(self) -> bool:
        """Where the next tokens have no room: those admitted last wait again; whether there are any."""
        found = False
        while self.held + len(self.running) > self.cache:
            sequence = self.admitted.pop()
            if sequence.has_ended:
                continue
            found = self.was_full = True
            self.num_preemptions += 1
            if sequence.end < 0:
                self.prefilling.remove(sequence)
                self.held -= sequence.total
            else:
                left = sequence.end - self.step
                self.running.remove((sequence.end, sequence.index, sequence))
                heapq.heapify(self.running)
                cached = sequence.total + sequence.left - 1 - left
                self.held -= cached
                self.context -= cached
                sequence.total, sequence.left = cached + 1, left
            self.left -= sequence.left
            sequence.past, sequence.end = 0, -1
            self.queue.appendleft(sequence)
        return found

    # --- prompts that begin alike ----------------------------------------------------------------

    def _found(self, sequence: EngineSequence) -> int:
        """Tokens of a prompt whose blocks are kept; the last token is computed in any case."""
        num = 0
        for block in self.blocks[sequence.index]:
            if block not in self.kept:
                break
            self.kept.move_to_end(block)
            num += self.block_tokens
        return min(num, sequence.total - 1)

    def _keep(self, sequence: EngineSequence) -> None:
        """Keep the blocks of a prompt in the room that running sequences leave, the last used ones."""
        for block in self.blocks[sequence.index]:
            self.kept[block] = None
            self.kept.move_to_end(block)
        room = max((self.cache - self.held) // self.block_tokens, 0)
        while len(self.kept) > room:
            self.kept.popitem(last=False)

    # --- passes ----------------------------------------------------------------------------------

    def _prompt_pass(self, chunks: list[tuple[EngineSequence, int, int]]) -> None:
        num = len(self.running) if self.engine.mixes else 0
        spans = [(start, end) for _, start, end in chunks]
        pass_s = self.times.mixed_s(spans, num, self.context / num if num else 0.0)
        self._advance(1 if num else 0, pass_s, pass_s)
        ended = False
        for sequence, _, end in chunks:
            sequence.past = end
            if end == sequence.total:
                ended = True
                if self.blocks:
                    self._keep(sequence)
                if self.only_prompts:
                    self.held -= sequence.total
                    self.left -= sequence.left
                    self.leave(sequence, self.now)
                else:
                    self._first_token(sequence)
        if ended:
            self.prefilling = [one for one in self.prefilling if one.past < one.total]
        self._complete()

    def _first_token(self, sequence: EngineSequence) -> None:
        """The pass that ends a prompt gives a token; the others follow pass by pass."""
        if math.isnan(sequence.first_s):
            sequence.late_s = self.reply_s * len(self.running)
            sequence.first_s = self.now + sequence.late_s
        sequence.end = self.step + sequence.left - 1
        self.left -= 1
        self.num_tokens += 1
        self.context += sequence.total
        heapq.heappush(self.running, (sequence.end, sequence.index, sequence))
        self.peak_sequences = max(self.peak_sequences, len(self.running))

    def _decode_passes(self, until_s: float) -> None:
        """Passes without prompts, up to the first after which something may change."""
        num, context = len(self.running), self.context
        passes = min(self.running[0][0] - self.step, max((self.cache - self.held) // num, 1))
        one_s = self.times.decode_s(num, context / num)
        if until_s < self.now + passes * one_s:
            passes = max(min(passes, math.ceil((until_s - self.now) / one_s)), 1)
        if self.queue and self._fits(self.queue[0]):
            until = math.ceil(max(self.queue[0].arrival - self.now, 0.0) / one_s)
            until += -(self.step + until) % self.engine.poll_passes + self.engine.lag_passes
            passes = min(passes, max(until, 1))
        pass_s = self.times.decode_s(num, context / num + 0.5 * (passes - 1)) if passes > 1 else one_s
        self._advance(passes, passes * pass_s, pass_s)
        self._complete()

    def _advance(self, passes: int, seconds: float, last_pass_s: float) -> None:
        """Time goes on; each running sequence gets a token in each of `passes`."""
        self.now += seconds
        self.busy_s += seconds
        self.step += passes
        since_poll = self.step % self.engine.poll_passes
        if since_poll < passes or not passes:
            self.seen = self.now - (self.engine.lag_passes + min(since_poll, passes)) * last_pass_s
        grown = passes * len(self.running)
        self.held += grown
        self.context += grown
        self.left -= grown
        self.num_tokens += grown
        self.peak_cache = max(self.peak_cache, self.held)

    def _complete(self) -> None:
        """Requests whose last token has come leave."""
        while self.running and self.running[0][0] <= self.step:
            _, _, sequence = heapq.heappop(self.running)
            cached = sequence.total + sequence.left - 1
            self.held -= cached
            self.context -= cached
            sequence.end, sequence.last_s = -1, self.now + sequence.late_s
            self.leave(sequence, sequence.last_s)
        if len(self.admitted) > 2 * len(self.running) + 64:
            self.admitted = [one for one in self.admitted if not one.has_ended]


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """`num` workers; where prompts have a pool of their own, `num_prefill` workers `prefill`.

    Handing a prompt's cache over takes `transfer_s` and `transfer_token_s` for each of its tokens.
    """

    worker: ServingWorker
    num: int = 1
    prefill: ServingWorker | None = None
    num_prefill: int = 1
    transfer_s: float = 0.0
    transfer_token_s: float = 0.0


class _Run:
    """The clients, and the instances that they send to. In a closed loop they send the next when one ends."""

    def __init__(self, requests: Requests, pools: Pools) -> None:
        self.requests, self.pools, self.all = requests, pools, list[EngineSequence]()
        first = pools.prefill or pools.worker
        self.front = first.engine
        reply_s = pools.num * self.front.reply_s
        self.last = [Instance(pools.worker, requests, self._ended, reply_s=reply_s) for _ in range(pools.num)]
        self.first = self.last if pools.prefill is None else [
            Instance(first, requests, self._hand_over, only_prompts=True) for _ in range(pools.num_prefill)
        ]  # fmt: skip
        self.instances = self.last if pools.prefill is None else [*self.first, *self.last]
        for index in range(requests.concurrency or len(requests.prompt)):
            self._send(requests.arrival_s[index] if requests.arrival_s else 0.0)

    def _send(self, second: float) -> None:
        """Send the next request, if there is one."""
        index, requests = len(self.all), self.requests
        if index < len(requests.prompt):
            prompt = requests.prompt[index]
            arrival = second + self.front.front_s + self.front.front_token_s * prompt
            sequence = EngineSequence(index, second, arrival, prompt, requests.output[index])
            self.all.append(sequence)
            self.first[index % len(self.first)].put(sequence)

    def _hand_over(self, sequence: EngineSequence, second: float) -> None:
        sequence.arrival = second + self.pools.transfer_s + self.pools.transfer_token_s * sequence.total
        self.last[sequence.index % len(self.last)].put(sequence)

    def _ended(self, _: EngineSequence, second: float) -> None:
        if self.requests.concurrency:
            self._send(second)

    def run(self) -> None:
        """Serve all requests: the instance that is behind goes on, up to where the next one stands."""
        instances = self.instances
        if len(instances) == 1:
            while instances[0].ready_s < math.inf:
                instances[0].go_on(math.inf)
            return
        while True:
            ready = [instance.ready_s for instance in instances]
            first = min(range(len(ready)), key=ready.__getitem__)
            if ready[first] == math.inf:
                return
            others_s = min(ready[:first] + ready[first + 1 :])
            instances[first].go_on(others_s)


def simulate(requests: Requests, pools: Pools) -> Served:
    """Serve `requests`; none may be longer than the cache."""
    run = _Run(requests, pools)
    run.run()

    def column(name: str) -> Seconds:
        return np.array([getattr(sequence, name) for sequence in run.all])

    def total(name: str) -> Any:
        return sum(getattr(instance, name) for instance in run.instances)

    return Served(
        sent_s=column("sent"),
        first_s=column("first_s"),
        last_s=column("last_s"),
        output=np.array(requests.output),
        busy_s=total("busy_s") / len(run.instances),
        num_tokens=total("num_tokens"),
        num_found=total("num_found"),
        num_preemptions=total("num_preemptions"),
        peak_cache_tokens=max(instance.peak_cache for instance in run.last),
        peak_sequences=sum(instance.peak_sequences for instance in run.last),
        was_full=any(instance.was_full for instance in run.instances),
    )

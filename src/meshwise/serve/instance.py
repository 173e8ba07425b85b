"""An engine under load, pass by pass: who waits, who is admitted, when each token comes.

Before every pass the engine admits requests in the order of their arrival, while there is room in the pass,
among the running sequences and in the cache. A pass that ends a prompt gives its first token. As long as
nothing can be admitted, passes differ only in the lengths of the caches, in which their time is linear: the
passes to the next completion, arrival or full cache are taken in one go.

The dp ranks of an instance that share their experts, and the batches in a pipeline, run in step and share the
room for sequences, so they are simulated as one engine (`Serving.engines`). A request goes to the rank with
the fewest of them, in turn, unless a router chose one (TensorRT-LLM's and vLLM's rule). Each rank has so many
tokens of prompts for a pass, waits for the one that has most, and begins only with what its own `PrefixCache`
does not hold.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwise.serve.pass_times import PassTimes
from meshwise.serve.prefix_cache import Blocks, PrefixCache, Tier
from meshwise.serve.requests import Requests

NO_RANK = -1


class EngineSequence:
    """A request in an engine: `total` tokens to prefill, of which `past` are cached; `left` to generate.

    It holds the blocks `pinned`, of `shared` tokens, together with others. `found` tokens were in a cache
    when it was admitted first, at `start_s`, `loaded` of them below the chip; a router expects it to lack
    `missing`. `placed_s`: how long it waited for a place to decode behind a prompt computed elsewhere.
    `rank`: the dp rank that takes it, NO_RANK until one is chosen.
    """

    __slots__ = (
        *("arrival", "end", "first_s", "found", "index", "last_s", "late_s", "left", "loaded"),
        *("missing", "past", "pinned", "placed_s", "rank", "sent", "shared", "start_s", "total"),
    )

    def __init__(self, index: int, sent: float, arrival: float, prompt: int, output: int) -> None:
        self.index, self.sent, self.arrival = index, sent, arrival
        self.total, self.left, self.past = prompt, output, 0
        self.end = -1  # the pass that gives the last token; -1 while it does not run
        self.start_s = self.first_s = self.last_s = math.nan
        self.placed_s = self.late_s = 0.0  # its tokens come to the client so late after their passes
        self.pinned: Blocks = ()
        self.shared = self.found = self.loaded = self.missing = 0
        self.rank = NO_RANK

    @property
    def has_ended(self) -> bool:
        """Whether a request that was admitted has got its last token, or has left for another worker."""
        return self.end < 0 and self.past == self.total


@dataclass(frozen=True, slots=True, eq=False)
class ServingWorker:
    """What an instance is: the passes of its engine, tokens for which its caches have room.

    `tiers`: where blocks of each of its `ranks` (dp) go that have no room in them. `engines`: how many such
    engines, this one included, one server stands before; as many requests run on each of them.
    """

    times: PassTimes
    cache_tokens: int
    tiers: tuple[Tier, ...] = ()
    ranks: int = 1
    engines: int = 1


class Instance:
    """A worker with its queue, its running sequences and its clock.

    `held` are the tokens that the cache holds or must hold of admitted requests, `shared` those that several
    may hold, `context` those of running sequences, `left` what admitted requests have yet to generate.
    Sequences `leave` with their last token; where there are `only_prompts`, with their prompt computed.
    Those whose cache is brought back from below the chip are `loading`.
    What a fleet knows of it: its `number` there, the requests that are `sent` to it and under way, the tokens
    of their prompts (`sent_tokens`); when it was asked for and given back (`start_s`, `stop_s`).
    """

    def __init__(
        self, worker: ServingWorker, requests: Requests, leave: Callable[[EngineSequence, float], None], *,
        only_prompts: bool = False,
    ) -> None:  # fmt: skip
        self.engine, self.times, self.cache = worker.times.engine, worker.times, worker.cache_tokens
        self.blocks: Sequence[Blocks] | Mapping[int, Blocks] = requests.blocks  # by index of a sequence
        self.prefixes = [
            PrefixCache(requests.block_tokens, worker.tiers, requests.kept[rank :: worker.ranks])
            for rank in range(worker.ranks)
        ]
        self.number = self.sent = self.sent_tokens = 0
        self.start_s, self.bound_s = 0.0, math.inf  # before the latter nothing happens that others hear of
        self.stop_s: float | None = None
        self.turn, self.under_way = 0, [0] * worker.ranks  # requests of each rank
        self.links_s = [0.0] * worker.ranks  # when each rank's link to the tiers is free
        self.leave, self.only_prompts = leave, only_prompts
        self.reply_s = worker.engines * self.engine.reply_s
        self.now = self.seen = self.busy_s = 0.0
        self.step = self.num_tokens = self.num_preemptions = self.peak_cache = self.peak_sequences = 0
        self.was_full = False  # whether a request waited for room in the cache
        self.since = self.due = 0  # the last pass with prompts, and that until which others wait; 0: none
        self.loaded_from = [0] * len(worker.tiers)
        self.is_blocked = False  # whether the first that waits has no room until another leaves
        self.held = self.shared = self.context = self.left = 0
        self.queue: deque[EngineSequence] = deque()
        self.prefilling: list[EngineSequence] = []
        self.running: list[tuple[int, int, EngineSequence]] = []  # by the pass of the last token
        self.admitted: list[EngineSequence] = []  # in order; those that have ended are removed late
        self.loading: list[tuple[float, int, EngineSequence]] = []  # a heap by the second
        self.most_tokens = self.engine.max_tokens * self.times.groups
        self.most_sequences = self.engine.max_sequences * self.times.groups

    def put(self, sequence: EngineSequence) -> None:
        """Queue a request; those that come from another worker may come out of order."""
        if sequence.rank == NO_RANK:
            in_turn = [*range(self.turn, len(self.under_way)), *range(self.turn)]
            sequence.rank = min(in_turn, key=self.under_way.__getitem__)
            self.turn = (self.turn + 1) % len(in_turn)
        self.under_way[sequence.rank] += 1
        place = len(self.queue)
        while sequence.past and place and self.queue[place - 1].arrival > sequence.arrival:
            place -= 1
        self.queue.insert(place, sequence)
        if not place:
            self.is_blocked = False

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens that wait to be computed, those of requests that have not begun by `missing`."""
        return sum(one.total - one.past for one in self.prefilling) + sum(one.missing for one in self.queue)

    def best_rank(self, sequence: EngineSequence) -> tuple[int, int]:
        """The rank whose cache holds most of a prompt, NO_RANK if none has any; and the tokens of that."""
        blocks = self._blocks(sequence)
        found = [prefix.found_tokens(blocks) for prefix in self.prefixes]
        return found.index(max(found)) if any(found) else NO_RANK, max(found)

    @property
    def _joins_s(self) -> float:
        """When the next that waits can join; infinite if none can until another leaves."""
        loaded_s = self.loading[0][0] if self.loading else math.inf
        return min(self.queue[0].arrival, loaded_s) if self.queue and not self.is_blocked else loaded_s

    @property
    def ready_s(self) -> float:
        """When it can go on; infinite without work."""
        return self.now if self.running or self.prefilling else max(self.now, self._joins_s)

    @property
    def next_end_s(self) -> float:
        """About when the next sequence can end, no later; infinite without work."""
        if self.prefilling or not self.running:
            return self.ready_s
        num = len(self.running)
        return self.now + (self.running[0][0] - self.step) * self.times.decode_s(num, self.context / num)

    @property
    def next_s(self) -> float:
        """About when the next sequence joins or ends, no later; infinite without work."""
        return min(self.next_end_s, max(self.now, self._joins_s))

    def go_on(self, until_s: float) -> None:
        """A pass; or several alike, as long as none begins after `until_s`, when others may send work."""
        chunks = [] if self._preempt() else self._admit()
        if chunks:
            self._prompt_pass(chunks)
        elif self.running:
            self._decode_passes(until_s)
        elif self.queue or self.loading:
            self.now = self.seen = max(self.now, self._joins_s)

    # --- who takes part --------------------------------------------------------------------------

    def _fits(self, sequence: EngineSequence) -> bool:
        """Whether a request may join those that are admitted."""
        num = len(self.running) + len(self.prefilling) + len(self.loading)
        self.is_blocked = num >= self.most_sequences
        if self.is_blocked or not num:
            return not num
        held = self.held + self.shared + len(self.running)  # which grow by a token each in the next pass
        in_use = self._prefix(sequence).tokens_in_use(self._blocks(sequence)) if self.shared else 0
        held += sequence.total - in_use
        to_come = 0 if self.only_prompts else self.left + sequence.left
        self.is_blocked = held + self.engine.reserve_frac * to_come > self.cache
        if self.is_blocked and self.engine.foresees_ends:
            self.is_blocked = held + self.engine.reserve_frac * self._to_come(sequence) > self.cache
        self.was_full = self.was_full or self.is_blocked
        return not self.is_blocked

    def _to_come(self, sequence: EngineSequence) -> int:
        """The most tokens that come at one time if `sequence` joins.

        Until a sequence ends, those that end later grow as much as it; then its room is free.
        """
        left = [(one.left, one.total) for one in (*self.prefilling, sequence)]
        left += [(one.left, one.total) for _, _, one in self.loading]
        left += [(end - self.step, one.total + one.left - end + self.step) for end, _, one in self.running]
        num, most, freed = len(left), 0, 0
        for place, (grows, holds) in enumerate(sorted(left)):
            most = max(most, (num - place) * grows - freed)
            freed += holds
        return most

    def _prefix(self, sequence: EngineSequence) -> PrefixCache:
        return self.prefixes[sequence.rank]

    def _blocks(self, sequence: EngineSequence) -> Blocks:
        return self.blocks[sequence.index] if self.blocks else ()

    def _admit(self) -> list[tuple[EngineSequence, int, int]]:
        """The chunks of prompts in the next pass: those begun, then requests that wait."""
        chunks: list[tuple[EngineSequence, int, int]] = []
        engine, ranks = self.engine, len(self.under_way)
        whole = (self.most_tokens - engine.mixes * len(self.running)) // ranks
        budget, passed_over = [whole] * ranks, deque[EngineSequence]()
        while self.loading and self.loading[0][0] <= self.now:
            self.prefilling.append(heapq.heappop(self.loading)[2])
        for sequence in self.prefilling:
            taken = min(sequence.total - sequence.past, engine.max_tokens, budget[sequence.rank])
            if taken > 0:
                chunks.append((sequence, sequence.past, sequence.past + taken))
                budget[sequence.rank] -= taken
        budget = [] if self._waits_for_more() else budget
        while any(budget) and self.queue and self.queue[0].arrival <= self.seen and self._fits(self.queue[0]):
            sequence = self.queue.popleft()
            is_cached = sequence.past == sequence.total
            places = [] if is_cached else self._prefix(sequence).found(self._blocks(sequence))
            if not any(places):
                past = sequence.past if is_cached else self._past(sequence, len(places))
                missing = sequence.total - past
                taken = min(missing, engine.max_tokens, budget[sequence.rank]) if engine.chunks else missing
                if not is_cached and (taken <= 0 or whole > budget[sequence.rank] < taken):
                    passed_over.appendleft(sequence)
                    budget[sequence.rank] = 0
                    continue
                sequence.past = past
            self._hold(sequence, places)
            if is_cached:
                sequence.placed_s = self.now - sequence.arrival
                self._first_token(sequence)
            elif any(places):
                self._load(sequence, places)
            else:
                self.prefilling.append(sequence)
                chunks.append((sequence, sequence.past, sequence.past + taken))
                budget[sequence.rank] -= taken
        self.queue.extendleft(passed_over)
        self._complete()
        return chunks

    def _hold(self, sequence: EngineSequence, places: Sequence[int]) -> None:
        """Give an admitted request its room, and the blocks that are found of it."""
        self.admitted.append(sequence)
        if math.isnan(sequence.start_s):
            sequence.start_s = self.now
            sequence.found = self._past(sequence, len(places))
        if places:
            self._pin(sequence, self._blocks(sequence)[: len(places)])
        self.held += sequence.total - sequence.shared
        self.left += sequence.left
        self._trim()

    def _waits_for_more(self) -> bool:
        """Whether prompts wait until each dp rank has one and they fill enough of a pass.

        Ranks that wait for each other count passes from the last one with prompts on, whether or not there
        is a prompt; a single rank from when there is one (TensorRT-LLM 1.2: `_balance_adp_requests`,
        `_waiting_requests`).
        """
        engine, ranks = self.engine, len(self.under_way)
        if not engine.align_passes or not self.running:
            return False
        arrived = [one for one in self.queue if one.arrival <= self.seen]
        filled = len(self.running) + sum(one.total for one in arrived)
        if not self.due or not arrived:
            counted = (self.step - self.since) % engine.align_passes if ranks > 1 else 0
            self.due = self.step + engine.align_passes - counted if arrived else 0
        lacks = len({one.rank for one in arrived}) < ranks or filled < engine.fill_frac * self.most_tokens
        return lacks and self.step < self.due

    def _preempt(self) -> bool:
        """Where the next tokens have no room: those admitted last wait again; whether there are any."""
        found = False
        while self.held + self.shared + len(self.running) > self.cache:
            sequence = self.admitted.pop()
            if sequence.has_ended:
                continue
            found = self.was_full = True
            self.num_preemptions += 1
            cached = sequence.total
            if sequence.end < 0:
                self._stop_prefilling(sequence)
            else:
                left = sequence.end - self.step
                del self.running[bisect_left(self.running, (sequence.end, sequence.index))]
                cached += sequence.left - 1 - left
                self.context -= cached
                sequence.total, sequence.left = cached + 1, left
            self._release(sequence, cached)
            self.left -= sequence.left
            sequence.past, sequence.end = 0, -1
            self.queue.appendleft(sequence)
        return found

    def _stop_prefilling(self, sequence: EngineSequence) -> None:
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
            return
        self.loading = [one for one in self.loading if one[2] is not sequence]
        heapq.heapify(self.loading)

    # --- prompts that begin alike ----------------------------------------------------------------

    def _past(self, sequence: EngineSequence, num_blocks: int) -> int:
        """Tokens that need no computing, so many blocks being found; the last token is computed anyway."""
        size, blocks = self._prefix(sequence).size, self._blocks(sequence)[:num_blocks]
        return max(sequence.past, min(sum(size[block] for block in blocks), sequence.total - 1))

    def _load(self, sequence: EngineSequence, places: Sequence[int]) -> None:
        """Bring blocks of an admitted request back over the link of its rank, when that is free."""
        blocks, prefix, rank = self._blocks(sequence), self._prefix(sequence), sequence.rank
        self.links_s[rank] = max(self.links_s[rank], self.now) + prefix.load_s(blocks, places)
        sequence.past = self._past(sequence, len(places))
        for block, place in zip(blocks, places, strict=False):
            if place:
                sequence.loaded += prefix.size[block]
                self.loaded_from[place - 1] += prefix.size[block]
        heapq.heappush(self.loading, (self.links_s[rank], sequence.index, sequence))

    def _pin(self, sequence: EngineSequence, blocks: Blocks) -> None:
        prefix = self._prefix(sequence)
        self.shared += prefix.pin(blocks)
        sequence.pinned += blocks
        sequence.shared += sum(map(prefix.size.__getitem__, blocks))
        self._trim()

    def _trim(self) -> None:
        """Leave what nobody uses the room that requests do not need, the same on each rank."""
        if not self.blocks:
            return
        room = (self.cache - self.held - self.shared) / len(self.prefixes)
        for prefix in self.prefixes:
            if prefix.idle_tokens[0] > room:
                prefix.trim(room)

    def _release(self, sequence: EngineSequence, tokens: int) -> None:
        """Take back the room of a sequence of so many tokens, which the next that waits may need."""
        self.held -= tokens - sequence.shared
        self.shared -= self._prefix(sequence).unpin(sequence.pinned)
        sequence.pinned, sequence.shared = (), 0
        self.is_blocked = False

    def _keep(self, sequence: EngineSequence, tokens: int) -> None:
        """Share the blocks that `tokens` of a sequence fill; what others hold too is held once."""
        blocks, size = self._blocks(sequence), self._prefix(sequence).size
        end = num = len(sequence.pinned)
        filled = shared = sequence.shared
        while end < len(blocks) and filled + size[blocks[end]] <= tokens:
            filled += size[blocks[end]]
            end += 1
        if end > num:
            self.held -= filled - shared
            self._pin(sequence, blocks[num:end])

    # --- passes ----------------------------------------------------------------------------------

    def _prompt_pass(self, chunks: list[tuple[EngineSequence, int, int]]) -> None:
        num = len(self.running) if self.engine.mixes else 0
        spans = [(start, end) for _, start, end in chunks]
        ranks = range(len(self.under_way))
        most = max(sum(end - start for one, start, end in chunks if one.rank == rank) for rank in ranks)
        pass_s = self.times.mixed_s(spans, num, self.context / num if num else 0.0, most * len(ranks))
        self._advance(1 if num else 0, pass_s, pass_s)
        self.since, self.due = self.step, 0
        for sequence, _, end in chunks:
            sequence.past = end
            if end == sequence.total:
                self._keep(sequence, sequence.total)
                if self.only_prompts:
                    self._release(sequence, sequence.total)
                    self.left -= sequence.left
                    self.under_way[sequence.rank] -= 1
                    self.leave(sequence, self.now)
                else:
                    self._first_token(sequence)
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
        insort(self.running, (sequence.end, sequence.index, sequence))
        self.peak_sequences = max(self.peak_sequences, len(self.running))

    def _decode_passes(self, until_s: float) -> None:
        """Passes without prompts, up to the first after which something may change."""
        num, context = len(self.running), self.context
        passes = min(self.running[0][0] - self.step, max((self.cache - self.held - self.shared) // num, 1))
        one_s = self.times.decode_s(num, context / num)
        if until_s < self.now + passes * one_s:
            passes = max(min(passes, math.ceil((until_s - self.now) / one_s)), 1)
        if self.loading:
            passes = min(passes, max(math.ceil((self.loading[0][0] - self.now) / one_s), 1))
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
        self.peak_cache = max(self.peak_cache, self.held + self.shared)
        self._trim()

    def _complete(self) -> None:
        """Requests whose last token has come leave."""
        while self.running and self.running[0][0] <= self.step:
            _, _, sequence = self.running.pop(0)
            cached = sequence.total + sequence.left - 1
            self._keep(sequence, cached + 1)
            self._release(sequence, cached)
            self.context -= cached
            self._trim()
            sequence.end, sequence.last_s = -1, self.now + sequence.late_s
            self.under_way[sequence.rank] -= 1
            self.leave(sequence, sequence.last_s)
        if len(self.admitted) > 2 * len(self.running) + 64:
            self.admitted = [one for one in self.admitted if not one.has_ended]

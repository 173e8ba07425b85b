"""What a server is asked: when each request arrives, the tokens of its prompt, the tokens it generates.

*Open loop*: requests arrive by themselves, at a rate or as a trace says. The gaps are gamma distributed with
shape `burstiness`: 1 is Poisson, less is burstier, infinity is a clock. *Closed loop*: `concurrency` clients
each send their next request when the last has ended, all the first at once, as benchmark clients do.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwise.core.columns import grouped
from meshwise.core.errors import DataError, WorkloadError
from meshwise.core.files import read_catalog, read_rows, read_text

SEED = 0
"""Of the random numbers: the same question has the same answer."""
MOST_REQUESTS = 1_000_000
"""That are drawn: beyond it a simulation takes minutes and gigabytes."""

CSV_COLUMNS: dict[str, list[str]] = read_catalog("serve_settings.toml")["trace_columns"]
"""Columns of a trace [seconds or a time of day, tokens, tokens], ours and others'; of lengths alone."""

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of a block of Mooncake's traces (arXiv 2407.00079)."""

_Time = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
_Prompt = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
_Output = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


@dataclass(frozen=True, slots=True)
class Requests:
    """`prompt` and `output` tokens of each request, in order; `arrival_s` or `concurrency`.

    `blocks`: names of the blocks that each request consists of, the first of its prompt first; those that
    begin with the same blocks share their cache. `block_tokens`: tokens of each, or by name. `kept`: blocks
    that caches hold at the start. `after`: the request of the same session that must end before (-1: none),
    `think_s` how long before. In sessions `concurrency` counts sessions, and only arrivals of their first
    requests mean something. `redrawn`: requests whose lengths were drawn again, being longer than a context.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    arrival_s: tuple[float, ...] = ()
    concurrency: int = 0
    blocks: tuple[tuple[int, ...], ...] = ()
    block_tokens: int | Mapping[int, int] = MOONCAKE_BLOCK_TOKENS
    kept: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    think_s: tuple[float, ...] = ()
    redrawn: int = 0

    @property
    def longest(self) -> int:
        """Most tokens, prompt and output, of one request."""
        return max(map(sum, zip(self.prompt, self.output, strict=True)))

    @property
    def followers(self) -> dict[int, list[int]]:
        """The requests that follow each that any follows."""
        later = (index for index, before in enumerate(self.after) if before >= 0)
        return grouped(later, self.after.__getitem__)

    @property
    def sessions(self) -> list[int]:
        """The first request of the session of each; empty without sessions."""
        found: list[int] = []
        for index, before in enumerate(self.after):
            found.append(index if before < 0 else found[before])
        return found

    @property
    def found_frac(self) -> float:
        """Share of the prompts' tokens that a cache of infinite size would hold when they come, in order."""
        known, found, size = set(self.kept), 0, self.block_tokens
        for prompt, blocks in zip(self.prompt, self.blocks, strict=False):
            tokens = 0
            for block in takewhile(known.__contains__, blocks):
                tokens += size if isinstance(size, int) else size[block]
            found += min(tokens, prompt - 1)
            known.update(blocks)
        return found / sum(self.prompt)

    @property
    def rate(self) -> float | None:
        """Mean rate of those that arrive [1/s]; None in a closed loop."""
        if self.concurrency:
            return None
        return (len(self.arrival_s) - 1) / max(self.arrival_s[-1] - self.arrival_s[0], 1e-9)

    @property
    def mean_tokens(self) -> tuple[int, int]:
        """Tokens of the mean prompt and of the mean output."""
        num = len(self.prompt)
        return round(sum(self.prompt) / num), round(sum(self.output) / num)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the prompts and outputs of requests that are drawn.

    Uniform from `ratio` of the stated tokens to all of them (SGLang's and InferenceX's clients); with `sigma`
    lognormal around the same mean, the logs spread by that, and drawn again where a request has more than
    `most` tokens; with `pairs`, one of these.
    """

    prompt: int
    output: int
    ratio: float = 1.0
    sigma: float = 0.0
    pairs: tuple[tuple[int, int], ...] = ()
    most: float = math.inf

    def draw(self, num: int, rng: np.random.Generator) -> Requests:
        """`num` requests that come at no time yet; WorkloadError for more than can be simulated."""
        if num > MOST_REQUESTS:
            raise WorkloadError(f"{num} requests are too many to simulate; the most is {MOST_REQUESTS}")
        drawn = self._draw(num, rng)
        longer = first = drawn.sum(0) > self.most
        while self.sigma and longer.any() and self.prompt + self.output <= self.most:
            drawn[:, longer] = self._draw(int(longer.sum()), rng)
            longer = drawn.sum(0) > self.most
        return Requests(tuple(drawn[0].tolist()), tuple(drawn[1].tolist()), redrawn=int(first.sum()))

    def _draw(self, num: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """A row of prompts and one of outputs."""
        if self.pairs:
            return np.array(self.pairs)[rng.integers(len(self.pairs), size=num)].T
        means = (self.prompt, self.output)
        if self.sigma:
            logs = [rng.lognormal(math.log(mean) - self.sigma**2 / 2.0, self.sigma, num) for mean in means]
            return np.maximum(np.round(logs), 1.0).astype(int)
        return np.array([rng.integers(max(round(self.ratio * of), 1), of + 1, num) for of in means])


def at_rate(rate: float, lengths: Lengths, *, num: int, burstiness: float = 1.0) -> Requests:
    """`num` requests, gaps between them drawn, at `rate` a second on average however few they are."""
    rng = np.random.default_rng(SEED)
    second = np.cumsum(rng.gamma(burstiness, 1.0 / (burstiness * rate), num))
    drawn = replace(lengths.draw(num, rng), arrival_s=tuple(second.tolist()))
    if num < 2:
        return drawn
    return replace(drawn, arrival_s=tuple((second * ((drawn.rate or rate) / rate)).tolist()))


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Requests a second over time: `rate` from each `second` on, to the next; the last one ends it."""

    second: tuple[float, ...]
    rate: tuple[float, ...]

    def requests(self, lengths: Lengths, each: int) -> Requests:
        """Requests that arrive so (a Poisson process), `each` of them for one that is drawn here."""
        rng = np.random.default_rng(SEED)
        expected = np.concatenate([[0.0], np.cumsum(np.diff(self.second) * self.rate[:-1])]) / each
        most = expected[-1] + 6.0 * math.sqrt(expected[-1]) + 20.0
        if most > MOST_REQUESTS:
            raise WorkloadError(f"{most:.3g} requests are too many to simulate; the most is {MOST_REQUESTS}")
        place = np.cumsum(rng.exponential(1.0, int(most)))
        arrival = np.interp(place[place < expected[-1]], expected, self.second)
        return replace(lengths.draw(arrival.size, rng), arrival_s=tuple((arrival - self.second[0]).tolist()))


class _Rate(msgspec.Struct):
    second: _Time
    rate: Annotated[float, msgspec.Meta(ge=0, le=1e18)]


def read_rates(path: Path) -> RateCurve:
    """A CSV of `second,rate`."""
    rows = list(read_rows(path, _Rate))
    for (_, before), (number, row) in pairwise(rows):
        if row.second <= before.second:
            raise DataError(f"{path}, line {number}: a second must be after the one before")
    if not any(row.rate for _, row in rows[:-1]):
        raise DataError(f"{path} has no time with requests; give rows of second,rate, the last where it ends")
    return RateCurve(tuple(row.second for _, row in rows), tuple(row.rate for _, row in rows))


def in_closed_loop(concurrency: int, lengths: Lengths, *, num: int) -> Requests:
    """`num` requests of `concurrency` clients."""
    return replace(lengths.draw(num, np.random.default_rng(SEED)), concurrency=concurrency)


@dataclass(frozen=True, slots=True)
class Turns:
    """Sessions of `turns` requests: each later one adds `prompt` tokens to all that was said before.

    It comes after a pause of `think_s` on average (exponential).
    """

    turns: int = 1
    prompt: int = 256
    think_s: float = 0.0


def in_sessions(first: Requests, turns: Turns, shared_prefix: int = 0) -> Requests:
    """Sessions that begin with the requests of `first`, all prompts with `shared_prefix` equal tokens."""
    num, rng = len(first.prompt), np.random.default_rng(SEED)
    pauses_s = rng.exponential(turns.think_s, (num, turns.turns)).tolist()

    def turn(session: int, number: int) -> _Row:
        output = first.output[(session + 7919 * number) % num]  # drawn alike, told apart
        arrival_s = first.arrival_s[session] if first.arrival_s else -math.inf
        prompt = turns.prompt if number else first.prompt[session]
        return _Row(arrival_s, prompt, output, (), session, pauses_s[session][number])

    sessions = [[turn(session, number) for number in range(turns.turns)] for session in range(num)]
    found = _of_sessions(sessions, 0.0 if first.arrival_s else -math.inf, shared_prefix)
    return replace(found, concurrency=first.concurrency, redrawn=first.redrawn)


# --- traces --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """Arrival [s], tokens of prompt and output, blocks of the prompt; its session, the pause before [s]."""

    arrival_s: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()
    session: str | int | None = None
    think_s: float = 0.0


class _Mooncake(msgspec.Struct):
    input_length: _Prompt
    output_length: _Output
    timestamp: _Time | None = None  # ms
    delay: _Time | None = None  # ms
    session_id: str | int | None = None
    hash_ids: tuple[int, ...] = ()


def read_requests(path: Path) -> Requests:
    """The requests of a trace: CSV of arrival [s], prompt, output; Azure's; BurstGPT's; Mooncake's JSON.

    Requests that generated nothing failed, and are left out. Arrivals count from the first; a CSV of prompt
    and output alone has none. Rows of one `session_id` are its turns, as AIPerf replays them: each adds its
    prompt to all before and their answers, `delay` ms after the last of these.
    """
    rows = _json_lines(path) if path.suffix in (".jsonl", ".json") else _csv_rows(path)
    sessions: dict[Any, list[_Row]] = {}
    for number, row in enumerate(rows):
        if row.output > 0:
            sessions.setdefault(("row", number) if row.session is None else row.session, []).append(row)
    if not sessions:
        raise DataError(f"{path} has no request that generates a token; name a trace of requests")
    ordered = sorted(sessions.values(), key=lambda of: (of[0].arrival_s, of[0].prompt, of[0].output))
    return _of_sessions(ordered, ordered[0][0].arrival_s)


def _of_sessions(sessions: Sequence[Sequence[_Row]], start_s: float, shared_prefix: int = 0) -> Requests:
    """The requests of sessions, each with its whole past, in blocks that name what was said in it.

    All begin with the block 0 of `shared_prefix` tokens, where there are any.
    """
    sizes = {0: shared_prefix} if shared_prefix else {}
    rows = list[tuple[float, int, int, tuple[int, ...], int, float]]()
    for turns in sessions:
        past, chain = 0, (0,) if shared_prefix else tuple[int, ...]()
        for number, row in enumerate(turns):
            for i, block in enumerate(row.blocks):
                covered = min(MOONCAKE_BLOCK_TOKENS, row.prompt - i * MOONCAKE_BLOCK_TOKENS)
                sizes[block] = max(min(covered, sizes.get(block, covered)), 0)
            own = row.blocks
            if len(turns) > 1 and not own:  # nobody else has these tokens
                own = (-2 * len(rows) - 1,)
                sizes[own[0]] = row.prompt - (0 if number else shared_prefix)
            chain += own
            if len(turns) > 1:
                answer = -2 * len(rows) - 2
                sizes[answer] = row.output
                chain += (answer,)
            prompt, before = past + row.prompt, len(rows) - 1 if number else -1
            rows.append((turns[0].arrival_s - start_s, prompt, row.output, chain, before, row.think_s))
            past = prompt + row.output
    arrival_s, prompts, outputs, chains, after, think_s = zip(*rows, strict=True)
    has_turns = max(after) >= 0
    return Requests(
        prompts, outputs, () if math.isinf(start_s) else arrival_s,
        blocks=chains if sizes else (), block_tokens=sizes or MOONCAKE_BLOCK_TOKENS,
        after=after if has_turns else (), think_s=think_s if has_turns else (),
    )  # fmt: skip


def _json_lines(path: Path) -> Iterator[_Row]:
    known = set()
    for number, line in enumerate(read_text(path, "JSON lines").encode().splitlines(), 1):
        try:
            row = msgspec.json.decode(line, type=_Mooncake)
        except msgspec.DecodeError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
        is_later = row.session_id is not None and row.session_id in known
        known.add(row.session_id)
        milliseconds = row.delay if is_later else row.timestamp
        if milliseconds is None:
            missing = "delay, the ms after the turn before" if is_later else "timestamp"
            raise DataError(f"{path}, line {number}: the request has no {missing}")
        second = milliseconds / 1e3
        think_s = max(second, 0.0) if is_later else 0.0
        yield _Row(second, row.input_length, row.output_length, row.hash_ids, row.session_id, think_s)


class _Asked(msgspec.Struct, kw_only=True):
    arrival: str | None = None
    prompt: _Prompt
    output: _Output


def _csv_rows(path: Path) -> Iterator[_Row]:
    for number, row in read_rows(path, _Asked, *CSV_COLUMNS.values()):
        try:
            second = -math.inf if row.arrival is None else _seconds(row.arrival)
        except (ValueError, msgspec.ValidationError):
            raise DataError(f"{path}, line {number}: arrival {row.arrival!r} is no time") from None
        yield _Row(second, row.prompt, row.output)


def _seconds(text: str) -> float:
    """Seconds, or a date and time of day whose fraction may have more digits than Python reads (Azure: 7)."""
    if ":" not in text:
        return msgspec.convert(text, _Time, strict=False)
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")

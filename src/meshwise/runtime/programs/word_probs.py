"""Log-probabilities token by token, and the statistics of words that fairseq's eval_lm makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from meshwise.runtime.programs.text_data import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class WordProbs:
    """The tokens of one block and their log-probabilities [nats], and the statistics of its words."""

    block: int
    tokens: list[int]
    logprobs: list[float]
    words: dict[int, WordStat]


@dataclass(slots=True)
class WordStat:
    """What fairseq keeps of a word: occurrences, sums of its log-probability and of the next word's.

    `missing_next`: occurrences that end a block.
    """

    count: int = 0
    logprob: float = 0.0
    next_logprob: float = 0.0
    missing_next: int = 0

    def add(self, logprob: float, next_logprob: float | None) -> None:
        """One more occurrence."""
        self.count += 1
        self.logprob += logprob
        self.next_logprob += next_logprob or 0.0
        self.missing_next += next_logprob is None


def word_probs(block: int, tokens: Any, logprobs: Any, read: Callable[[Any], Any]) -> WordProbs:
    """The words of one block; `read` makes a number of an element, from the device if it lies there."""
    numbers: list[int] = []
    scores: list[float] = []
    words: dict[int, WordStat] = {}
    for i in range(len(tokens)):
        number = read(tokens[i])
        numbers.append(number)
        scores.append(read(logprobs[i]))
        following = read(logprobs[i + 1]) if i + 1 < len(tokens) else None
        words.setdefault(number, WordStat()).add(read(logprobs[i]), following)
    return WordProbs(block, numbers, scores, words)


def word_document(blocks: list[WordProbs], tokenizer: Tokenizer) -> dict[str, Any]:
    """All blocks' tokens and log-probabilities, and the words of all of them, the most frequent first."""
    totals: dict[int, WordStat] = {}
    for block in blocks:
        for token, stat in block.words.items():
            total = totals.setdefault(token, WordStat())
            total.count += stat.count
            total.logprob += stat.logprob
            total.next_logprob += stat.next_logprob
            total.missing_next += stat.missing_next
    words = [
        {"token": token, "text": tokenizer.decode([token]), **asdict(totals[token])}
        for token in sorted(totals, key=lambda token: -totals[token].count)
    ]
    lines = [{"block": b.block, "tokens": b.tokens, "logprobs": b.logprobs} for b in blocks]
    return {"unit": "nats", "blocks": lines, "words": words}

"""Decoding: from the probabilities of the next token to texts, on the device until the end.

A search holds B prompts x K sequences in one buffer of tokens and decides, column by column, what comes
next; columns that lie in a prompt are given. `advance_all` feeds a model and stops when every prompt of every
rank is done.

*Beam search* keeps the K likeliest sequences alive: of the candidates (each live sequence with each token)
the best 2 K are looked at; those that end among the best K are finished, the best K that do not end live on.
A prompt is done with K finished sequences, or when they have `max_tokens`. A finished sequence scores
log-probability / length^penalty; its end counts as a token. So it is in fairseq's SequenceGenerator. With K =
1 it is greedy: it takes the likeliest token.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwise.runtime.programs.tensor_parallel.exchange import ALONE, MeshAxis, all_sum
from meshwise.runtime.programs.text_data import EOS, PAD, UNK
from meshwise.runtime.programs.transformer_lm import KVCache, TransformerDecoder


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Generated tokens, the end included; their log-probability [nats] and their score."""

    tokens: list[int]
    logprob: float
    score: float


class BeamSearch:
    """B prompts with K = `beam` sequences each.

    `prompts` [B, columns] of the given `lengths` are padded: the columns are enough for the longest prompt of
    all ranks and `max_tokens`. `min_tokens`: so many come before the end may.
    """

    def __init__(
        self, prompts: Tensor, lengths: Tensor, *, max_tokens: int, min_tokens: int = 0, beam: int = 1,
        length_penalty: float = 1.0,
    ) -> None:  # fmt: skip
        self.lengths, self.max_tokens, self.min_tokens = lengths, max_tokens, min_tokens
        self.beam, self.length_penalty = beam, length_penalty
        self.tokens = prompts.unsqueeze(1).repeat(1, beam, 1)
        self.logprob = torch.zeros(len(prompts), beam, device=prompts.device)
        self.logprob[:, 1:] = -math.inf  # so far, all live sequences are one
        self.done = torch.zeros_like(lengths, dtype=torch.bool)
        self.ended = self.tokens.clone()
        self.ended_logprob = torch.full_like(self.logprob, -math.inf)
        self.ended_score = torch.full_like(self.logprob, -math.inf)
        self.num_ended = torch.zeros_like(self.lengths)

    def advance(self, column: int, logprobs: Tensor) -> Tensor | None:
        """Decide on `column` from log-probabilities [B, K, V]; which rows [B K] live on, if not each its own.

        While there are too few tokens, `logprobs` of the end becomes -inf.
        """
        num_prompts, beam, vocab = logprobs.shape
        generated = column - self.lengths + 1
        if self.min_tokens:
            logprobs[:, :, EOS].masked_fill_((generated <= self.min_tokens)[:, None], -math.inf)
        active = (generated > 0) & ~self.done
        totals = (self.logprob.unsqueeze(-1) + logprobs).flatten(1)
        best, place = totals.topk(2 * beam, dim=1)
        parent, token = place // vocab, place % vocab
        candidates = self.tokens.gather(1, _wide(parent, self.tokens))
        candidates[:, :, column] = token

        ends = (token == EOS) | (generated == self.max_tokens)[:, None]
        ends[:, beam:].fill_(False)
        ends &= active[:, None] & best.isfinite()
        self._keep_ended(candidates, best, ends, generated.clamp_min(1))
        lives, rank = best.masked_fill(token == EOS, -math.inf).topk(min(beam, best.shape[1]), dim=1)

        live = candidates.gather(1, _wide(rank, candidates))
        origin = torch.arange(beam, device=token.device).expand(num_prompts, beam)
        origin = torch.where(active[:, None], parent.gather(1, rank), origin)
        live = torch.where(active[:, None, None], live, self.tokens)
        self.logprob = torch.where(active[:, None], lives, self.logprob)
        self.tokens = live
        self.done |= active & ((self.num_ended >= beam) | (generated == self.max_tokens))
        first = torch.arange(num_prompts, device=token.device)[:, None] * beam
        return (first + origin).flatten() if beam > 1 else None

    def _keep_ended(self, candidates: Tensor, logprob: Tensor, ends: Tensor, generated: Tensor) -> None:
        """Take the candidates that end to the K best of the finished."""
        score = (logprob / generated[:, None] ** self.length_penalty).masked_fill(~ends, -math.inf)
        scores = torch.cat([self.ended_score, score], dim=1)
        logprobs = torch.cat([self.ended_logprob, logprob], dim=1)
        sequences = torch.cat([self.ended, candidates], dim=1)
        self.ended_score, place = scores.topk(self.beam, dim=1)
        self.ended_logprob = logprobs.gather(1, place)
        self.ended = sequences.gather(1, _wide(place, sequences))
        self.num_ended = self.num_ended + ends.sum(dim=1)

    def hypotheses(self) -> list[list[Hypothesis]]:
        """Per prompt the finished sequences, best first."""
        parts = (self.ended, self.ended_logprob, self.ended_score)
        found = []
        for length, *columns in zip(self.lengths.tolist(), *(part.tolist() for part in parts), strict=True):
            entries = [(row[length:], p, s) for row, p, s in zip(*columns, strict=True) if s > -math.inf]
            found.append([Hypothesis([t for t in row if t != PAD], p, s) for row, p, s in entries])
        return found


def advance_all(
    model: TransformerDecoder, search: BeamSearch, *, first: int, dp: MeshAxis = ALONE, is_fake: bool = False
) -> None:
    """Run `search` on `model` from column `first` (at most the shortest prompt's length, and at least 1).

    `dp`: the ranks that take the same steps. Of the special tokens only the end is ever predicted.
    """
    num_prompts, num_live, width = search.tokens.shape
    cache = model.new_cache(num_prompts * num_live, width)
    for column in range(first, width):
        logprobs = next_logprobs(model, search.tokens[:, :, cache.length : column].flatten(0, 1), cache)
        origin = search.advance(column, logprobs.view(num_prompts, num_live, -1))
        del logprobs
        if origin is not None:
            cache.reorder(origin)
        if _all_done(search.done, dp, is_fake):
            return


def _all_done(done: Tensor, dp: MeshAxis, is_fake: bool) -> bool:
    """Whether no rank of `dp` has a prompt left; fake tensors do not say, and there always is one."""
    open_prompts = all_sum((~done).sum(), dp)
    return not is_fake and int(open_prompts) == 0


def next_logprobs(model: TransformerDecoder, tokens: Tensor, cache: KVCache | None) -> Tensor:
    """Log-probabilities [B, V] of what follows `tokens` [B, T]: words, or the end."""
    logits = model(tokens, cache=cache, last_only=True).logits
    logprobs = model.embed_tokens.logprobs(logits.squeeze(1))
    logprobs[:, :EOS].fill_(-math.inf)
    logprobs[:, UNK].fill_(-math.inf)
    return logprobs


def _wide(index: Tensor, like: Tensor) -> Tensor:
    """[B, n] as an index [B, n, width] that gathers whole rows of `like`."""
    return index.unsqueeze(-1).expand(-1, -1, like.shape[-1])

"""The words of a model cut over tensor-parallel ranks: embedding, head, and the log-softmax between them.

Rank r of P holds V / P rows of the tied embedding, one run of words. It looks up the tokens that it holds,
and the sum over ranks is the embedding. It makes the logits of its own words, and they stay where they are:
the log-softmax of a target takes three numbers a token from the other ranks, the largest logit, the sum of
exponentials, and the target's own (Megatron-LM, arXiv 1909.08053).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwise.runtime.programs.tensor_parallel.exchange import MeshAxis, all_max, all_sum, start_gather
from meshwise.runtime.programs.text_data import PAD


class Vocabulary(nn.Module):
    """The rows of the tied embedding that one rank of `tp` holds: `weight` [V / P, M], not initialised."""

    def __init__(self, vocab_size: int, width: int, tp: MeshAxis) -> None:
        super().__init__()
        self.tp, self.num_words = tp, vocab_size // tp.size
        self.weight = nn.Parameter(torch.empty(self.num_words, width))

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] -> their rows [B, T, M]."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        local, elsewhere = self._local(tokens)
        rows = F.embedding(local, self.weight)
        return all_sum(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp)

    def logits(self, x: Tensor) -> Tensor:
        """[B, T, M] -> the logits [B, T, V / P] of this rank's words."""
        return F.linear(x, self.weight)

    def target_logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Natural log-probability of each target token [B, T], fp32; 0 where that is padding."""
        if self.tp.size == 1:
            chosen = logits.float().log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1))
        else:
            shifted, log_total = self._shifted(logits)
            local, elsewhere = self._local(targets.unsqueeze(-1))
            own = shifted.gather(-1, local).masked_fill(elsewhere, 0.0)
            chosen = all_sum(own, self.tp) - log_total
        return chosen.squeeze(-1).masked_fill(targets == PAD, 0.0)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Natural log-probabilities [B, V] of all words from logits [B, V / P], fp32, on every rank.

        The one place where ranks exchange whole rows, [B, V] numbers: whoever chooses the next token must
        see all words.
        """
        if self.tp.size == 1:
            return logits.float().log_softmax(dim=-1)
        shifted, log_total = self._shifted(logits)
        return start_gather((shifted - log_total).unsqueeze(0), self.tp)().transpose(0, 1).flatten(1)

    def _local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of `tokens` on this rank, and a mask of those that are on another."""
        local = tokens - self.tp.index * self.num_words
        elsewhere = (local < 0) | (local >= self.num_words)
        return local.masked_fill_(elsewhere, 0), elsewhere

    def _shifted(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits in fp32 less the largest of all ranks; log of the sum of all their exponentials [..., 1]."""
        wide = logits.float()
        largest = all_max(wide.amax(dim=-1, keepdim=True), self.tp)
        shifted = wide - largest
        del wide
        total = all_sum(shifted.exp().sum(dim=-1, keepdim=True), self.tp)
        return shifted, total.log()

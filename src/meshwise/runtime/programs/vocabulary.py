"""The words of a model cut over tensor-parallel ranks: embedding, head, and the log-softmax between them.

Rank r of P holds n = ceil(V / P) rows of the tied embedding, those of words [r n, (r + 1) n). Where P does
not divide V, the rows behind the last word are padding: zero, never looked up, their logits -inf, so that
neither a loss nor a text knows of them (Megatron-LM, arXiv 1909.08053, pads too, and lets them into the sum).

A rank looks up the tokens that it holds, and the sum over ranks is the embedding. It makes the logits of its
own words, and they stay where they are: the log-softmax of a target takes three numbers a token from the
other ranks, the largest logit, the sum of exponentials, and the target's own.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwise.program.expert_parallel import num_local_words
from meshwise.runtime.programs.functions import all_gather
from meshwise.runtime.programs.moe import Shard, from_tensor_parallel, to_tensor_parallel
from meshwise.runtime.programs.text_data import PAD


class Vocabulary(nn.Module):
    """The rows of the tied embedding that one rank holds: `weight` [n, M], not initialised but for padding.

    Its words are [first, first + num_words) of `vocab_size`; the rows behind `num_words` are padding.
    """

    def __init__(
        self, vocab_size: int, width: int, shard: Shard, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.vocab_size, self.shard = vocab_size, shard
        rows = num_local_words(vocab_size, shard.tp)
        self.first = min(shard.tp_rank * rows, vocab_size)
        self.num_words = min(rows, vocab_size - self.first)
        self.weight = nn.Parameter(torch.empty(rows, width, device=device, dtype=dtype))
        if self.num_words < rows:
            self.weight.data[self.num_words :].zero_()

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] -> their rows [B, T, M]; the gradient of the padding token is zero."""
        is_here = 0 <= PAD - self.first < self.num_words
        padding = PAD - self.first if is_here else None
        if self.shard.tp_group is None:
            return F.embedding(tokens, self.weight, padding_idx=padding)
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.num_words)
        rows = F.embedding(local.masked_fill_(elsewhere, 0), self.weight, padding_idx=padding)
        return from_tensor_parallel(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.shard.tp_group)

    def logits(self, x: Tensor) -> Tensor:
        """[B, T, M] -> the logits [B, T, n] of this rank's words."""
        logits = F.linear(to_tensor_parallel(x, self.shard.tp_group), self.weight)
        if self.num_words < len(self.weight):
            logits[..., self.num_words :].fill_(-math.inf)
        return logits

    def target_logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Natural log-probability of each target token [B, T], fp32; 0 where that is padding."""
        if self.shard.tp_group is None:
            chosen = logits.float().log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1))
        else:
            shifted, log_total = self._shifted(logits)
            local = targets.unsqueeze(-1) - self.first
            elsewhere = (local < 0) | (local >= self.num_words)
            own = shifted.gather(-1, local.masked_fill_(elsewhere, 0)).masked_fill(elsewhere, 0.0)
            chosen = from_tensor_parallel(own, self.shard.tp_group) - log_total
        return chosen.squeeze(-1).masked_fill(targets == PAD, 0.0)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Natural log-probabilities [B, V] of all words from logits [B, n], fp32, on every rank.

        The one place where ranks exchange whole rows, [B, V] numbers: whoever chooses the next token must
        see all words.
        """
        if self.shard.tp_group is None:
            return logits.float().log_softmax(dim=-1)
        shifted, log_total = self._shifted(logits)
        parts = all_gather((shifted - log_total).unsqueeze(0), self.shard.tp_group)
        return parts.transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def _shifted(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits in fp32 less the largest of all ranks; log of the sum of all their exponentials [..., 1]."""
        wide = logits.float()
        largest = wide.detach().amax(dim=-1, keepdim=True)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.shard.tp_group)
        shifted = wide - largest
        del wide
        total = from_tensor_parallel(shifted.exp().sum(dim=-1, keepdim=True), self.shard.tp_group)
        return shifted, total.log()

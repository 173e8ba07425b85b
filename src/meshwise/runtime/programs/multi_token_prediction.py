"""Multi-token prediction: behind the last block a module says the token after the next (arXiv 2412.19437).

It reads what stands before the last norm and the embedding of the next token, and runs a block of its own;
embedding and head are the model's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel

from meshwise.model.architecture import Model, is_moe_layer
from meshwise.runtime.programs.block import Block
from meshwise.runtime.programs.decoder_parts import DecoderNorm, Setting

LOSS_WEIGHT = 0.3
"""Of the mean loss of all modules, beside the model's (DeepSeek-V3's for its first ten trillion tokens)."""


class Further(nn.Module):
    """One module; `number` of those of the model."""

    def __init__(self, model: Model, setting: Setting) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = DecoderNorm(model), DecoderNorm(model)
        self.projection = nn.Linear(2 * model.hidden, model.hidden, bias=False)
        has_experts = is_moe_layer(model, model.num_layers - 1)
        plain = replace(setting, redone_modules=())  # of recomputation only the model's blocks know
        self.block = Block(model, plain, has_experts=has_experts, is_redone=False)
        self.norm = DecoderNorm(model)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """[batch, own tokens, hidden] x 2 -> the same, before `norm`."""
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(x)], dim=-1)
        joined = self.projection(both)
        if isinstance(joined, DTensor):
            rows = Shard(1) if x.shape[1] < joined.shape[1] else Replicate()
            joined = joined.redistribute(placements=[rows]).to_local()
        return self.block(joined)

    @property
    def outside_block(self) -> list[nn.Module]:
        """What is not the block."""
        return [self.embedding_norm, self.hidden_norm, self.projection, self.norm]


def further_styles(rows: Shard | Replicate) -> dict[str, Any]:
    """How what is not the block is cut; `rows`: how activations between matmuls are."""
    columns = ColwiseParallel(input_layouts=rows, output_layouts=Replicate(), use_local_output=False)
    names = ("embedding_norm", "hidden_norm", "norm") if isinstance(rows, Shard) else ()
    norms = dict.fromkeys(names, SequenceParallel())
    return {"projection": columns, **norms}

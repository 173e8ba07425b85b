"""What PyTorch's optimizers keep for the weights of a rank, beside weights in fp32 that need no master copy.

AdamW keeps two moments, in the type of the weights. In 8 bits (arXiv 2110.02861, as bitsandbytes stores them)
each is a byte a number and an fp32 scale for each `BLOCK` numbers of a tensor; tensors of fewer than `LEAST`
numbers keep fp32. Muon keeps one momentum of each matrix.
"""

from __future__ import annotations

import numpy as np

from meshwise.core.units import Num
from meshwise.model.weights import Weight

STATES = {"adam": 2.0, "adam-fp32": 2.0, "adam-bf16": 2.0, "muon": 1.0, "sgd": 0.0, "none": 0.0}
"""Numbers, in the type of the weights, that optimizers keep for each."""
BLOCK = 256
"""Numbers of a moment in 8 bits that share a scale."""
LEAST = 4096
"""Numbers of the smallest tensor whose moments are kept in 8 bits."""


def by_muon(weight: Weight) -> bool:
    """Whether `optimizer=muon` moves a weight by Muon, not by AdamW: matrices between the model's ends."""
    return weight.is_matrix and weight.trains and weight.module not in ("embedding", "head")


def state_bytes(optimizer: str, size: Num, elem_bytes: float) -> Num:
    """Bytes of the states of one tensor of `size` numbers of `elem_bytes` each."""
    if optimizer != "adam-8bit":
        return STATES[optimizer] * elem_bytes * size
    wide, narrow = 4.0 * size, size + 4.0 * np.ceil(size / BLOCK)
    return 2.0 * np.where(np.asarray(size) < LEAST, wide, narrow)

"""How a plan cuts one block: the degrees and strides that local shapes are made of.

`Cut` is what a layout reads. Its numbers may be arrays over a grid of plans; its switches say which
ops exist, so a grid holds one value of each. A group's stride is the distance between its
neighbouring members in ranks; it decides which links the group lives on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwise.layout.op import Precision
from meshwise.units import Num


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """One microbatch of `microbatch` sequences of `seq` tokens, cut by tp, cp, ep and etp.

    Context parallelism is `ulysses` (heads) x `ring` (sequence) = cp; `gather_keys` all-gathers keys and
    values instead of passing them round the ring. `imbalance` is the load of the busiest expert rank over
    the mean. `lora_rank` above 0 freezes the linear layers and trains adapters of that rank.
    """

    microbatch: Num
    seq: Num
    tp: Num = 1.0
    ulysses: Num = 1.0
    ring: Num = 1.0
    ep: Num = 1.0
    etp: Num = 1.0
    tp_stride: Num = 1.0
    cp_stride: Num = 1.0
    ep_stride: Num = 1.0
    imbalance: Num = 1.0
    sequence_parallel: bool = False
    gather_keys: bool = False
    flash: bool = True
    lora_rank: int = 0
    precision: Precision = field(default_factory=Precision)

    @property
    def tokens(self) -> Num:
        """Tokens of a microbatch that one tensor-parallel group works on."""
        return self.microbatch * self.seq / (self.ulysses * self.ring)

    @property
    def split_tokens(self) -> Num:
        """Tokens of one rank where the ops between matmuls run: cut by tp under sequence parallelism."""
        return self.tokens / self.tp if self.sequence_parallel else self.tokens

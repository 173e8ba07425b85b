"""The cross entropy of the logits, kernel by kernel, as each library runs it (`catalog/losses.toml`).

A kernel reads and writes tensors of one number a logit. What a loss keeps, how many bytes it moves and the
most that it fills follow from its kernels.

    none      op by op, as the library does it unless it is told otherwise
    kernels   the same in few kernels
    in_place  the gradient is written over the logits, which are all there is
    log_probs log-probabilities op by op, which post-training weighs. PyTorch does so where tensor parallelism
              cuts the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from meshwise.core.files import read_catalog
from meshwise.core.units import Num
from meshwise.program.op import Op, Precision, Tensor, made, work

KERNEL = "cross_entropy"
"""The kernels of a loss, which state every pass over their tensors."""


FLOP_PER_LOGIT = 2.0
"""Of one kernel: a subtraction and an exponential, a product and a sum, and the like."""


class LossKernel(NamedTuple):
    """One kernel: the tensors that it reads, as often as it does, those that it writes, what stays beside.

    `is_of_each`: it runs for each sequence of a microbatch.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    holds: tuple[str, ...]
    is_of_each: bool


@dataclass(frozen=True, slots=True)
class Loss:
    """A cross entropy: its kernels, and what it `keeps`; `split`: where tp cuts the vocabulary, if not so."""

    forward: tuple[LossKernel, ...]
    backward: tuple[LossKernel, ...]
    keeps: str
    split: Loss | None = None


def _kernel(text: str) -> LossKernel:
    """A kernel from `reads -> writes | holds`, after `each:` where there is one for each sequence."""
    moved, _, holds = text.removeprefix("each:").partition("|")
    reads, _, writes = moved.partition("->")
    names = tuple(reads.split()), tuple(writes.split()), tuple(holds.split())
    return LossKernel(*names, is_of_each=text.startswith("each:"))


def _loss(name: str, split: str = "") -> Loss:
    """The loss `name` of the catalog, and `split` in its place where tp cuts the vocabulary."""
    stated = _CATALOG["losses"][name]
    forward, backward = (tuple(map(_kernel, stated[phase])) for phase in ("forward", "backward"))
    return Loss(forward, backward, stated["keeps"], _loss(split) if split else None)


_CATALOG = read_catalog("losses.toml")
LOSSES = {
    library: {fused: _loss(*names) for fused, names in own.items()}
    for library, own in _CATALOG["libraries"].items()
}
"""The losses by library, and by what of them is fused (`Plan.loss_fusion`)."""


def loss_ops(loss: Loss, logits: Tensor, name: str, prec: Precision, sequences: Num) -> Iterator[Op]:
    """Both phases of the loss of a microbatch of `sequences`, kernel by kernel."""
    tokens, vocab = logits.shape
    tensors = {"logits": logits}

    def tensor(of: str) -> Tensor:
        if of not in tensors:
            dtype = prec.act_dtype if of == "gradient" else prec.stat_dtype
            tensors[of] = made("head", f"{name}_{of}", logits.shape, dtype)
        return tensors[of]

    for phase, kernels in (("forward", loss.forward), ("backward", loss.backward)):
        for one in kernels:
            reads, writes, holds = (tuple(tensor(of) for of in side) for side in one[:3])
            yield Op(
                module="head", name=name, phase=phase, kind="kernel", kernel=KERNEL, dtype=prec.dtype,
                shape=(tokens, vocab), count=sequences if one.is_of_each else 1.0,
                cost=work(FLOP_PER_LOGIT * tokens * vocab, reads, writes),
                reads=(*reads, *holds), makes=writes,
                keeps=(tensor(loss.keeps),) if phase == "forward" and one is kernels[-1] else (),
            )  # fmt: skip

"""The cross entropy of the logits, kernel by kernel, as each library runs it.

A kernel reads and writes tensors of one number a logit: `logits` in the type of activations, which the head's
matmul makes; `gradient` in the same type, which its backward reads; all others in fp32 (fp64). What a name is
written to again is changed in place. What a loss keeps, how many bytes it moves and the most that it fills
follow from its kernels.

    none      op by op. Megatron-LM: a copy in fp32, of which maximum, exponentials and probabilities are made
              in place. PyTorch: a copy, the log-softmax, the gradients of both (12 bytes a logit at once;
              10 in the forward, whose functions hold their arguments);
              where tensor parallelism cuts the vocabulary, one DTensor op after another (16).
    kernels   the same in few kernels. Megatron-LM's `native` keeps the copy in fp32; torch.compile and
              flash-attn keep the logits alone and make the gradient of them (4 bytes).
    in_place  the gradient is written over the logits, which are all there is: Transformer Engine up to 2.17,
              Liger.
    log_probs log-probabilities op by op, which post-training weighs: the mask of targets is a number of
              8 bytes a logit, and the gradient of each sequence's slice is added to that of all. PyTorch
              does so where tensor parallelism cuts the vocabulary.

Sources: NeMo-RL 0.3 nemo_rl/distributed/model_utils.py and algorithms/loss_functions.py; Megatron-LM d98e8a6
core/tensor_parallel/cross_entropy.py and core/fusions/fused_cross_entropy.py; TransformerEngine 2.11
pytorch/triton/cross_entropy.py (since 2.18 its gradient is fp32 of its own); PyTorch 2.13
aten/src/ATen/native/cuda/SoftMax.cu (a row of a vocabulary is read three times, and twice in the backward)
and torch/distributed/tensor/parallel/loss.py; torchtitan 6fc499f components/loss.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwise.core.units import Num
from meshwise.program.op import Op, Precision, work
from meshwise.program.tensor import Tensor, made

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


def _kernels(*texts: str) -> tuple[LossKernel, ...]:
    """Kernels from texts `reads -> writes | holds`, after `each:` where there is one for each sequence."""
    found = []
    for text in texts:
        moved, _, holds = text.removeprefix("each:").partition("|")
        reads, _, writes = moved.partition("->")
        names = tuple(reads.split()), tuple(writes.split()), tuple(holds.split())
        found.append(LossKernel(*names, is_of_each=text.startswith("each:")))
    return tuple(found)


_OVER_LOGITS = Loss(
    forward=_kernels("logits", "logits -> logits"), backward=_kernels("logits -> logits"), keeps="logits"
)
_LOG_PROBS = Loss(
    forward=_kernels(
        "logits -> wide", "wide", "wide -> shifted", "shifted -> powers | wide", "powers",
        "shifted -> probs | wide", "probs -> log_probs | wide", "probs -> probs",
    ),
    backward=_kernels(
        "-> chosen places", "chosen places -> chosen places", "chosen places -> slice",
        "slice probs -> slice", "slice -> slice", "each: -> padded", "each: padded sum -> sum",
        "sum -> gradient",
    ),
    keeps="probs",
)  # fmt: skip
LOSSES = {
    "megatron": {
        "none": Loss(
            forward=_kernels(
                "logits -> wide", "wide", "wide -> wide", "wide -> wide", "wide", "wide -> wide"
            ),
            backward=_kernels("wide -> wide", "wide -> gradient"),
            keeps="wide",
        ),
        "kernels": Loss(
            forward=_kernels("logits -> wide", "wide -> wide", "wide -> wide"),
            backward=_kernels("wide -> wide gradient"),
            keeps="wide",
        ),
        "in_place": _OVER_LOGITS,
        "log_probs": _LOG_PROBS,
    },
    "torch": {
        "none": Loss(
            forward=_kernels("logits -> wide", "wide wide wide -> log_softmax | logits"),
            backward=_kernels(
                "-> chosen", "chosen chosen log_softmax -> wide_gradient", "wide_gradient -> gradient"
            ),
            keeps="log_softmax",
            split=Loss(
                forward=_kernels(
                    "logits -> wide", "wide", "wide -> shifted", "shifted -> powers", "powers",
                    "shifted -> log_softmax | logits wide",
                ),
                backward=_kernels(
                    "-> chosen", "log_softmax -> probs", "chosen probs -> sum | log_softmax",
                    "sum -> wide_gradient | chosen log_softmax",
                    "wide_gradient -> gradient",
                ),
                keeps="log_softmax",
            ),
        ),
        "kernels": Loss(
            forward=_kernels("logits", "logits"), backward=_kernels("logits -> gradient"), keeps="logits"
        ),
        "in_place": _OVER_LOGITS,
    },
}  # fmt: skip
LOSSES["torch"]["log_probs"] = replace(LOSSES["torch"]["none"], split=_LOG_PROBS)
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

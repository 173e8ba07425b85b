"""A module of multi-token prediction, as tensors that are nothing but their bytes.

It (`runtime.programs.further`) joins what stands before the last norm with the embedding of the next token,
and runs a block of its own. FSDP2 gathers its norms and its projection together, and its block apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from meshwise.estimate.live_decoder import Modules
from meshwise.estimate.live_fsdp2 import Group, Trained, entering, trained, used, within
from meshwise.estimate.live_linear import Weight
from meshwise.estimate.live_tensors import Tensor
from meshwise.model.architecture import Model, layer_kind
from meshwise.model.weights import Weight as WeightOfModel
from meshwise.model.weights import Weights, block_weights, frozen, mtp_weights


class Further:
    """One module; `modules` recompute nothing."""

    def __init__(self, model: Model, modules: Modules, groups_of: Callable[[Weights], list[Group]]) -> None:
        self.modules, self.graph, lora_rank = modules, modules.graph, modules.cut.lora_rank
        self.kind = block_weights(model, layer_kind(model, model.num_layers - 1), lora_rank)
        self.in_block = groups_of(self.kind)
        weights = frozen(mtp_weights(model)) if lora_rank else mtp_weights(model)
        self.listed = tuple(sorted(weights, key=_is_last))
        (self.ends,) = groups_of(self.listed)

    def trained(self) -> Iterator[Trained]:
        """Its weights, in the order in which modules list them."""
        *ends, last = trained(self.listed, [self.ends])
        yield from (*ends, *trained(self.kind, self.in_block), last)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """What the block makes of both, and its last norm of that."""
        modules, group = self.modules, self.ends
        group.before_forward()
        both = (
            modules.norm(group.weights, "embedding_norm", entering(self.graph, group, embedded)),
            modules.norm(group.weights, "hidden_norm", x),
        )
        joined = modules.joined(2.0 * x.size, *both)
        del both
        block, *experts = self.in_block
        of_experts = partial(within, modules.checkpoints, experts[0], modules.experts) if experts else None

        def run(weights: Mapping[str, Weight], x: Tensor) -> Tensor:
            return modules.block(weights, of_experts, x)

        return within(modules.checkpoints, block, run, modules.projected(group.weights, joined))

    def normed(self, x: Tensor) -> Tensor:
        """As the head reads it."""
        return used(self.ends, self.modules.norm(self.ends.weights, "final_norm", x))


def _is_last(weight: WeightOfModel) -> bool:
    return weight.name.startswith("final_norm")

"""LoRA: a frozen linear layer, and beside it two thin ones that train (arXiv 2106.09685).

Under tensor parallelism the adapters are cut as the layer is, one of them whole: beside columns the second is
cut, beside rows the first, whose partial result the second passes on, so that one exchange adds up both.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, parallel
from torch.nn import functional as F

from meshwise.runtime.programs.local import local


class Adapted(nn.Module):
    """layer(x) + b(a(x)), of inner width `rank`."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.lora_a = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_in] -> [..., d_out]."""
        y = self.layer(x)
        thin = F.linear(F.linear(local(x), local(self.lora_a.weight)), local(self.lora_b.weight))
        if isinstance(y, DTensor):
            thin = DTensor.from_local(thin, y.device_mesh, y.placements, run_check=False)
        return y + thin


def is_adapter(name: str) -> bool:
    """Whether `name` is that of an adapter's weight."""
    return ".lora_" in name


def cut_as(style: Any, name: str, rows: Shard | Replicate) -> dict[str, Any]:
    """The styles of the adapted layer `name` that `style` would cut; `rows`: how activations are cut."""
    whole = parallel.SequenceParallel()  # on every rank, each for its own tokens
    if isinstance(style, parallel.RowwiseParallel):
        inner = parallel.RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        around = {name: parallel.PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=rows)}
        return around | {f"{name}.layer": inner, f"{name}.lora_a": inner, f"{name}.lora_b": whole}
    if isinstance(style, parallel.ColwiseParallel):
        inner = parallel.ColwiseParallel()
        gathers = style.input_layouts == (rows,)
        gather = parallel.PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),))
        around = {name: gather} if gathers else {}
        return around | {f"{name}.layer": inner, f"{name}.lora_a": whole, f"{name}.lora_b": inner}
    return {f"{name}.layer": whole, f"{name}.lora_a": whole, f"{name}.lora_b": whole}

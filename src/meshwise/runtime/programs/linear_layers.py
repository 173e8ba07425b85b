"""Linear layers of other kinds than torch's: with adapters beside frozen weights, and with products in fp8.

LoRA: a frozen linear layer, and beside it two thin ones that train (arXiv 2106.09685). Under tensor
parallelism the adapters are cut as the layer is, one of them whole: beside columns the second is cut, beside
rows the first, whose partial result the second passes on, so that one exchange adds up both.

In fp8 operands of a matmul are cast, each with a scale for the whole tensor, and sums are in the type of the
input: weights and inputs are cast to e4m3, gradients of results to e5m2 (arXiv 2209.05433). The input is
kept as it is and cast again in the backward, as torchao's Float8Linear does; all else stays as it is.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, parallel
from torch.nn import functional as F

from meshwise.runtime.torch_private import scaled_mm, will_engine_execute_node


def local(x: Any) -> Any:
    """This rank's part; of a weight that several ranks hold, each finds its own part of the gradient."""
    if not isinstance(x, DTensor):
        return x
    if not any(placement.is_replicate() for placement in x.placements):
        return x.to_local()
    return x.to_local(grad_placements=[Partial()] * len(x.placements))


class OwnLinear(nn.Linear):
    """A linear layer that every rank has whole, for the tokens that it has."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_in] -> [..., d_out]."""
        return F.linear(local(x), local(self.weight), local(self.bias))


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


def cut_as(style: Any, name: str, rows: Shard | Replicate) -> dict[str, Any]:
    """The styles of the adapted layer `name` that `style` would cut; `rows`: how activations are cut."""
    whole = parallel.SequenceParallel()  # on every rank, each for its own tokens
    if isinstance(style, parallel.RowwiseParallel):
        inner = parallel.RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        around = {name: parallel.PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=rows)}
        return around | {f"{name}.layer": inner, f"{name}.lora_a": inner, f"{name}.lora_b": whole}
    inner = parallel.ColwiseParallel()
    gather = parallel.PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),))
    around = {name: gather} if style.input_layouts == (rows,) else {}
    return around | {f"{name}.layer": inner, f"{name}.lora_a": whole, f"{name}.lora_b": inner}


FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2


class NarrowLinear(nn.Linear):
    """x W^T + b, the product in fp8; of distributed operands, what each rank has of them."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_in] -> [..., d_out]."""
        y: Tensor = Product.apply(local(x), local(self.weight))
        if not isinstance(self.weight, DTensor) or self.weight.placements[-1].is_replicate():
            return y if self.bias is None else y + local(self.bias)
        cut: Placement = Partial() if self.weight.placements[-1] == Shard(1) else Shard(y.dim() - 1)
        y = DTensor.from_local(y, self.weight.device_mesh, [cut], run_check=False)
        return y if self.bias is None else y + self.bias


class Product(torch.autograd.Function):
    """x W^T, both cast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """[..., d_in] x [d_out, d_in] -> [..., d_out]."""
        ctx.save_for_backward(weight, x if ctx.needs_input_grad[1] else None)
        return _product(x.flatten(0, -2), weight, FORWARD).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """dx = dy W; dW = dy^T x, where the weight trains; a schedule may ask for one at a time."""
        weight, x = ctx.saved_tensors
        of_x, of_weight = (_is_asked_for(node) for node, _ in ctx.next_functions[:2])
        rows = grad.flatten(0, -2)
        dx = _product(rows, weight.t(), GRADIENT).unflatten(0, grad.shape[:-1]) if of_x else None
        if x is None or not of_weight:
            return dx, None
        return dx, _product(rows.t(), x.flatten(0, -2).t(), GRADIENT)


def _is_asked_for(node: Any) -> bool:
    """Whether the backward that runs goes on to `node`."""
    try:
        return node is not None and bool(will_engine_execute_node(node))
    except RuntimeError:  # so torch says of a leaf whose gradient is what is asked for
        return True


def _product(left: Tensor, right: Tensor, left_dtype: torch.dtype) -> Tensor:
    """left right^T, in fp8; the left one is in `left_dtype`."""
    (a, a_scale), (b, b_scale) = _cast(left, left_dtype), _cast(right, FORWARD)
    return scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=left.dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in fp8, rows one after the other as matrix units read them, and what to multiply it with."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype).contiguous(), scale

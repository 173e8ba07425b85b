"""Products of matrices in NVFP4: e2m1 numbers, an e4m3 scale for each 16 of a row, one fp32 scale for all.

The scale of all lets the largest scale of a block be e4m3's largest number. Rounding is to the nearest.
GPUs with fp4 units multiply the numbers as they are (`torch._scaled_mm`); elsewhere the very same numbers are
widened first. Source: Nvidia, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional as F

from meshwise.runtime.torch_private import scaled_mm

BLOCK = 16
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What e2m1 has, beside the same with a sign."""
SCALES = torch.float8_e4m3fn
LARGEST, LARGEST_SCALE, LEAST_SCALE = LEVELS[-1], torch.finfo(SCALES).max, 2.0**-9


def product(left: Tensor, right: Tensor) -> Tensor:
    """[m, k] x [n, k] -> left right^T [m, n] in the type of `left`."""
    return fp4_mm(*cast_to_fp4(left), *cast_to_fp4(right), left.shape[1], left.dtype)


@custom_op("meshwise::cast_to_fp4", mutates_args=())
def cast_to_fp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, k] -> bytes [rows, k / 2] of two numbers, scales [rows, k / 16], the scale of all.

    k counts zeros that fill up the last block of a row.
    """
    blocks = F.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK)).float()
    largest = blocks.abs().amax(-1)
    of_all = largest.amax().clamp(min=1e-30) / (LARGEST * LARGEST_SCALE)
    scales = (largest / (LARGEST * of_all)).clamp(LEAST_SCALE, LARGEST_SCALE).to(SCALES)
    parts = (blocks / (scales.float() * of_all).unsqueeze(-1)).flatten(1)
    middles = x.new_tensor([(low + high) / 2.0 for low, high in pairwise(LEVELS)])
    codes = (
        torch.bucketize(parts.abs().contiguous(), middles.float()).to(torch.uint8)
        | (parts < 0).to(torch.uint8) << 3
    )
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, of_all


@cast_to_fp4.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, num_blocks = x.shape[0], -(-x.shape[1] // BLOCK)
    codes = x.new_empty(rows, num_blocks * BLOCK // 2, dtype=torch.uint8)
    return codes, x.new_empty(rows, num_blocks, dtype=SCALES), x.new_empty((), dtype=torch.float32)


@custom_op("meshwise::fp4_mm", mutates_args=())
def fp4_mm(
    left: Tensor, left_scales: Tensor, of_left: Tensor, right: Tensor, right_scales: Tensor, of_right: Tensor,
    k: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """left right^T of what `cast_to_fp4` gave of matrices with k columns."""
    if left.is_cuda:
        narrow = (codes.view(torch.float4_e2m1fn_x2) for codes in (left, right))
        scales = (in_tiles(of_blocks) for of_blocks in (left_scales, right_scales))
        (a, b), (a_scales, b_scales) = narrow, scales
        return scaled_mm(a, b.t(), a_scales, b_scales, out_dtype=dtype) * (of_left * of_right).to(dtype)
    a, b = widened(left, left_scales), widened(right, right_scales)
    return ((a @ b.t()) * (of_left * of_right)).to(dtype)


@fp4_mm.register_fake
def _(left: Tensor, left_scales: Tensor, of_left: Tensor, right: Tensor, *rest: object) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[0], dtype=rest[-1])


def widened(codes: Tensor, scales: Tensor) -> Tensor:
    """The numbers in fp32, but for the scale of all."""
    levels = torch.tensor([*LEVELS, *(-level for level in LEVELS)], device=codes.device)
    parts = levels[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).int()]
    return (parts.unflatten(1, (-1, BLOCK)) * scales.float().unsqueeze(-1)).flatten(1)


def in_tiles(scales: Tensor) -> Tensor:
    """[rows, blocks] in the order in which tensor cores read them: tiles of 128 x 4, filled up with zeros."""
    rows, columns = scales.shape
    filled = F.pad(scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = filled.view(-1, 128, filled.shape[1] // 4, 4).permute(0, 2, 1, 3)
    return tiles.reshape(-1, 4, 32, 4).transpose(1, 2).flatten().view(scales.dtype)

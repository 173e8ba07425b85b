"""Muon over shards (Moonlight, arXiv 2502.16982): matrices move by their momentum, made orthogonal.

A rank keeps the momentum of its shards. At a step the replicas gather that of each matrix in bf16, each makes
the whole one orthogonal by five iterations of Newton and Schulz, and takes its own part. A tensor-parallel
rank does so with its own part of a matrix (Megatron-LM's `--muon-tp-mode blockwise`). Embedding, head and
vectors move by AdamW, whose size of steps Muon's are scaled to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwise.program.muon import ITERATIONS
from meshwise.runtime.programs.flat_optimizer import FlatOptimizer
from meshwise.runtime.torch_private import all_gather_single

MOMENTUM, WEIGHT_DECAY, LIKE_ADAM = 0.95, 0.1, 0.2
A, B, C = 3.4445, -4.7750, 2.0315  # of the polynomial, as torch.optim.Muon has them


class Muon:
    """Of `matrices` (or stacks of them) that FSDP2 has cut, and AdamW of `others`."""

    def __init__(self, matrices: Sequence[DTensor], others: Sequence[Tensor], lr: float) -> None:
        self._lr, self._matrices = lr, matrices
        self._others = FlatOptimizer(partial(torch.optim.AdamW, lr=lr, foreach=False), others)
        self._momenta: dict[Tensor, dict[str, Any]] = {}

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """What is kept of each weight."""
        return {**self._momenta, **self._others.state}

    @torch.no_grad()
    def step(self) -> None:
        """One step of every weight that has a gradient."""
        for matrix in self._matrices:
            if isinstance(matrix.grad, DTensor):
                self._step(matrix, matrix.grad.to_local())
        self._others.step()

    def zero_grad(self) -> None:
        """Let go of the gradients."""
        for matrix in self._matrices:
            matrix.grad = None
        self._others.zero_grad()

    def _step(self, matrix: DTensor, grad: Tensor) -> None:
        state = self._momenta.setdefault(matrix, {"momentum": torch.zeros_like(grad)})
        momentum = state["momentum"].lerp_(grad, 1.0 - MOMENTUM)
        whole, dim, begin = _gathered(matrix, grad.lerp(momentum, MOMENTUM).bfloat16())
        moved = orthogonal(whole).narrow(dim, begin, grad.shape[dim])
        scale = self._lr * LIKE_ADAM * math.sqrt(max(whole.shape[-2:]))
        weight = matrix.to_local()
        weight.mul_(1.0 - self._lr * WEIGHT_DECAY).add_(moved.to(weight.dtype), alpha=-scale)


def _gathered(matrix: DTensor, part: Tensor) -> tuple[Tensor, int, int]:
    """The whole of which this rank has `part`, the dim along which it is cut, and where the part begins."""
    mesh, names = matrix.device_mesh, matrix.device_mesh.mesh_dim_names or ()
    dim, group = matrix.dim() - 2, mesh.get_group("dp")
    rows = matrix.shape[dim]
    if "tp" in names and matrix.placements[names.index("tp")].is_shard(0):
        rows //= mesh.size(names.index("tp"))
    each = -(-rows // group.size())
    if group.size() == 1:
        return part, dim, 0
    padded = F.pad(part, (0, 0, 0, each - part.shape[dim]))
    whole = all_gather_single(padded, dim, group).narrow(dim, 0, rows)
    return whole, dim, min(group.rank() * each, rows)


def orthogonal(matrices: Tensor) -> Tensor:
    """[..., m, n] -> the same, all of its singular values near 1."""
    x = matrices.reshape(-1, *matrices.shape[-2:])
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, gram, x, beta=A)
    return (x.mT if is_tall else x).reshape(matrices.shape)

"""What a program knows of the place where it runs: its rank, its device, its groups, its recorder.

Real or not makes no difference to the program: under `dry_run` the device is a fake one and the groups
move nothing, under `run` they are gloo or NCCL.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from meshwise.core.units import with_prefix
from meshwise.program.tape import Step
from meshwise.runtime import torch_private as private
from meshwise.runtime.recorder import DTYPE_NAMES, OpRecorder

TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
TORCH_DTYPES |= {"fp8": torch.bfloat16, "tf32": torch.float32}
"""torch's names of the dtypes that programs compute in; fp8 and tf32 are what matmuls of others use."""


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Where a rank runs. The default process group is initialised; `is_fake` under a dry run.

    `root` is the rank that speaks: `say` prints there and nowhere else.
    """

    rank: int
    world_size: int
    device: torch.device
    recorder: OpRecorder
    root: int = 0
    is_fake: bool = False
    quiet: bool = False

    def dtype(self, name: str) -> torch.dtype:
        """The torch dtype that meshwise calls `name`."""
        return TORCH_DTYPES[name]

    def say(self, text: str) -> None:
        """Print a line, on the root rank only; nothing where only the JSON document is wanted."""
        if self.rank == self.root and not self.quiet:
            print(text, flush=True)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor on this rank's device, its elements not set."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def normal(self, *shape: int, dtype: torch.dtype, key: tuple[int, ...], std: float = 1.0) -> torch.Tensor:
        """A tensor of normal numbers that depend on `key` alone: the same on any rank of any world."""
        tensor = self.empty(*shape, dtype=dtype)
        if not self.is_fake:
            tensor.normal_(std=std, generator=generator_of(self.device, *key))
        return tensor

    def step(self, name: str, tensors: Mapping[str, torch.Tensor], note: str = "") -> None:
        """Record a step and print it: `step("compute q", {"q [h, N/P, d/h]": q}, "q = input x Q")`."""
        for line in step_lines(self.recorder.step(name, tensors), note):
            self.say(line)

    def mesh(self, **axes: int) -> DeviceMesh:
        """A mesh of all ranks with named axes, outermost first: `mesh(dp=2, tp=8)` puts tp on neighbours.

        Only this rank's own groups are made, so that a rank of a large world costs no more than one of a
        small. The recorder learns which group is which axis.
        """
        return self.grid(range(self.world_size), **axes)

    def grid(self, of_ranks: Sequence[int], **axes: int) -> DeviceMesh:
        """A mesh with named axes of some ranks, this rank among them; `copies` of dp's shards are dp too."""
        forget_groups()
        with private.disable_current_modes():  # the recorder and fake tensors have no part in this
            ranks = torch.tensor(of_ranks).view(tuple(axes.values()))
            lines = (line_of(ranks.numpy(), self.rank, dim) for dim in range(len(axes)))
            groups = list(map(self.group, ("dp" if name == "copies" else name for name in axes), lines))
            return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=tuple(axes))

    def group(self, axis: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A group of `ranks`, this rank among them, known to the recorder as mesh axis `axis`."""
        group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=axis)
        self.recorder.name_axis(group, axis)
        return group


def generator_of(device: torch.device, *key: int | str) -> torch.Generator:
    """A generator whose numbers depend on `key` alone."""
    digest = hashlib.sha256(" ".join(map(str, key)).encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8]) >> 1)


@contextmanager
def numbers_of(dtype: torch.dtype) -> Iterator[None]:
    """Parameters made inside are of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def line_of(grid: NDArray[Any], rank: int, dim: int) -> list[int]:
    """The ranks of a grid whose place differs from that of `rank` in `dim` alone."""
    place = np.argwhere(grid == rank)[0]
    line: list[int] = grid[(*place[:dim], slice(None), *place[dim + 1 :])].tolist()
    return line


def forget_groups() -> None:
    """DTensor remembers by a mesh's shape how it redistributes; a new mesh of that shape has new groups."""
    private.dtensor_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    private.clear_fast_sharding_cache()
    private.clear_redistribute_planner_cache()
    private.gen_transform_infos.cache_clear()


def step_lines(entries: Sequence[Step], note: str = "") -> Iterator[str]:
    """A step as text: name, what it computed, FLOP of all ranks, each tensor, memory where it is recorded."""
    last = entries[-1]
    yield from filter(None, (last.step, note))
    if last.flop:
        yield f"flops: {with_prefix(last.flop, 'FLOP')}"
    for entry in entries:
        size = with_prefix(entry.bytes, "B")
        yield f"{entry.name} {entry.symbols}: {list(entry.shape)}, {entry.elements:,} elements, {size}"
    if last.peak_bytes:
        yield f"Current memory allocation: {with_prefix(last.current_bytes, 'B')}"
        yield f"Peak memory allocation: {with_prefix(last.peak_bytes, 'B')}"

"""How long kernels take that only move memory: norms, activations, dropout, softmax, adds, casts.

They do a few FLOP per byte, far below what a chip offers, so they take as long as their bytes need at
the bandwidth that a streaming kernel reaches, and never less than a launch. A *cast with a scale* (to
fp8 or fp4) reads its input once to find the scale of each row and again to write the result, with one
block of threads per row: short rows cost their fixed time.
"""

from meshwise.core.units import Num
from meshwise.machine.efficiency import CastEfficiency, MemoryEfficiency


def memory_kernel_s(moved_bytes: Num, *, memory_bytes_per_s: Num, efficiency: MemoryEfficiency) -> Num:
    """Time [s] of one kernel that reads and writes `moved_bytes` in all. Broadcasts."""
    return efficiency.launch_s + moved_bytes / (memory_bytes_per_s * efficiency.memory_frac)


def scaled_cast_s(
    rows: Num,
    columns: Num,
    *,
    out_bytes: Num,
    memory_bytes_per_s: Num,
    num_cores: Num = 1.0,
    efficiency: CastEfficiency,
) -> Num:
    """Time [s] to cast `rows x columns` elements of 2 bytes to scaled ones of `out_bytes`."""
    moved_bytes = efficiency.passes * rows * columns * (2.0 + out_bytes)
    moving_s = moved_bytes / (memory_bytes_per_s * efficiency.memory_frac)
    return efficiency.launch_s + moving_s + rows * efficiency.row_s / num_cores

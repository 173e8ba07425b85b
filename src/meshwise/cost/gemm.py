"""How long a matmul really takes: tiles, waves, split-k, the cache, and the memory behind it.

C[m,n] = A[m,k] B[k,n] is cut into tiles of `tile_m x tile_n`, one core works on one tile, and the tiles
run in *waves* of `num_cores`. A tile loops over k: it computes 2 tile_m tile_n k FLOP, while the cache
feeds it (tile_m + tile_n) k elements. So a big tile uses the core well, a small one wastes less at the
edges; where there are fewer tiles than cores, the sum over k is *split* among the idle cores and added
up afterwards. Where rows of groups differ (`uneven`), the last tile of each is half empty in the mean. A lone
row may be a product of a matrix and a vector, whose kernels fill no tile with rows.
The library tries them all and we take the fastest:

    tile      = max(2 tile_m tile_n k/s FLOP / core rate, (tile_m + tile_n) k/s bytes / cache rate) + overhead
    compute   = ceil(tiles s / num_cores) tile  (+ the reduction if s > 1)
    memory    = (A + B + C bytes) / memory bandwidth
    time      = launch + (compute^p + memory^p)^(1/p)

The power sum stands for imperfect overlap of compute and memory (p = 2.5, `overlap_power`). The core rate
falls with the duration of the kernel, as the power limit lowers the clock. Batched and grouped matmuls
are `batch` times as many tiles. Where overheads go with a tile's rows (`by_rows`), those of few rows cost
little. Constants: `efficiency.GemmEfficiency`, fitted by `meshwise fit`.
"""

from typing import Any

import numpy as np

from meshwise.core.units import Num
from meshwise.machine.efficiency import THROTTLE_DECADES, GemmEfficiency

TILES = ((256.0, 128.0), (128.0, 128.0), (64.0, 64.0))
"""Rows and columns of the tiles that the libraries choose from; more shapes fit no better."""

GROUPED_TILES = (*TILES, (16.0, 128.0))
"""Those of grouped matmuls: an expert may have few rows."""

MOST_ROWS_BETWEEN = 128.0
"""Rows between two sizes of a matmul whose times are those of whole tiles; with fewer, of smaller tiles."""

VECTOR_FRAC = 0.95
"""What kernels of a lone row reach of the bandwidth of other matmuls (A100 0.93, H100 0.95, B200 0.98)."""

MIN_SPLIT_K = 512.0
MAX_SPLIT = 16.0
THROTTLE_FROM_S = 1e-4


def gemm_s(
    m: Num, n: Num, k: Num, *, batch: Num = 1.0, flop_per_s: Num, memory_bytes_per_s: Num,
    num_cores: Num = 1.0, elem_bytes: Num, right_bytes: Num | None = None, out_bytes: Num | None = None,
    tiles: tuple[tuple[float, float], ...] = TILES, uneven: Num = False, efficiency: GemmEfficiency,
) -> Num:  # fmt: skip
    """Time [s] of `batch` matmuls of m x k by k x n in one kernel.

    `elem_bytes` is the size of an element of A, `right_bytes` of B and `out_bytes` of C (None: the same);
    B may be stored in fewer bits than it is computed in. `tiles` are the rows and columns to choose from.
    `flop_per_s` and `memory_bytes_per_s` are the chip's published peaks. With the ideal efficiency this is
    max(2mnk / peak, bytes / bandwidth). Everything broadcasts. Operands are taken from memory, not from
    a warm cache.
    """
    written_bytes = elem_bytes if out_bytes is None else out_bytes
    right_frac = 1.0 if right_bytes is None else right_bytes / elem_bytes
    moved_bytes = batch * (elem_bytes * (m * k + n * k * right_frac) + written_bytes * (m * n))
    memory_s = moved_bytes / (memory_bytes_per_s * efficiency.memory_frac)
    ideal_s = 2.0 * batch * m * n * k / flop_per_s
    if not efficiency.tiled:
        return efficiency.launch_s + np.maximum(ideal_s / efficiency.peak_frac, memory_s)
    decades = np.log10(np.maximum(ideal_s, THROTTLE_FROM_S) / THROTTLE_FROM_S)
    slowdown = 1.0 + efficiency.throttle_frac * np.minimum(decades, THROTTLE_DECADES)
    chip: dict[str, Any] = {
        "core_flop_per_s": flop_per_s * efficiency.peak_frac / (slowdown * num_cores),
        "cache_bytes_per_s": memory_bytes_per_s * efficiency.cache_speedup, "num_cores": num_cores,
        "elem_bytes": elem_bytes, "right_frac": right_frac, "uneven": uneven, "efficiency": efficiency,
        "tile_shapes": GROUPED_TILES if efficiency.by_rows else tiles,
    }  # fmt: skip
    sizes = np.broadcast_arrays(m, n, k, batch)
    busy_s = _overlapped(_between_tiles_s(*sizes, **chip), memory_s, efficiency.overlap_power)
    is_vector = (sizes[0] == 1.0) & (sizes[3] == 1.0)
    if (tiles is TILES or np.all(right_frac < 1.0)) and is_vector.any():
        compute_s = _between_tiles_s(*sizes, **chip, fills_rows=False)
        vector_s = _overlapped(compute_s, memory_s / VECTOR_FRAC, efficiency.overlap_power)
        busy_s = np.where(is_vector, np.minimum(busy_s, vector_s), busy_s)
    return efficiency.launch_s + busy_s


def _overlapped(compute_s: Num, memory_s: Num, power: float) -> Num:
    larger, smaller = np.maximum(np.maximum(compute_s, memory_s), 1e-12), np.minimum(compute_s, memory_s)
    return larger * (1.0 + (smaller / larger) ** power) ** (1.0 / power)


def _between_tiles_s(
    m: Num, n: Num, k: Num, batch: Num, *, tile_shapes: tuple[tuple[float, float], ...], **chip: Any
) -> Num:
    """Compute time, on a line between whole tiles of rows.

    Libraries choose among more shapes of tiles than were fitted (measurements have powers of two of rows), so
    that one row more than fills the tiles does not cost a row of tiles. Members of a group keep whole tiles.
    """
    rows = sorted({height for height, _ in tile_shapes if height <= MOST_ROWS_BETWEEN})
    step = np.select([m >= height for height in reversed(rows)], rows[::-1], rows[0])
    low = np.maximum(np.floor(m / step) * step, np.minimum(m, rows[0]))
    low = np.where(batch == 1.0, low, m)
    shares = (m - low) / step
    low_s = _tiled_s(low, n, k, batch, tile_shapes=tile_shapes, **chip)
    if not shares.any():
        return low_s
    return low_s + shares * (_tiled_s(low + step, n, k, batch, tile_shapes=tile_shapes, **chip) - low_s)


def _tiled_s(
    m: Num, n: Num, k: Num, batch: Num, *, core_flop_per_s: Num, cache_bytes_per_s: Num, num_cores: Num,
    elem_bytes: Num, right_frac: Num, tile_shapes: tuple[tuple[float, float], ...], uneven: Num,
    efficiency: GemmEfficiency, fills_rows: bool = True,
) -> Num:  # fmt: skip
    """Compute time of the fastest tile shape, with k split or whole. Tile shapes are the first axis."""
    shapes = np.array(tile_shapes).reshape(len(tile_shapes), 2, *(1,) * np.ndim(m + core_flop_per_s))
    rows, columns = shapes[:, 0], shapes[:, 1]
    down = np.where(uneven, np.maximum(m / rows + 0.5, 1.0), np.ceil(m / rows))
    tiles = np.maximum(batch * down * np.ceil(n / columns), 1.0)
    filled = rows if fills_rows else 1.0
    flop_s = 2.0 * filled * columns * k / core_flop_per_s
    fed = np.where(np.asarray(right_frac) < 1.0, filled, rows)
    feed_s = elem_bytes * (fed + columns * right_frac) * k * num_cores / cache_bytes_per_s
    loop_s = np.maximum(flop_s, feed_s)
    height = rows / TILES[0][0] if efficiency.by_rows else 1.0
    whole_s = np.ceil(tiles / num_cores) * (loop_s + height * efficiency.tile_s)

    most = np.minimum(np.maximum(np.floor(k / MIN_SPLIT_K), 1.0), MAX_SPLIT)
    splits = np.clip(np.floor(num_cores / tiles), 1.0, most)
    summed_bytes = 8.0 * splits * batch * m * n  # fp32, written and read
    reduce_s = height * efficiency.split_s + summed_bytes / cache_bytes_per_s
    part_s = loop_s / splits + height * efficiency.tile_s
    split_s = np.ceil(tiles * splits / num_cores) * part_s + reduce_s
    return np.minimum(whole_s, split_s).min(axis=0)

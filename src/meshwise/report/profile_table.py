"""Tables about profiles as text: PyTorch's fourteen columns for one rank, and one joint table of all ranks.

The fourteen are self CPU % and time, CPU total % and time, CPU time a call, self device time and %, device
total and time a call, memory on CPU and device (all and self), and the number of calls. Percentages are of
the sum of all self times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from meshwise.trace.operators import OperatorTotal
from meshwise.trace.sections import AcrossRanks, joint

COLUMNS = (
    *("Self CPU %", "Self CPU", "CPU total %", "CPU total", "CPU time avg"),
    *("Self CUDA", "Self CUDA %", "CUDA total", "CUDA time avg"),
    *("CPU Mem", "Self CPU Mem", "CUDA Mem", "Self CUDA Mem", "# of Calls"),
)
_NAME_WIDTH = 55
_WIDTH = 14
SortBy = Literal["cpu", "cuda"]


def time_text(seconds: float) -> str:
    """A time as the profiler prints it: `12.381s`, `27.132ms`, `52.310us`."""
    if seconds >= 1:
        return f"{seconds:.3f}s"
    return f"{seconds * 1e3:.3f}ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3f}us"


def memory_text(num_bytes: float) -> str:
    """Bytes as the profiler prints them, in powers of 1024: `1.16 Gb`, `-20 b`."""
    for unit, scale in (("Gb", 2**30), ("Mb", 2**20), ("Kb", 2**10)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:.0f} b"


def profile_lines(
    rows: Sequence[OperatorTotal], *, sort_by: SortBy = "cpu", limit: int = 25
) -> Iterator[str]:
    """The table of one rank as lines of text, the largest CPU (or device) total first."""
    cpu_s = sum(row.self_cpu_s for row in rows)
    device_s = sum(row.self_device_s for row in rows if row.kind in ("compute", "communication", "memory"))
    ordered = sorted(rows, key=lambda row: -(row.cpu_s if sort_by == "cpu" else row.device_s))
    yield from _table(COLUMNS, ((row.name, *_cells(row, cpu_s, device_s)) for row in ordered[:limit]))
    yield f"Self CPU time total: {time_text(cpu_s)}"
    yield f"Self CUDA time total: {time_text(device_s)}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a table: names (cut where they are long) and cells, all flush right between rules."""
    rule = "  ".join(["-" * _NAME_WIDTH, *["-" * _WIDTH] * len(columns)])
    yield rule
    yield "  ".join(["Name".rjust(_NAME_WIDTH), *(column.rjust(_WIDTH) for column in columns)])
    yield rule
    for name, *cells in rows:
        short = name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 3] + "..."
        yield "  ".join([short.rjust(_NAME_WIDTH), *(cell.rjust(_WIDTH) for cell in cells)])
    yield rule


def _cells(row: OperatorTotal, cpu_s: float, device_s: float) -> tuple[str, ...]:
    def percent(part: float, whole: float) -> str:
        return f"{100 * part / whole if whole else 0.0:.2f}%"

    return (
        *(percent(row.self_cpu_s, cpu_s), time_text(row.self_cpu_s), percent(row.cpu_s, cpu_s)),
        *(time_text(row.cpu_s), time_text(row.cpu_s / row.count), time_text(row.self_device_s)),
        *(percent(row.self_device_s, device_s), time_text(row.device_s), time_text(row.device_s / row.count)),
        *(memory_text(row.cpu_bytes), memory_text(row.self_cpu_bytes)),
        *(memory_text(row.device_bytes), memory_text(row.self_device_bytes), str(row.count)),
    )


def joint_operators(
    rows: Mapping[int, Sequence[OperatorTotal]], *, sort_by: SortBy = "cpu"
) -> list[AcrossRanks]:
    """All ranks in one table: per name the total over its calls, spread and straggler, largest first."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for rank, found in rows.items():
        for row in found:
            seconds = row.cpu_s if sort_by == "cpu" else row.device_s
            values.setdefault((row.name, sort_by), {})[rank] = seconds
    return sorted(joint(values), key=lambda row: -row.mean_s)


def joint_lines(rows: Sequence[AcrossRanks], *, limit: int = 25) -> Iterator[str]:
    """The joint table as lines of text."""
    columns = ("quantity", "ranks", "min", "mean", "max", "imbalance", "straggler")
    cells = (
        (
            *(row.name, row.quantity, str(row.num_ranks), time_text(row.min_s), time_text(row.mean_s)),
            *(time_text(row.max_s), f"{row.imbalance:.3f}", f"rank {row.straggler}"),
        )
        for row in rows[:limit]
    )
    return _table(columns, cells)

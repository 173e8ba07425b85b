"""PyTorch's table of one rank, of fourteen columns at most: none of a device that did nothing, nor of memory
where no allocation was recorded.

The fourteen are self CPU % and time, CPU total % and time, CPU time a call, self device time and %, device
total and time a call, memory on CPU and device (all and self), and the number of calls. Percentages are of
the sum of all self times. Times and bytes are written as PyTorch writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from meshwise.report.table import Fields, Table, records_table
from meshwise.trace.operators import OperatorTotal

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


def profile_table(
    rows: Sequence[OperatorTotal], title: str, *, sort_by: SortBy = "cpu", limit: int = 25
) -> Table:
    """The table of one rank, the largest CPU (or device) total first."""
    cpu_s = sum(row.self_cpu_s for row in rows)
    device_s = sum(row.self_device_s for row in rows if row.kind in ("compute", "communication", "memory"))
    title += f": self CPU {time_text(cpu_s)}, self CUDA {time_text(device_s)}"

    def time(field: str, *, per_call: bool = False) -> Callable[[OperatorTotal], str]:
        return lambda row: time_text(getattr(row, field) / (row.count if per_call else 1))

    def share(field: str, whole_s: float) -> Callable[[OperatorTotal], str]:
        return lambda row: f"{100 * getattr(row, field) / whole_s if whole_s else 0.0:.2f}%"

    def memory(field: str) -> Callable[[OperatorTotal], str]:
        return lambda row: memory_text(getattr(row, field))

    columns: Fields = {
        **{"Name": "name", "Self CPU %": share("self_cpu_s", cpu_s), "Self CPU": time("self_cpu_s")},
        **{"CPU total %": share("cpu_s", cpu_s), "CPU total": time("cpu_s")},
        "CPU time avg": time("cpu_s", per_call=True),
    }
    if device_s:
        columns |= {"Self CUDA": time("self_device_s"), "Self CUDA %": share("self_device_s", device_s)}
        columns |= {"CUDA total": time("device_s"), "CUDA time avg": time("device_s", per_call=True)}
    if any(row.cpu_bytes for row in rows):
        columns |= {"CPU Mem": memory("cpu_bytes"), "Self CPU Mem": memory("self_cpu_bytes")}
    if any(row.device_bytes for row in rows):
        columns |= {"CUDA Mem": memory("device_bytes"), "Self CUDA Mem": memory("self_device_bytes")}
    columns["# of Calls"] = "count"
    ordered = sorted(rows, key=lambda row: -(row.cpu_s if sort_by == "cpu" else row.device_s))
    return records_table(title, ordered[:limit], columns)

"""What single analyses of traces found, as tables: critical path, memory, launches, rates, bandwidths."""

from __future__ import annotations

from collections.abc import Sequence

from meshwise.core.units import duration
from meshwise.report.table import Fields, Table, cell_text, records_table, short
from meshwise.trace.bandwidths import Bandwidth
from meshwise.trace.critical_path import CriticalPath
from meshwise.trace.launches import StreamLaunches
from meshwise.trace.memory import MemoryPeak
from meshwise.trace.op_rates import OpRate

_NUM_HOLDERS = 8


def path_tables(found: CriticalPath, *, limit: int) -> list[Table]:
    """What the path consists of, and what would shorten it."""
    columns: Fields = {
        **{"on the path": "kind", "what": "name", "count": "count"},
        **{"time": "seconds", "share": "share_frac"},
        "most on rank": lambda one: max(one.by_rank, key=lambda rank: one.by_rank[rank]),
    }
    title = f"The critical path through all ranks: {duration(found.span_s)}"
    shown = [records_table(title, found.pieces[:limit], columns, left=("on the path", "what"))]
    changes: Fields = {"change": "change", "then takes": "span_s", "gain": "gain_s", "of all": "gain_frac"}
    return shown + [records_table("What if", found.what_if[:limit], changes)] * bool(found.what_if)


def memory_tables(found: Sequence[MemoryPeak], *, limit: int) -> list[Table]:
    """The peaks of all ranks, and what was held at the largest."""
    columns: Fields = {
        **{"rank": "rank", "of": "device", "peak": "peak_bytes", "reserved then": "reserved_bytes"},
        **{"from before": "held_before_bytes", "after": "time_s", "in": "operator"},
    }
    shown = [records_table("Memory at its peak", found[:limit], columns, left=("rank", "of", "in"))]
    if found:
        most = max(found, key=lambda one: one.peak_bytes)
        title = f"Held at the largest peak (rank {most.rank}, {most.device})"
        holders: Fields = {
            "allocated by": "name",
            "tensors": "count",
            "bytes": "bytes",
        }
        shown.append(records_table(title, most.holders[:_NUM_HOLDERS], holders))
    return shown


def launch_tables(found: Sequence[StreamLaunches], *, limit: int) -> list[Table]:
    """Delays and queues of each stream."""
    columns: Fields = {
        **{"rank": "rank", "stream": "stream", "launches": "count", "median delay": "median_delay_s"},
        **{
            "90 % delay": "p90_delay_s",
            "longest": "max_delay_s",
            "mean queue": lambda one: f"{one.mean_queue:.1f}",
        },
        **{"longest queue": "max_queue", "queue empty": "empty_frac"},
    }
    return [records_table("From launch to start, and the queue", found[:limit], columns)]


def rate_tables(found: Sequence[OpRate], *, limit: int) -> list[Table]:
    """What operators reach."""
    columns: Fields = {
        "operator": lambda one: short(one.op.removeprefix("aten::"), 24),
        "shape": lambda one: short(one.shape, 32),
        **{"dtype": "dtype", "calls": "count", "median": "median_s"},
        "FLOP/s": lambda one: cell_text("flop_per_s", one.flop_per_s) if one.flop else "",
        **{"bytes/s": "bytes_per_s", "of the roof": "roof_frac"},
    }
    return [records_table("Operators of known work", found[:limit], columns, left=tuple(columns)[:3])]


def bandwidth_tables(found: Sequence[Bandwidth], *, limit: int) -> list[Table]:
    """What collectives reach."""
    columns: Fields = {
        **{"collective": "name", "group": "group", "bytes": "bytes"},
        **{
            "calls": "count",
            "wire": "wire_s",
            "algorithm": "algorithm_bytes_per_s",
            "bus": "bus_bytes_per_s",
        },
        **{"link": "link", "of it": "link_frac", "predicted": "predicted_s"},
    }
    return [records_table("Collectives on the wire", found[:limit], columns, left=("collective", "group"))]

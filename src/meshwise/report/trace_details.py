"""What single analyses of traces found, as tables: critical path, memory, launches, rates, bandwidths."""

from __future__ import annotations

from collections.abc import Sequence

from meshwise.core.units import duration, with_prefix
from meshwise.report.table import Table, percent
from meshwise.trace.bandwidths import Bandwidth
from meshwise.trace.critical_path import CriticalPath
from meshwise.trace.launches import StreamLaunches
from meshwise.trace.memory import MemoryPeak
from meshwise.trace.op_rates import OpRate

_NAME_WIDTH = 60
_NUM_HOLDERS = 8


def path_tables(found: CriticalPath, *, limit: int) -> list[Table]:
    """What the path consists of, and what would shorten it."""
    pieces = [
        (
            *(one.kind, short(one.name), one.count, duration(one.seconds), percent(one.share_frac)),
            max(one.by_rank, key=lambda rank: one.by_rank[rank]),
        )
        for one in found.pieces[:limit]
    ]
    columns = ("on the path", "what", "count", "time", "share", "most on rank")
    title = f"The critical path through all ranks: {duration(found.span_s)}"
    shown = [Table(title, columns, pieces, left=columns[:2], no_wrap=True)]
    changes = [
        (one.change, duration(one.span_s), duration(one.gain_s), percent(one.gain_frac))
        for one in found.what_if[:limit]
    ]
    if changes:
        shown.append(Table("What if", ("change", "then takes", "gain", "of all"), changes, no_wrap=True))
    return shown


def memory_tables(found: Sequence[MemoryPeak], *, limit: int) -> list[Table]:
    """The peaks of all ranks, and what was held at the largest."""
    rows = [
        (
            *(one.rank, one.device, _size(one.peak_bytes), _size(one.reserved_bytes)),
            *(_size(one.held_before_bytes), duration(one.time_s), short(one.operator)),
        )
        for one in found[:limit]
    ]
    columns = ("rank", "of", "peak", "reserved then", "from before", "after", "in")
    shown = [Table("Memory at its peak", columns, rows, left=("rank", "of", "in"), no_wrap=True)]
    if found:
        most = max(found, key=lambda one: one.peak_bytes)
        holders = [(short(one.name), one.count, _size(one.bytes)) for one in most.holders[:_NUM_HOLDERS]]
        title = f"Held at the largest peak (rank {most.rank}, {most.device})"
        shown.append(Table(title, ("allocated by", "tensors", "bytes"), holders, no_wrap=True))
    return shown


def launch_tables(found: Sequence[StreamLaunches], *, limit: int) -> list[Table]:
    """Delays and queues of each stream."""
    rows = [
        (
            *(one.rank, one.stream, one.count),
            *map(duration, (one.median_delay_s, one.p90_delay_s, one.max_delay_s)),
            *(f"{one.mean_queue:.1f}", one.max_queue, percent(one.empty_frac)),
        )
        for one in found[:limit]
    ]
    delays = ("median delay", "90 % delay", "longest")
    columns = ("rank", "stream", "launches", *delays, "mean queue", "longest queue", "queue empty")
    return [Table("From launch to start, and the queue", columns, rows, no_wrap=True)]


def rate_tables(found: Sequence[OpRate], *, limit: int) -> list[Table]:
    """What operators reach."""
    rows = [
        (
            *(short(one.op.removeprefix("aten::"), 24), short(one.shape, 32), one.dtype, one.count),
            duration(one.median_s),
            *(with_prefix(one.flop_per_s, "FLOP/s") if one.flop else "", with_prefix(one.bytes_per_s, "B/s")),
            percent(one.roof_frac),
        )
        for one in found[:limit]
    ]
    columns = ("operator", "shape", "dtype", "calls", "median", "FLOP/s", "bytes/s", "of the roof")
    return [Table("Operators of known work", columns, rows, left=columns[:3], no_wrap=True)]


def bandwidth_tables(found: Sequence[Bandwidth], *, limit: int) -> list[Table]:
    """What collectives reach."""
    rows = [
        (
            *(one.name, one.group, _size(one.bytes), one.count, duration(one.wire_s)),
            with_prefix(one.algorithm_bytes_per_s, "B/s"),
            *("" if one.bus_bytes_per_s is None else with_prefix(one.bus_bytes_per_s, "B/s"), one.link),
            *(percent(one.link_frac), "" if one.predicted_s is None else duration(one.predicted_s)),
        )
        for one in found[:limit]
    ]
    columns = (
        "collective",
        "group",
        "bytes",
        "calls",
        "wire",
        "algorithm",
        "bus",
        "link",
        "of it",
        "predicted",
    )
    return [Table("Collectives on the wire", columns, rows, left=columns[:2], no_wrap=True)]


def short(name: str, width: int = _NAME_WIDTH) -> str:
    """A name cut to a width that tables bear."""
    return name if len(name) <= width else name[: width - 1] + "…"


def _size(size_bytes: float | None) -> str:
    return "" if size_bytes is None else with_prefix(size_bytes, "B")

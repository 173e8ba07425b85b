"""Profiles as a ledger: operators, kernels and collectives of all ranks, in the columns of every instrument.

Rows are groups of equal calls: same rank, section, operator, phase and shape. `time_s` is the mean self
time of one call on the CPU, `compute_s` (or `memory_s`) that of a kernel; a collective is a row of
its own, with its payload, `comm_s` on the wire and `exposed_s` what waiting adds to that. Only what a
profiler sees is filled in: no FLOP, no bytes read.

For what no verb answers there is SQL over what is known of a job: events, calls, steps, kernels and ranks.
Polars runs it over the columns that are kept beside the traces (see `columns`): it reads the columns that a
query names and no others, so neither a server nor another dependency is needed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwise.core.columns import distinct_columns
from meshwise.core.errors import DataError
from meshwise.core.extras import import_extra
from meshwise.core.ledger import COLLECTIVES, Ledger
from meshwise.cost.collective import sent_bytes
from meshwise.trace.breakdown import Breakdown
from meshwise.trace.collectives import Collective
from meshwise.trace.columns import Traces
from meshwise.trace.events import DEVICE_KINDS, NAMES, Ints, Kind, Trace
from meshwise.trace.nesting import launchers, nearest, parents
from meshwise.trace.operators import self_time
from meshwise.trace.read import captures_in, kept_traces
from meshwise.trace.summary import Summary, summarize_kept

if TYPE_CHECKING:
    import polars

_BACKWARD = "autograd::engine::"
_TIMES = {Kind.COMPUTE: "compute_s", Kind.MEMORY: "memory_s", Kind.COMMUNICATION: "comm_s"}


def profile_ledger(summary: Summary) -> Ledger:
    """The ledger (origin `profile`) of all ranks of a summary."""
    rows = [row for trace in summary.traces for row in _operator_rows(trace)]
    rows += [row for one in summary.collectives for row in _collective_rows(one)]
    return Ledger.from_rows({"origin": "profile"} | row for row in rows)


def _collective_rows(one: Collective) -> Iterator[dict[str, Any]]:
    """One row for each rank of a collective."""
    name, size = one.name if one.name in COLLECTIVES else "", one.group_size or one.num_ranks
    closed = name not in ("", "send", "recv") and one.bytes
    sent = float(sent_bytes(name, one.bytes, float(size))) if closed else None  # type: ignore[arg-type]
    call = {"op": one.name, "phase": "step", "dtype": one.dtype, "collective": name, "axis": one.group}
    moved = {"group_size": size, "payload_bytes": one.bytes, "sent_bytes": sent, "comm_s": one.wire_s}
    for rank, wait in one.wait_s.items():
        times = {"exposed_s": wait, "time_s": one.wire_s + wait, "start_s": one.enter_s[rank]}
        yield call | moved | times | {"rank": rank}


def _operator_rows(trace: Trace) -> Iterator[dict[str, Any]]:
    """Operators and kernels of one rank, equal calls together, in the order of their first call."""
    parent, kind = parents(trace), trace.kind
    is_device = np.isin(kind, DEVICE_KINDS)
    events = np.flatnonzero(is_device | (kind == Kind.CPU_OP))
    around = np.where(is_device, launchers(trace), parent)[events]
    section, paths = _sections(trace, parent)
    engine = trace.named(lambda name: name.startswith(_BACKWARD))
    backward = nearest(parent, engine) >= 0
    inside = around >= 0
    first_shape = np.where(is_device, -1, trace.shape)[events]
    sections = np.where(inside, section[around], 0)
    columns = sections, trace.label[events], inside & backward[around], first_shape
    first, alike = distinct_columns(np.stack(columns).astype(np.float64))
    spent = np.where(is_device, trace.duration_ns, self_time(trace))[events]
    count, total_ns = np.bincount(alike), np.bincount(alike, weights=spent)
    for row in np.argsort(first).tolist():
        at = first[row]
        path, label, is_backward, shape = (int(column[at]) for column in columns)
        text, dtype = _shape(trace, shape)
        seconds = float(total_ns[row] / count[row]) / 1e9
        times = {_TIMES[of]: seconds for of in (Kind(trace.label_kind[label]),) if of in _TIMES}
        yield times | {
            **{"rank": trace.rank, "module": paths[path], "op": trace.labels[label][1], "shape": text},
            **{"phase": "backward" if is_backward else "forward", "dtype": dtype, "count": int(count[row])},
            **{"time_s": seconds, "start_s": int(trace.start_ns[events[at]] - trace.start_ns[0]) / 1e9},
        }


def _sections(trace: Trace, parent: Ints) -> tuple[Ints, list[str]]:
    """For every event the path of sections that it stands in or is, as its place in a list of them."""
    numbers, texts = {"": 0}, [""]
    number = np.zeros(len(trace) + 1, dtype=np.int64)
    around = nearest(parent, trace.kind == Kind.ANNOTATION)
    for event in trace.where(Kind.ANNOTATION).tolist():
        up = int(around[parent[event]]) if parent[event] >= 0 else -1
        path = f"{texts[number[up]]}/{trace.name(event)}".strip("/")
        number[event] = numbers.setdefault(path, len(numbers))
        texts += [path] * (len(numbers) > len(texts))
    return number[around], texts


def _shape(trace: Trace, shape: int) -> tuple[str, str]:
    """The first tensor an operator took: its shape and dtype; the rest is in the trace."""
    dims, dtype = next(((dims, dtype) for dims, dtype in trace.tensors(shape) if dims), ([], ""))
    return "x".join(map(str, dims)) if math.prod(dims) else "", dtype


# --- SQL ------------------------------------------------------------------------------------------

EVENT_COLUMNS: list[str] = NAMES["event_columns"]
"""`start_s` is on the common clock, from the job's beginning; `start_ns` on the rank's own."""
CALL_COLUMNS = ("name", "group", "group_size", "index", "step", "bytes", "dtype", "wire_s", "last_rank")
STEP_COLUMNS = ("step", *(field.name for field in dataclasses.fields(Breakdown)), "part", "num_work")


def query(paths: Iterable[str | Path], sql: str) -> polars.DataFrame:
    """The rows that `sql` selects from the tables events, collectives, steps, kernels and ranks.

    Of collectives, a row is one rank in one call; of steps, one step of one rank. DataError for SQL that is
    not understood, MissingExtraError without polars.
    """
    pl = import_extra("polars", "frames")
    traces, problems = kept_traces(captures_in(paths))
    summary = summarize_kept(traces, problems)
    summary.check_readable()
    context = pl.SQLContext(
        events=_events(pl, traces, summary),
        collectives=_table(pl, _calls(summary), (*CALL_COLUMNS, "rank", "enter_s", "wait_s")),
        steps=_table(pl, map(_flat, summary.steps), STEP_COLUMNS),
        kernels=pl.LazyFrame(summary.kernels),
        ranks=_table(pl, summary.rank_rows()),
    )
    try:
        return context.execute(sql).collect(engine="streaming")
    except pl.exceptions.PolarsError as error:
        reason = " ".join(str(error).split("Resolved plan")[0].split())
        tables = "tables are events, collectives, steps, kernels, ranks"
        raise DataError(f"the query cannot be answered: {reason[:300]}; {tables}") from None


def _table(pl: Any, rows: Iterable[dict[str, Any]], columns: Iterable[str] = ()) -> Any:
    """`rows` as a table, which has its `columns` where there are none."""
    return pl.LazyFrame([*rows] or {name: [] for name in columns}, infer_schema_length=None)


def _events(pl: Any, traces: Traces, summary: Summary) -> Any:
    offsets = summary.alignment.offsets_ns
    frames = [
        pl.scan_parquet(one.file).with_columns(
            pl.col("stream", "device", "correlation", "external_id", "size_bytes").replace(-1, None),
            pl.lit(one.rank).alias("rank"),
            ((pl.col("start_ns") - offsets[one.rank] - summary.origin_ns) / 1e9).alias("start_s"),
            (pl.col("duration_ns") / 1e9).alias("duration_s"),
        )
        for one in traces.of_rank
    ]
    return pl.concat(frames).select(EVENT_COLUMNS)


def _calls(summary: Summary) -> Iterator[dict[str, Any]]:
    for one in summary.collectives:
        call = {name: getattr(one, name) for name in CALL_COLUMNS}
        for rank, wait_s in one.wait_s.items():
            yield call | {"rank": rank, "enter_s": one.enter_s[rank], "wait_s": wait_s}


def _flat(step: Any) -> dict[str, Any]:
    row = dataclasses.asdict(step)
    return {"step": row.pop("number")} | row.pop("breakdown") | row

"""SQL over what is known of a job, for what no verb answers: events, calls, steps, kernels and ranks.

Polars runs it over the columns that are kept beside the traces (see `columns`): it reads the columns that a
query names and no others, so neither a server nor another dependency is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.core.errors import DataError
from meshwise.trace.columns import Traces, polars_module
from meshwise.trace.read import captures_in, kept_traces
from meshwise.trace.summary import Summary, summarize_kept

if TYPE_CHECKING:
    import polars

EVENT_COLUMNS = (
    *("rank", "name", "category", "kind", "thread", "start_s", "duration_s", "stream", "device"),
    *("correlation", "external_id", "size_bytes", "dims", "start_ns", "duration_ns"),
)
"""`start_s` is on the common clock, from the job's beginning; `start_ns` on the rank's own."""


def query(paths: Iterable[str | Path], sql: str) -> polars.DataFrame:
    """The rows that `sql` selects from the tables events, collectives, steps, kernels and ranks.

    Of collectives, a row is one rank in one call; of steps, one step of one rank. DataError for SQL that is
    not understood, MissingExtraError without polars.
    """
    pl = polars_module()
    traces, problems = kept_traces(captures_in(paths))
    summary = summarize_kept(traces, problems)
    summary.check_readable()
    context = pl.SQLContext(
        events=_events(pl, traces, summary),
        collectives=pl.LazyFrame(_calls(summary), infer_schema_length=None),
        steps=pl.LazyFrame([_flat(one) for one in summary.steps], infer_schema_length=None),
        kernels=pl.LazyFrame(summary.kernels),
        ranks=pl.LazyFrame(summary.to_json()["ranks"], infer_schema_length=None),
    )
    try:
        return context.execute(sql).collect(engine="streaming")
    except pl.exceptions.PolarsError as error:
        reason = " ".join(str(error).split())
        tables = "tables are events, collectives, steps, kernels, ranks"
        raise DataError(f"the query cannot be answered: {reason[:300]}; {tables}") from None


def _events(pl: Any, traces: Traces, summary: Summary) -> Any:
    offsets = summary.alignment.offsets_ns
    frames = [
        pl.scan_parquet(one.file).with_columns(
            pl.lit(one.rank).alias("rank"),
            ((pl.col("start_ns") - offsets[one.rank] - summary.origin_ns) / 1e9).alias("start_s"),
            (pl.col("duration_ns") / 1e9).alias("duration_s"),
        )
        for one in traces.of_rank
    ]
    return pl.concat(frames).select(EVENT_COLUMNS)


def _calls(summary: Summary) -> list[dict[str, Any]]:
    names = ("name", "group", "group_size", "index", "step", "bytes", "dtype", "wire_s", "last_rank")
    rows = []
    for one in summary.collectives:
        call = {name: getattr(one, name) for name in names}
        times = ((rank, one.enter_s[rank], wait_s) for rank, wait_s in one.wait_s.items())
        rows += [call | {"rank": rank, "enter_s": at, "wait_s": wait_s} for rank, at, wait_s in times]
    return rows


def _flat(step: Any) -> dict[str, Any]:
    row = dataclasses.asdict(step)
    return {"step": row.pop("number")} | row.pop("breakdown") | row

"""Runs one program under all instruments and holds their ledgers against each other.

A program's closed form and its dry run count work, and know no machine. For a cluster each of their rows gets
the roofline of the chip, or the time of its collective on the links, with ranks that lie next to each other:

    time = max(flop / peak, bytes / memory bandwidth)

So it is the least that the data sheet allows: `estimate` prices kernels by what they reach, too. Matmuls and
attention, which a shape of four and of seven dims tells, run on the matrix units.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshwise.core.compare import OPS_BY_DIMS, TOTALS, WORK, Comparison, compare, totals_of, work_of
from meshwise.core.ledger import Ledger
from meshwise.estimate.timing import machine
from meshwise.machine.hardware import Chip, Cluster
from meshwise.machine.overheads import NONE
from meshwise.program.tape import Tape
from meshwise.runtime.dry_run import dry_run
from meshwise.runtime.launch import launch
from meshwise.runtime.programs import Program
from meshwise.runtime.start import run_rank


def compare_program(
    program: Program,
    options: Any,
    *,
    ranks: int,
    rank: int = 0,
    with_run: bool = True,
    port: int = 0,
    cluster: Cluster | None = None,
) -> Comparison:
    """Estimate, dry run and (`with_run`) real CPU run of `program` on rank `rank`, number by number.

    A machine's own additions (allocator, workspace) stay out: a CPU has none. With a `cluster`, seconds at
    the rates of its data sheet stand beside those of the run.
    """
    dry = dry_run(program.name, options, ranks=ranks, rank=rank, device="cpu").ledger
    tape = Tape("estimate", rank, ranks)
    program.estimate(options, tape)
    partial = ("estimate",) if tape.is_partial else ()
    ledgers = {"estimate": tape.ledger(), "dry_run": dry}
    if cluster is not None:
        ledgers = {name: with_times(ledger, cluster) for name, ledger in ledgers.items()}
    if with_run:
        outcomes = launch(run_rank, ranks, program.name, options, rank, True, port=port)
        assert outcomes is not None
        ledgers["run"] = outcomes[rank].ledger
    timed = cluster is not None
    if program.states != "all":
        part_of, columns = {"work": (work_of, WORK), "totals": (totals_of, TOTALS)}[program.states]
        return compare({name: part_of(ledger) for name, ledger in ledgers.items()}, columns, timed=timed)
    peaks = {name: float(np.nanmax(ledger["peak_bytes"])) for name, ledger in ledgers.items()}
    return compare(ledgers, partial=partial, timed=timed, peaks=peaks if partial else None)


def with_times(ledger: Ledger, cluster: Cluster) -> Ledger:
    """`ledger` with `time_s` as `cluster` allows; ClusterError for a dtype that its chip lacks."""
    links = machine(cluster, "fp32", overheads=NONE)

    def time_s(row: Mapping[str, Any]) -> float:
        if row["collective"]:
            size, payload = row["group_size"] or 2.0, row["payload_bytes"] or 0.0
            return float(links.collective_s(row["collective"], payload, size, 1.0))
        return _roofline_s(row, cluster.chip)

    return Ledger.from_rows(row | {"time_s": time_s(row)} for row in ledger.rows())


def _roofline_s(row: Mapping[str, Any], chip: Chip) -> float:
    flop, moved_bytes = row["flop"] or 0.0, (row["read_bytes"] or 0.0) + (row["write_bytes"] or 0.0)
    is_matrix = row["shape"].count("x") + 1 in OPS_BY_DIMS
    peak = chip.matrix_peak if is_matrix else chip.vector_peak
    return max(flop / peak(row["dtype"] or "fp32") if flop else 0.0, moved_bytes / chip.memory_bytes_per_s)

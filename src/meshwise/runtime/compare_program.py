"""Runs one program under all instruments and holds their ledgers against each other.

A program's closed form and its dry run count work, and know no machine. For a cluster each of their rows gets
the time that it takes there alone (`meshwise.runtime.step_time`).
"""

from typing import Any

import numpy as np

from meshwise.core.compare import TOTALS, WORK, Comparison, compare, totals_of, work_of
from meshwise.machine.hardware import Cluster
from meshwise.program.tape import Tape
from meshwise.runtime.dry_run import dry_run
from meshwise.runtime.launch import launch
from meshwise.runtime.programs import Program
from meshwise.runtime.start import run_rank
from meshwise.runtime.step_time import row_seconds


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

    A machine's own additions (allocator, workspace) stay out: a CPU has none. With a `cluster`, seconds as
    priced there stand beside those of the run.
    """
    dry = dry_run(program.name, options, ranks=ranks, rank=rank, device="cpu").ledger
    tape = Tape("estimate", rank, ranks)
    program.estimate(options, tape)
    partial = ("estimate",) if tape.is_partial else ()
    ledgers = {"estimate": tape.ledger(), "dry_run": dry}
    if cluster is not None:
        ledgers = {name: row_seconds(ledger, cluster) for name, ledger in ledgers.items()}
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

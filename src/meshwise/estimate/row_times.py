"""Seconds of counted ops on a cluster, by their FLOP, bytes and payload.

A program's closed form and its dry run count work, and know no machine. Here each row gets the roofline of
the chip, or the time of its collective on the links, with ranks that lie next to each other:

    time = max(flop / peak, bytes / memory bandwidth)

So it is the least that the data sheet allows: `estimate` prices kernels by what they reach, too.

Matmuls and attention, which a shape of four and of seven dims tells, run on the matrix units.
"""

from collections.abc import Mapping
from typing import Any

from meshwise.core.compare import OPS_BY_DIMS
from meshwise.core.ledger import Ledger
from meshwise.estimate.timing import machine
from meshwise.machine.hardware import Chip, Cluster
from meshwise.machine.overheads import NONE


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

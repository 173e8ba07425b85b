"""What collectives reach on the wire: algorithm and bus bandwidth by kind, group and size, against the links.

    algorithm bandwidth    bytes of the full tensor / seconds on the wire
    bus bandwidth          bytes that leave a rank / seconds on the wire (as in nccl-tests)

Seconds on the wire are without the waiting for the last rank (see `collectives`), the median over the calls.
The link is that of the cluster's innermost level that joins the whole group; `predicted_s` is what the cost
model gives for the same call on that cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from meshwise.core.ledger import COLLECTIVES
from meshwise.core.ledger import Collective as Kind
from meshwise.estimate.timing import machine
from meshwise.machine.hardware import Cluster
from meshwise.machine.overheads import NONE
from meshwise.trace.collectives import Collective
from meshwise.trace.events import grouped


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """All calls of one collective in one group on one size."""

    name: str
    group: str
    group_size: int | None
    bytes: float
    count: int
    wire_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float | None
    link: str = ""
    link_frac: float | None = None
    predicted_s: float | None = None


def bandwidths(found: Sequence[Collective], cluster: Cluster | None = None) -> list[Bandwidth]:
    """One row for each kind, group and size that several ranks recorded, the longest in sum first."""
    known = [one for one in found if one.bytes and one.wire_s and one.num_ranks > 1]
    calls = grouped(((one.name, one.group, one.bytes), one) for one in known)
    ordered = sorted(calls.values(), key=lambda same: -sum(one.wire_s for one in same))
    return [_row(same, cluster) for same in ordered]


def _row(calls: Sequence[Collective], cluster: Cluster | None) -> Bandwidth:
    one, wire_s = calls[0], float(np.median([call.wire_s for call in calls]))
    speeds = [call.sent_bytes_per_s for call in calls if call.sent_bytes_per_s]
    bus, size = float(np.median(speeds)) if speeds else None, one.bytes or 0.0
    link, frac, predicted_s = "", None, None
    if cluster is not None and bus:
        ranks = sorted(one.wait_s)
        level = next(level for level in cluster.levels if ranks[0] // level.ranks == ranks[-1] // level.ranks)
        link, frac = level.name, bus / level.bytes_per_s
        kind = "send" if one.name == "send_recv" else one.name
        if kind in COLLECTIVES:
            predicted_s = _predicted_s(cluster, cast(Kind, kind), size, one.group_size or len(ranks), ranks)
    rates = size / wire_s, bus, link, frac, predicted_s
    return Bandwidth(one.name, one.group, one.group_size, size, len(calls), wire_s, *rates)


def _predicted_s(cluster: Cluster, kind: Kind, size: float, num_ranks: int, ranks: Sequence[int]) -> float:
    of = machine(cluster, "fp32", overheads=NONE)
    return float(of.collective_s(kind, size, num_ranks, float(ranks[1] - ranks[0])))

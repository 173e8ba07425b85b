"""What one collective takes on a cluster, by size: time, the algorithm that is fastest, bus bandwidth.

Bus bandwidth is what nccl-tests prints: the bytes that a rank must send for the collective
(`cost.collective.sent_bytes`) over its time. Its ceiling is that of a ring (of direct
copies for an all-to-all or a message) with every link at the rate of its data sheet; a switch that adds may
exceed it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwise.core.errors import ClusterError, WorkloadError
from meshwise.core.ledger import COLLECTIVES
from meshwise.core.notebook import Shown
from meshwise.core.refusals import refuse
from meshwise.cost.collective import sent_bytes
from meshwise.estimate.timing import is_measured, machine
from meshwise.machine.efficiency import LINK_CONSTANTS, inherited_notes
from meshwise.machine.hardware import Cluster, MeasuredCollective
from meshwise.machine.overheads import NONE

KINDS = {str(kind): kind for kind in COLLECTIVES if kind not in ("dispatch", "recv")}
SIZES_BYTES = tuple(float(4**power) for power in range(5, 18))
"""1 KiB to 16 GiB."""


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """One collective of `payload_bytes`, the full tensor, and the algorithm that is fastest.

    `bus_bytes_per_s` is its bus bandwidth, `ceiling_bytes_per_s` what the links allow.
    """

    payload_bytes: float
    time_s: float
    algorithm: str
    bus_bytes_per_s: float
    ceiling_bytes_per_s: float


@dataclass(frozen=True, slots=True, repr=False)
class CollectiveTimes(Shown):
    """One collective of `ranks` at several sizes: `predicted`, and measured seconds by size (`measured_s`).

    It unpacks into the last two.
    """

    predicted: list[CollectiveTime]
    measured_s: dict[float, float]
    ranks: int
    notes: list[str]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.predicted, self.measured_s))

    def __getitem__(self, place: int) -> Any:
        return (self.predicted, self.measured_s)[place]

    def to_json(self) -> dict[str, Any]:
        """A row a size; `measured_s` is None where nothing was measured."""
        return {
            "ranks": self.ranks,
            "notes": self.notes,
            "rows": [
                asdict(one) | {"measured_s": self.measured_s.get(one.payload_bytes)} for one in self.predicted
            ],
        }


def group_size(kind: str, cluster: Cluster, ranks: int | None, stride: int) -> int:
    """The ranks of a group for a collective; None: as many as the cluster has at this stride, two of a send.

    Raises:
        WorkloadError: an unknown kind, a stride below 1.
        ClusterError: fewer than two ranks, or more than the cluster has at this stride.
    """
    refuse("collective", WorkloadError, kind=kind, kinds=KINDS, known=", ".join(KINDS), stride=stride)
    most = cluster.num_chips // stride
    size = (min(most, 2) if kind == "send" else most) if ranks is None else ranks
    refuse("group of ranks", ClusterError, kind=kind, size=size, stride=stride, most=most, cluster=cluster)
    return size


def collective_times(
    kind: str, cluster: Cluster, sizes_bytes: Sequence[float], *, ranks: int, stride: int = 1
) -> list[CollectiveTime]:
    """The times of one collective among `ranks` ranks placed `stride` apart (`group_size`).

    WorkloadError for a size that is not above zero.
    """
    for size in sizes_bytes:
        refuse("collective of a size", WorkloadError, size=size)
    runs_on = machine(cluster, "fp32", overheads=NONE)
    lines = runs_on.collective_lines(kind, float(ranks), float(stride))
    ideal = machine(cluster, "fp32", ideal=True).collective_lines(kind, float(ranks), float(stride))
    sent = float(sent_bytes(KINDS[kind], 1.0, ranks))
    ceiling = sent / min(float(line.s_per_byte) for line in ideal)
    known = [one.sizes_bytes for one in measured_of(kind, cluster, ranks, stride)]
    times = []
    for size in sizes_bytes:
        time_s, fastest = min(
            (float(line.delay_s + size * line.s_per_byte), line.algorithm) for line in lines
        )
        taken_s = float(runs_on.collective_s(kind, size, float(ranks), float(stride)))
        if taken_s != time_s:
            is_between = any(sizes[0] <= size <= sizes[-1] for sizes in known)
            fastest = "measured" if is_between else "extrapolated"
        times.append(CollectiveTime(size, taken_s, fastest, sent * size / taken_s, ceiling))
    return times


def notes(kind: str, cluster: Cluster, ranks: int, stride: int) -> list[str]:
    """What the times of such a group rest on: constants of other chips and networks, and measured ones."""
    runs_on = machine(cluster, "fp32", overheads=NONE)
    used = LINK_CONSTANTS if runs_on.leaves_node(float(ranks), float(stride)) else LINK_CONSTANTS[:-1]
    measured = map(str, measured_of(kind, cluster, ranks, stride))
    return [*inherited_notes(cluster.chip, runs_on.efficiency.inherited({*used})), *measured]


def measured_of(kind: str, cluster: Cluster, ranks: int, stride: int) -> list[MeasuredCollective]:
    """What was measured on `cluster` of such a group."""
    return [known for known in cluster.collectives if is_measured(known, kind, ranks, stride)]

"""Measured times of collectives: to stand beside predictions, or in their place.

Two kinds of file are read, told apart by their content: tables of ops (docs/data.md), and what nccl-tests
prints, one test or several in turn. The latter says which collective it is in its header, or else by the name
of the file (`all_reduce_perf.txt`); it names the host of every rank, and so how many share a node. Where it
splits the ranks into groups that run at once, those of the first count. An engine's own all-reduce is one of
the ops; of its rows those count that a CUDA graph replays, as engines do.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from meshwise.calibrate.microdata import NAMES, Measurement, read
from meshwise.core.errors import DataError
from meshwise.core.files import read_text
from meshwise.core.refusals import refuse
from meshwise.cost.collective import members
from meshwise.machine.efficiency import network
from meshwise.machine.hardware import Cluster, MeasuredCollective, find_chip

_KINDS: dict[str, str] = NAMES["nccl_tests"]
"""Collectives by the names of nccl-tests' programs, the longer name first."""

_NCCL_ROW = re.compile(r"\s*(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+([\d.]+)\s")
_NCCL_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+0\s+)?Pid.*\bon\s+(\S+)\s+device")
_NCCL_TEST = re.compile(r"(?m)^(?=.*Collective test starting)")
_LAUNCHER = re.compile(r"(?m)^(?:\[[^\]\n]*\]<\w+>:|\d+:) ?")
"""What `mpirun --tag-output` and `srun --label` write before each line."""

Group = tuple[str, float, float]
"""Kind, ranks, ranks in a node."""
Times = dict[float, list[float]]
"""Seconds by payload [bytes]."""


def with_measured(cluster: Cluster, paths: Iterable[Path]) -> Cluster:
    """`cluster` with the collectives that `paths` measured on its links.

    DataError for a file without any.
    """
    groups = {path: _groups(path, cluster) for path in paths}
    for path, of_file in groups.items():
        refuse("measured collectives", DataError, groups=of_file, path=path, cluster=cluster)
    found = list(cluster.collectives)
    for group in dict.fromkeys(itertools.chain(*groups.values())):
        sizes, seconds = zip(*sorted(_medians(groups.values(), group).items()), strict=True)
        names = ", ".join(path.name for path, of_file in groups.items() if group in of_file)
        found.append(MeasuredCollective(*group, float(cluster.chips_per_host), sizes, seconds, names))
    return replace(cluster, collectives=tuple(found))


def measured_times(
    paths: Iterable[Path], kind: str, cluster: Cluster, ranks: int, stride: int
) -> dict[float, float]:
    """Median measured seconds by payload [bytes] of a group of `ranks` like this one on the cluster's links.

    A group is like this one if as many of its ranks share a node. DataError for a file that is no table of
    ops (docs/data.md).
    """
    inside = float(members(ranks, stride, cluster.chips_per_host))
    return _medians((_groups(path, cluster) for path in paths), (kind, float(ranks), inside))


def _medians(files: Iterable[Mapping[Group, Times]], group: Group) -> dict[float, float]:
    """Median seconds of one group by payload [bytes] over all files."""
    found: Times = defaultdict(list)
    for of_file in files:
        for size, seconds in of_file.get(group, {}).items():
            found[size] += seconds
    return {size: median(seconds) for size, seconds in found.items()}


def measured_ranks(paths: Iterable[Path], kind: str, cluster: Cluster, most: int, stride: int) -> int:
    """The largest group of at most `most` ranks of which `paths` measured a collective; `most` if of none."""
    groups, host_ranks = (group for path in paths for group in _groups(path, cluster)), cluster.chips_per_host
    known = (n for of, n, inside in groups if of == kind and inside == members(n, stride, host_ranks))
    return int(max((ranks for ranks in known if ranks <= most), default=most))


def _groups(path: Path, cluster: Cluster) -> dict[Group, Times]:
    """The times of a file by group and payload [bytes]."""
    found: dict[Group, Times] = defaultdict(lambda: defaultdict(list))
    for group, size, seconds in _times(path, cluster):
        found[group][size].append(seconds)
    return found


def _times(path: Path, cluster: Cluster) -> Iterator[tuple[Group, float, float]]:
    """Group, payload [bytes] and seconds of each measurement of a file on links like those of `cluster`."""
    text = _LAUNCHER.sub("", read_text(path, "CSV"))
    if _NCCL_RANK.search(text) or "," not in text.partition("\n")[0]:
        for test in [part for part in _NCCL_TEST.split(text) if _NCCL_RANK.search(part)] or [text]:
            yield from _of_nccl_test(path, test)
        return
    rows, bad = read(path)
    of_ours = [one for one in bad if not one.op or one.op.startswith(("nccl_", "custom_allreduce"))]
    for reason in (one.reason for one in of_ours if not one.is_sound):
        raise DataError(reason)
    for row, of in ((row, row.shape) for row in rows if row.op in ("collective", "peer_all_reduce")):
        if of.get("graph", 1.0) and _is_like(row, cluster):
            yield (row.variant, of["ranks"], of["ranks_per_node"]), of["bytes"], row.seconds


def _is_like(row: Measurement, cluster: Cluster) -> bool:
    """Whether a collective was measured on the links of `cluster`: those inside a node, and between nodes."""
    inner, own = find_chip(row.chip).levels[0], cluster.levels[0]
    is_inside = row.shape["ranks"] == row.shape["ranks_per_node"]
    same_network = is_inside or row.software in ("", "torch", network(cluster.levels))
    return (inner.name, inner.bytes_per_s) == (own.name, own.bytes_per_s) and same_network


def _of_nccl_test(path: Path, text: str) -> list[tuple[Group, float, float]]:
    """The measurements of one test of nccl-tests, out of place."""
    header = next((line for line in text.splitlines() if "Collective test starting" in line), path.stem)
    kind = next((kind for name, kind in _KINDS.items() if name in header.lower()), "")
    ranks, rows = _NCCL_RANK.findall(text), filter(None, map(_NCCL_ROW.match, text.splitlines()))
    times = [(float(row[1]), float(row[2]) * 1e-6) for row in rows if float(row[1]) and float(row[2])]
    told = {"path": path, "known": ", ".join(_KINDS), "text": text, "is_one": len(dict(ranks)) == len(ranks)}
    refuse("output of nccl-tests", DataError, is_whole=bool(kind and ranks and times), **told)
    group = kind, float(len(ranks)), float(max(Counter(dict(ranks).values()).values()))
    return [(group, *time) for time in times]

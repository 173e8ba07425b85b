"""Measured times of collectives: to stand beside predictions, or in their place.

Two kinds of file are read, told apart by their content: tables of ops (docs/data.md), and what nccl-tests
prints. The latter says which collective it is in its header, or else by the name of the file
(`all_reduce_perf.txt`); it names the host of every rank, and so how many share a node.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median

from meshwise.calibrate.microdata import Measurement, read
from meshwise.core.errors import DataError
from meshwise.core.files import read_catalog, read_text
from meshwise.core.refusals import refuse
from meshwise.cost.collective import members
from meshwise.machine.efficiency import network
from meshwise.machine.hardware import Cluster, MeasuredCollective, find_chip

_KINDS: dict[str, str] = read_catalog("measured_names.toml")["nccl_tests"]
"""Collectives by the names of nccl-tests' programs, the longer name first."""

_NCCL_ROW = re.compile(r"\s*(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+([\d.]+)\s")
_NCCL_RANK = re.compile(r"#\s+Rank\s+\d+.*\bon\s+(\S+)\s+device")

Group = tuple[str, float, float]
"""Kind, ranks, ranks in a node."""
Times = dict[float, list[float]]
"""Seconds by payload [bytes]."""


def with_measured(cluster: Cluster, paths: Iterable[Path]) -> Cluster:
    """`cluster` with the collectives that `paths` measured on its links.

    DataError for a file without any.
    """
    sources: dict[Group, dict[Path, Times]] = defaultdict(dict)
    for path in paths:
        groups = _groups(path, cluster)
        refuse("measured collectives", DataError, groups=groups, path=path, cluster=cluster)
        for group, times in groups.items():
            sources[group][path] = times
    found = list(cluster.collectives)
    for group, of_files in sources.items():
        sizes, seconds = zip(*sorted(_medians(of_files.values()).items()), strict=True)
        names = ", ".join(path.name for path in of_files)
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
    return _medians(_groups(path, cluster).get((kind, float(ranks), inside), {}) for path in paths)


def _medians(files: Iterable[Times]) -> dict[float, float]:
    """Median seconds by payload [bytes] over all files of one group."""
    found: Times = defaultdict(list)
    for times in files:
        for size, seconds in times.items():
            found[size] += seconds
    return {size: median(seconds) for size, seconds in found.items()}


def measured_ranks(paths: Iterable[Path], kind: str, cluster: Cluster, most: int, stride: int) -> int:
    """The largest group of at most `most` ranks of which `paths` measured a collective; `most` if of none."""
    groups = (group for path in paths for group in _groups(path, cluster))
    known = (
        int(ranks)
        for of, ranks, inside in groups
        if of == kind and ranks <= most and inside == members(int(ranks), stride, cluster.chips_per_host)
    )
    return max(known, default=most)


def _groups(path: Path, cluster: Cluster) -> dict[Group, Times]:
    """The times of a file by group and payload [bytes]."""
    found: dict[Group, Times] = defaultdict(lambda: defaultdict(list))
    text = read_text(path, "CSV")
    if "," not in text.partition("\n")[0]:
        group, times = _of_nccl_tests(path, text)
        for size, seconds in times:
            found[group][size].append(seconds)
        return found
    for row in read(path)[0]:
        if row.op == "collective" and _is_like(row, cluster):
            group = row.variant, row.shape["ranks"], row.shape["ranks_per_node"]
            found[group][row.shape["bytes"]].append(row.seconds)
    return found


def _is_like(row: Measurement, cluster: Cluster) -> bool:
    """Whether a collective was measured on the links of `cluster`: those inside a node, and between nodes."""
    inner, own = find_chip(row.chip).levels[0], cluster.levels[0]
    is_inside = row.shape["ranks"] == row.shape["ranks_per_node"]
    same_network = is_inside or row.software in ("", network(cluster.levels))
    return (inner.name, inner.bytes_per_s) == (own.name, own.bytes_per_s) and same_network


def _of_nccl_tests(path: Path, text: str) -> tuple[Group, list[tuple[float, float]]]:
    """The group and the times, out of place, of one output of nccl-tests."""
    header = next((line for line in text.splitlines() if "Collective test starting" in line), path.stem)
    kind = next((kind for name, kind in _KINDS.items() if name in header.lower()), "")
    nodes = Counter(_NCCL_RANK.findall(text))
    times = [(float(row[1]), float(row[2]) * 1e-6) for row in map(_NCCL_ROW.match, text.splitlines()) if row]
    times = [(size, seconds) for size, seconds in times if size and seconds]
    is_whole, known = bool(kind and nodes and times), ", ".join(_KINDS)
    refuse("output of nccl-tests", DataError, is_whole=is_whole, path=path, known=known, text=text)
    return (kind, float(nodes.total()), float(max(nodes.values()))), times

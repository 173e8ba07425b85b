"""Measured times of one collective, to stand beside the predicted ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from meshwise.calibrate.microdata import read
from meshwise.cost.collective import members
from meshwise.machine.hardware import Cluster


def measured_times(
    paths: Iterable[Path], kind: str, cluster: Cluster, ranks: int, stride: int
) -> dict[float, float]:
    """Median measured seconds by payload [bytes] of a group of `ranks` like this one on the cluster's chip.

    A group is like this one if as many of its ranks share a node. DataError for a file that is no table of
    ops (docs/data.md).
    """
    inside = float(members(ranks, stride, cluster.levels[0].ranks))
    found = defaultdict(list)
    for row in read(*paths).rows:
        is_kind = row.op == "collective" and row.variant == kind and row.chip == cluster.chip.name
        if is_kind and (row.shape["ranks"], row.shape["ranks_per_node"]) == (ranks, inside):
            found[row.shape["bytes"]].append(row.seconds)
    return {size: median(seconds) for size, seconds in found.items()}

"""A cluster with something changed: more GPUs, another chip, faster memory, wider domains; or its batch.

Rates and sizes are factors of the cluster's own: `memory=2` doubles what a chip holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwise.core.errors import ClusterError
from meshwise.machine.hardware import Chip, Cluster, Level, find_cluster
from meshwise.plan.fields import Field, number, read_field, whole

KEYS: dict[str, Field] = {
    "chip": Field("a name of the catalog", str, "another chip, with its usual links"),
    "gpus": whole("number of GPUs"),
    "batch": whole("sequences of a step"),
    "domain": whole("ranks of the innermost links (NVLink)"),
    "memory": number("memory of a GPU, times", 0.01, 100),
    "memory_rate": number("bandwidth of the memory, times", 0.01, 100),
    "compute": number("peak of the matrix and vector units, times", 0.01, 100),
    "inner": number("bandwidth of the innermost links, times", 0.01, 100),
    "outer": number("bandwidth of all other links, times", 0.01, 100),
}
"""What can change, in the order in which changes are made."""

Changes = dict[str, str | int | float]


def parse_changes(text: str) -> dict[str, tuple[str | int | float, ...]]:
    """`gpus=64|128,memory=1|2` as the values of each key; ClusterError where it cannot be read."""
    found: dict[str, tuple[str | int | float, ...]] = {}
    for item in filter(None, text.split(",")):
        key, equals, values = (part.strip() for part in item.partition("="))
        if key not in KEYS or not equals or not values:
            known = ", ".join(KEYS)
            raise ClusterError(f"cannot vary {item!r}; write KEY=VALUE|VALUE with a key among {known}")
        found[key] = tuple(read_field(key, value, KEYS, ClusterError) for value in values.split("|"))
    return found


def changed(cluster: Cluster, changes: Changes) -> Cluster:
    """The cluster after all `changes` but that of the batch; ClusterError for an unknown key or chip."""
    unknown = sorted(set(changes) - set(KEYS))
    if unknown:
        raise ClusterError(f"a cluster cannot vary in {unknown[0]!r}; known keys: {', '.join(KEYS)}")
    for key in KEYS:
        if key in changes and key != "batch":
            cluster = _CHANGE[key](cluster, read_field(key, changes[key], KEYS, ClusterError))
    return cluster


def _chip(cluster: Cluster, name: str) -> Cluster:
    return find_cluster(f"{name}:{cluster.num_chips}")


def _gpus(cluster: Cluster, num_chips: int) -> Cluster:
    return replace(cluster, num_chips=num_chips)


def _domain(cluster: Cluster, ranks: int) -> Cluster:
    inner, *others = cluster.levels
    if inner.torus:
        raise ClusterError(
            f"domain={ranks}: {inner.name} is a torus; vary the domain of chips joined by switches"
        )
    wider = [level for level in others if level.ranks > ranks]
    return replace(cluster, levels=(replace(inner, ranks=float(ranks)), *wider)) if wider else cluster


def _compute(chip: Chip, factor: float) -> Chip:
    matrix, vector = (
        {dtype: rate * factor for dtype, rate in rates.items()}
        for rates in (chip.matrix_flop_per_s, chip.vector_flop_per_s)
    )
    return replace(chip, matrix_flop_per_s=matrix, vector_flop_per_s=vector)


def _of_chip(change: Callable[[Chip, float], Chip]) -> Callable[[Cluster, float], Cluster]:
    return lambda cluster, factor: replace(cluster, chip=change(cluster.chip, factor))


def _of_links(is_inner: bool) -> Callable[[Cluster, float], Cluster]:
    def faster(cluster: Cluster, factor: float) -> Cluster:
        def scaled(i: int, level: Level) -> Level:
            return replace(level, bytes_per_s=level.bytes_per_s * (factor if (i == 0) == is_inner else 1.0))

        return replace(cluster, levels=tuple(scaled(i, level) for i, level in enumerate(cluster.levels)))

    return faster


_CHANGE: dict[str, Callable[..., Cluster]] = {
    "chip": _chip,
    "gpus": _gpus,
    "domain": _domain,
    "memory": _of_chip(lambda chip, factor: replace(chip, memory_bytes=chip.memory_bytes * factor)),
    "memory_rate": _of_chip(
        lambda chip, factor: replace(chip, memory_bytes_per_s=chip.memory_bytes_per_s * factor)
    ),
    "compute": _of_chip(_compute),
    "inner": _of_links(is_inner=True),
    "outer": _of_links(is_inner=False),
}

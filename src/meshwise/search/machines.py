"""A cluster with something changed: more GPUs, another chip, faster memory, wider domains; or its batch.

Rates and sizes are factors of the cluster's own: `memory=2` doubles what a chip holds.
"""

from dataclasses import replace
from typing import Any

from meshwise.core.errors import ClusterError
from meshwise.core.units import values_by_key
from meshwise.machine.hardware import Cluster, find_cluster
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

OF_CHIP = {
    "memory": ("memory_bytes",),
    "memory_rate": ("memory_bytes_per_s",),
    "compute": ("matrix_flop_per_s", "vector_flop_per_s"),
}
"""Numbers of a chip that a factor changes, or their values by dtype."""

Changes = dict[str, str | int | float]


def parse_changes(text: str) -> dict[str, tuple[str | int | float, ...]]:
    """`gpus=64|128,memory=1|2` as the values of each key; ClusterError where it cannot be read."""
    found: dict[str, tuple[str | int | float, ...]] = {}
    for key, values in values_by_key(text, "vary", ClusterError).items():
        if key not in KEYS or not values:
            known = ", ".join(KEYS)
            raise ClusterError(f"cannot vary {key!r}; write KEY=VALUE|VALUE with a key among {known}")
        found[key] = tuple(read_field(key, value, KEYS, ClusterError) for value in values.split("|"))
    return found


def changed(cluster: Cluster, changes: Changes) -> Cluster:
    """The cluster after all `changes` but that of the batch; ClusterError for an unknown key or chip."""
    unknown = sorted(set(changes) - set(KEYS))
    if unknown:
        raise ClusterError(f"a cluster cannot vary in {unknown[0]!r}; known keys: {', '.join(KEYS)}")
    for key in (key for key in KEYS if key in changes and key != "batch"):
        cluster = _changed(cluster, key, read_field(key, changes[key], KEYS, ClusterError))
    return cluster


def _changed(cluster: Cluster, key: str, value: Any) -> Cluster:
    inner, *others = cluster.levels
    if key == "chip":
        return find_cluster(f"{value}:{cluster.num_chips}")
    if key == "gpus":
        return replace(cluster, num_chips=value)
    if key == "domain":
        if inner.torus:
            raise ClusterError(f"domain={value}: {inner.name} is a torus; vary the domain of other chips")
        wider = [level for level in others if level.ranks > value]
        return replace(cluster, levels=(replace(inner, ranks=float(value)), *wider)) if wider else cluster
    if key in OF_CHIP:
        scaled = {name: _times(getattr(cluster.chip, name), value) for name in OF_CHIP[key]}
        return replace(cluster, chip=replace(cluster.chip, **scaled))
    levels = list(cluster.levels)
    for place in [0] if key == "inner" else range(1, len(levels)):
        levels[place] = replace(levels[place], bytes_per_s=value * levels[place].bytes_per_s)
    return replace(cluster, levels=tuple(levels))


def _times(rates: Any, factor: float) -> Any:
    """A rate, or the rates of each dtype, times a factor."""
    return (
        {name: factor * rate for name, rate in rates.items()} if isinstance(rates, dict) else factor * rates
    )

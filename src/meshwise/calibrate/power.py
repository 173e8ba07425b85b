"""Measured watts in meshwise's words: of boards that serve, and of nodes at the wall that train.

A row has the columns `COLUMNS`. Of servers
(ml-energy) the workload names model, types, layout and batch: what is predicted is the decode pass of that
batch, in the context of `catalog/power.toml`. Of nodes that train (MLPerf Power) it names a benchmark and
nodes, whose settings stand there too.
"""

import re
from collections.abc import Mapping

from meshwise.core.errors import DataError
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse
from meshwise.estimate.one_plan import Estimate, estimate
from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.plan.plan import parse_plan
from meshwise.plan.workload import Workload

COLUMNS = ("chip", "what", "avg_watts_per_gpu", "avg_watts_per_node", "workload", "source")
"""Columns that every table of watts has."""

NODE = 8
"""Chips of a node that trains."""

_CATALOG = read_catalog("power.toml")
_SERVES = re.compile(
    r"(?:\S+/)?(?P<model>\S+) (?P<dtype>\w+), (?P<task>[\w-]+), (?P<gpus>\d+) GPUs "
    r"tp(?P<tp>\d+) ep(?P<ep>\d+) dp(?P<dp>\d+), .*mean batch (?P<batch>[\d.]+)"
)
_TRAINS = re.compile(r"(?P<benchmark>\w+) on (?P<nodes>\d+)x\S+ \(8 GPUs a node\)")
_WATTS = re.compile(r"\d+(\.\d*)?")
_DTYPES = {"fp8": "dtype=fp8", "mxfp4": "expert_dtype=mxfp4"}


def measured(row: Mapping[str, str]) -> dict[str, float | None]:
    """The watts that a row states, by quantity."""
    found = {"chip_watts": row.get("avg_watts_per_gpu"), "node_watts": row.get("avg_watts_per_node")}
    return {quantity: float(text) for quantity, text in found.items() if text and _WATTS.fullmatch(text)}


def predicted(row: Mapping[str, str]) -> dict[str, float]:
    """The same as predicted; a MeshwiseError says what is not expressed."""
    refuse("measured watts", DataError, row=row, watts=measured(row))
    watts = (_served(row) if row["avg_watts_per_gpu"] else _trained(row)).power_watts
    if watts is None:
        raise DataError(f"column chip: the power limit of {row['chip']} is not published")
    return {"chip_watts": watts["chip"], "node_watts": watts["node"] * NODE}


def _named(pattern: re.Pattern[str], row: Mapping[str, str]) -> dict[str, str]:
    """What the workload of a row names, if it is written as `pattern` has it."""
    found = pattern.match(row["workload"])
    return found.groupdict() if found else {}


def _served(row: Mapping[str, str]) -> Estimate:
    named = _named(_SERVES, row)
    known = _CATALOG["context_tokens"]
    refuse("served watts", DataError, named=named, known=known, tasks=", ".join(known))
    context = known[named["task"]]
    gpus, tp = int(named["gpus"]), int(named["tp"])
    replicas = gpus // tp
    batch = max(-(-round(float(named["batch"])) // replicas), 1) * replicas
    plan = f"tp={tp},ep={named['ep']},{_DTYPES.get(named['dtype'], '')}"
    work = Workload(batch=batch, seq=context, microbatch=batch // replicas, kind="decode")
    return _priced(named["model"], f"{row['chip']}:{gpus}", plan, work)


def _trained(row: Mapping[str, str]) -> Estimate:
    named = _named(_TRAINS, row)
    known = _CATALOG["workloads"].get(named.get("benchmark"), {})
    understood = (f"{name} on {'|'.join(of['nodes'])}" for name, of in _CATALOG["workloads"].items())
    refuse("trained watts", DataError, named=named, known=known, understood=" or ".join(understood))
    nodes = named["nodes"]
    work = Workload(batch=known["batch"][nodes], seq=known["seq"], microbatch=known.get("microbatch", 1))
    plan = f"{known['plan']},{known['nodes'][nodes]}"
    return _priced(known["model"], f"{row['chip']}:{NODE * int(nodes)}", plan, work)


def _priced(model: str, cluster: str, plan: str, work: Workload) -> Estimate:
    return estimate(find_model(model), find_cluster(cluster), parse_plan(plan.strip(",")), work)

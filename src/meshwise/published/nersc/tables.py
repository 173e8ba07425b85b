"""What both published models of NERSC share: the models that they know (GPT and ViT blocks), their tables in
the catalog, and the rows of a ledger that a table gives, whatever its own columns are.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from meshwise.core.files import read_catalog
from meshwise.core.units import Num
from meshwise.published.convention import ANY, Scope

NERSC_TABLES = read_catalog("nersc.toml")
TABLES = ("mlp", "sa")
WAYS = (("fwd", "forward"), ("bwd", "backward"))
"""What the published tables call the two directions, and what a ledger does."""

LedgerRow = dict[str, Any]


def scope(convention: str) -> Scope:
    """The fields of a plan, a workload and a model whose values a convention prices."""
    prices = NERSC_TABLES["prices"]
    tables = {"plan": prices[convention], "workload": prices["workload"], "model": prices["model"]}
    known = {of: table | {key: [ANY] for key in table["any"]} for of, table in tables.items()}
    return Scope(convention=convention, **known)


def work_row(
    flop: Num, traffic_bytes: Num, compute_s: Num, memory_s: Num, time_s: Num, write_bytes: float = math.nan
) -> LedgerRow:
    """The ledger row of an op in one direction; all traffic counts as read where `write_bytes` is NaN."""
    read_bytes = traffic_bytes - (0.0 if math.isnan(write_bytes) else write_bytes)
    times = {"compute_s": compute_s, "memory_s": memory_s, "time_s": time_s}
    return {"flop": flop, "read_bytes": read_bytes, "write_bytes": write_bytes} | times


def comm_row(kind: str, axis: str, ranks: Num, payload_bytes: Num, comm_s: Num, exposed_s: Num) -> LedgerRow:
    """The ledger row of a communication."""
    row: LedgerRow = {"collective": kind, "axis": axis, "group_size": ranks, "payload_bytes": payload_bytes}
    return row | {"comm_s": comm_s, "exposed_s": exposed_s, "time_s": exposed_s}


def op_rows(
    module: str, op: str, phase: str, kept: dict[str, Num], rows: Iterable[LedgerRow]
) -> Iterator[LedgerRow]:
    """`rows` with the columns they share; the first row of the forward also has `kept`, what the op saves."""
    for i, row in enumerate(rows):
        first = kept if phase == "forward" and i == 0 else {}
        yield {"origin": "estimate", "rank": 0.0, "module": module, "op": op, "phase": phase, **row, **first}

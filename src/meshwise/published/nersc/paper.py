"""Convention `nersc-2024-10`: one training iteration as the NERSC paper prices it, row by row.

Time of an op, in one direction: 20 us + FLOP / (80 % of the peak), or its traffic at the full memory
bandwidth, whichever is longer, plus its communication. Reported memory time is what shows behind compute.

Time of a collective of V bytes over n ranks, t of them in each fast domain (links of B_f, hop l_f; else
B_s, l_s), with c = (n-1)/n, or 1 for broadcast, reduce and p2p:

    t = 1        l_s (n-1) + c V / B_s
    t = n        l_f (n-1) + c V / B_f
    else, k = n // t domains   max(c V / (nics t B_s), c V / B_f) + l_s (k-1) + l_f (n-k)

A layer takes F forward and B backward. With L layers a stage, p stages, M microbatches, T(W) the time to
gather (forward) or reduce-scatter (backward) the weights of a layer over the data-parallel group:

    busy = (F + B) M L + 2 M p2p        bubble = (p-1) busy / M
    data parallel = T + (L-1) max(T - F, 0) + T + (L-1) max(T - B, 0)
    iteration = busy + bubble + data parallel

Memory: weights, gradients of the same size, three times both for Adam (sharded over the data-parallel
group, which in 2d-seqp includes the m2 ranks), and the saved activations of min(p, M) microbatches.

Known errors of the paper's code, reproduced: an all-reduce counts twice only in the last case; a pipeline
that shares domains has free links between them; work of the vector units inside fused attention is scaled
up by matrix peak / vector peak, so it is not counted in true FLOP; the p2p volume is the stored input of
`ln1`, whatever its width. Units of rows and totals are the paper's: TFLOP, GB (1e9 bytes), s.

Sources: S. Subramanian et al., arXiv 2410.00273; ShashankSubramanian/transformer-perf-estimates at 54278b0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from meshwise.core.expressions import formulas
from meshwise.core.ledger import Collective
from meshwise.core.units import Num
from meshwise.machine.hardware import Cluster
from meshwise.published.nersc.paper_ops import PaperCut, PaperOp, layer
from meshwise.published.nersc.tables import NERSC_TABLES, TABLES, WAYS

COLUMNS = tuple(NERSC_TABLES["paper"]["columns"])
TFLOP, GB = 1e12, 1e9

Row = dict[str, Any]
_Placed = tuple[Collective, Num, Num, Num]  # kind, bytes, ranks, and ranks in one fast domain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaperSystem:
    """The paper's machine: two peaks, one memory, fast links inside a domain and slow ones between.

    A bandwidth of links is what is left after their efficiency, a latency is that of a hop.
    """

    matrix_flop_per_s: Num
    vector_flop_per_s: Num
    memory_bytes_per_s: Num
    memory_bytes: Num
    fast_bytes_per_s: Num
    fast_latency_s: Num
    slow_bytes_per_s: Num
    slow_latency_s: Num
    nics_per_rank: Num = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaperRun:
    """One iteration: a layer as it is cut, how many, the global batch, and the mesh.

    `inside`: how many members of the axes tp1, tp2, dp and pp share one fast domain.
    """

    cut: PaperCut
    num_layers: Num
    batch: Num
    dp: Num
    pp: Num
    inside: Mapping[str, Num]

    @property
    def num_microbatches(self) -> Num:
        """Microbatches of one data-parallel rank."""
        return self.batch // self.dp // self.cut.microbatch

    @property
    def stage_layers(self) -> Num:
        """Layers of one pipeline stage."""
        return self.num_layers // self.pp

    @property
    def groups(self) -> dict[str, tuple[Num, Num]]:
        """Ranks of an axis, and how many of them share a fast domain; `dp`: those that share weights."""
        inside = self.inside
        tp1, tp2, dp = (self.cut.m1, inside["tp1"]), (self.cut.m2, inside["tp2"]), (self.dp, inside["dp"])
        if self.cut.strategy == "2d-seqp":
            dp = self.dp * self.cut.m2, inside["dp"] * inside["tp2"]
        return {"": (1.0, 1.0), "tp1": tp1, "tp2": tp2, "dp": dp}


@dataclass(frozen=True, slots=True, eq=False)
class Iteration:
    """Rows of `COLUMNS` for each table and for the two other communications, and the paper's totals."""

    tables: dict[str, list[Row]]
    dp_comm: Row
    pp_comm: Row
    totals: dict[str, Num]
    fits: Any


def price(run: PaperRun, system: PaperSystem) -> Iteration:
    """Price one iteration; every number of `run` and `system` may be an array, and they broadcast."""
    tables = {name: [_op_row(op, run, system) for op in ops] for name, ops in layer(run.cut).items()}
    rows = [row for name in TABLES for row in tables[name]]
    p2p_gb = next(row["activation_buffer"] for row in rows if row["name"] == "ln1")
    dp_comm, pp_comm = _dp_row(rows, run, system), _pp_row(p2p_gb, run, system)
    totals = _totals(rows, dp_comm, pp_comm, run)
    return Iteration(tables, dp_comm, pp_comm, totals, totals["mem"] * GB <= system.memory_bytes)


def paper_system(cluster: Cluster) -> PaperSystem:
    """`cluster` as the paper sees it: fp16 peaks, its innermost links fast, its outermost ones slow."""
    chip, shares = cluster.chip, NERSC_TABLES["paper"]["link_efficiency"]
    names = {"chip": chip, "of": shares.get(chip.name, shares["others"])}
    names |= {"fast": cluster.levels[0], "slow": cluster.levels[-1]}
    return PaperSystem(**formulas(NERSC_TABLES["paper"]["system"], names))


def collective_s(kind: Collective, volume_bytes: Num, ranks: Num, inside: Num, system: PaperSystem) -> Num:
    """Time [s] of a collective over `ranks`, of which `inside` share each fast domain."""
    moved = volume_bytes * (1.0 if kind in ("broadcast", "reduce", "send") else (ranks - 1.0) / ranks)
    fast_s, slow_s = moved / system.fast_bytes_per_s, moved / system.slow_bytes_per_s
    on_fast = system.fast_latency_s * (ranks - 1.0) + fast_s
    on_slow = system.slow_latency_s * (ranks - 1.0) + slow_s
    domains = ranks // inside
    hops_s = system.slow_latency_s * (domains - 1.0) + system.fast_latency_s * (ranks - domains)
    rings_s = np.maximum(slow_s / (system.nics_per_rank * inside), fast_s)
    on_both = (2.0 if kind == "all_reduce" else 1.0) * rings_s + hops_s
    across = on_fast if kind == "send" else np.where(np.equal(domains, 1.0), on_fast, on_both)
    seconds = np.where(np.equal(inside, 1.0), on_slow, across)
    return np.where(np.greater(ranks, 1.0) & np.greater(volume_bytes, 0.0), seconds, 0.0)[()]


# --- Rows -------------------------------------------------------------------------------------------


def _op_row(op: PaperOp, run: PaperRun, system: PaperSystem) -> Row:
    names = op | {"system": system, "longer": np.maximum}
    cells: Row = {"name": op["name"]}
    for way, phase in WAYS:
        work = work_of(op, phase)
        names |= work | {"comms_s": sum(comm_seconds(work["comms"], op["panels"], run, system), 0.0)}
        found = formulas(NERSC_TABLES["paper"]["cells"], names)
        cells |= {name.replace("WAY", way): cell for name, cell in found.items()}
        cells |= _comm_cells(way, [_placed(comm, run) for comm in work["comms"]])
    cells["t_bwd"] = cells["t_bwd"] + (cells["t_fwd"] if op["recompute"] else 0.0)
    return _row(cells)


def work_of(op: PaperOp, phase: str) -> PaperOp:
    """What an op does in one direction."""
    prefix = "backward_" if phase == "backward" else ""
    return {name: op[prefix + name] for name in ("flop", "traffic", "vector_flop", "comms")}


def comm_seconds(comms: Iterable[Any], panels: Num | None, run: PaperRun, system: PaperSystem) -> list[Num]:
    """Seconds of each communication, all panels together."""
    steps = 1.0 if panels is None else panels
    placed = [_placed(comm, run) for comm in comms]
    return [steps * collective_s(kind, volume / steps, n, t, system) for kind, volume, n, t in placed]


def _placed(comm: tuple[Collective, str, Num], run: PaperRun) -> _Placed:
    """A communication on its group; in a group of one it moves nothing."""
    kind, axis, volume_bytes = comm
    ranks, inside = run.groups[axis]
    return kind, volume_bytes * np.greater(ranks, 1.0), ranks, inside


def _comm_cells(way: str, comms: list[_Placed]) -> Row:
    """The four cells of a row on its communications: numbers for one, lists for several."""
    cells: list[Any] = [0.0, "none", 0.0, "none"]
    if comms:
        each = [[volume / GB, paper_name(kind), *group] for kind, volume, *group in comms]
        cells = each[0] if len(each) == 1 else [list(column) for column in zip(*each, strict=True)]
    names = (f"comm_{way}", f"comm_{way}_type", f"comm_{way}_size", f"comm_{way}_topology")
    return dict(zip(names, cells, strict=True))


def paper_name(kind: Collective) -> str:
    """What the paper calls a collective."""
    return "p2p" if kind == "send" else kind.replace("_", "")


def _row(cells: Row) -> Row:
    """`cells` in the order of the columns; absent ones are zero."""
    cells["t"] = cells["t_fwd"] + cells["t_bwd"]
    return {column: cells.get(column, 0.0) for column in COLUMNS}


def _comm_row(name: str, comms: dict[str, _Placed], seconds: dict[str, Num]) -> Row:
    cells: Row = {"name": name, "use_tensor_cores": False}
    for way, _ in WAYS:
        cells |= _comm_cells(way, [comms[way]]) | {f"t_{way}": seconds[way], f"t_{way}_comm": seconds[way]}
    return _row(cells)


def _dp_row(rows: list[Row], run: PaperRun, system: PaperSystem) -> Row:
    """Weights gathered beside the first forward, gradients scattered beside the last backward."""
    volume_bytes = _sum(rows, "weights_mem") * GB
    gather: _Placed = ("all_gather", volume_bytes, *run.groups["dp"])
    comms: dict[str, _Placed] = {"fwd": gather, "bwd": ("reduce_scatter", *gather[1:])}
    seconds = {}
    for way, comm in comms.items():
        one = collective_s(*comm, system)
        seconds[way] = one + np.maximum(one - _sum(rows, f"t_{way}"), 0.0) * (run.stage_layers - 1.0)
    return _comm_row("dp_comms", comms, seconds)


def _pp_row(volume_gb: Num, run: PaperRun, system: PaperSystem) -> Row:
    """One hop for every microbatch each way; of mixed links only the fast ones cost anything."""
    pp, inside = run.pp, run.inside["pp"]
    comm: _Placed = ("send", volume_gb * GB, 2.0, inside)
    num_links = np.maximum(pp - 1.0, 1.0)
    num_slow = np.trunc(pp / inside - 1.0)
    charged_frac = np.where(np.greater(inside, 1.0), (num_links - num_slow) / num_links, 1.0)[()]
    hops_s = run.num_microbatches * charged_frac * collective_s(*comm, system) * np.greater(pp, 1.0)
    return _comm_row("pp_comms", {"fwd": comm, "bwd": comm}, {"fwd": hops_s, "bwd": hops_s})


def _sum(rows: list[Row], *columns: str) -> Num:
    return sum((row[column] for row in rows for column in columns), 0.0)


def _totals(rows: list[Row], dp_comm: Row, pp_comm: Row, run: PaperRun) -> dict[str, Num]:
    """The paper's totals of one iteration on one GPU."""
    names = {"run": run, "dp_comm": dp_comm, "pp_comm": pp_comm, "least": np.minimum}
    names["sum_of"] = partial(_sum, rows)
    return formulas(NERSC_TABLES["paper"]["totals"], names)

"""The best plan for a model on a cluster, proven best by pricing all of them.

The space is every combination of tp, cp, ep, etp, pp, microbatch, schedule with its virtual stages,
recomputation and ZeRO stage that divides what it cuts; a key that the caller states has the stated values
only. All of it is priced by the same path as one plan (`estimate.grid`), and nothing is pruned, so the first
of `best` is the fastest plan of the space that fits. Plans that are the same in other words count once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.core.errors import MeshwiseError
from meshwise.cost.schedule import SCHEDULES
from meshwise.estimate.grid import Cells, Space, price_grid
from meshwise.estimate.single import Estimate, estimate
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import RECOMPUTE, Plan, plan_text
from meshwise.plan.workload import Workload

MAX_TP = 64
MAX_CP = 16
MAX_PP = 128
MAX_VPP = 16
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MIN_CONTEXT_TOKENS = 1024
"""A rank's share of a sequence below which context parallelism is not tried."""

MAX_FRONT = 30
"""Plans of the Pareto front that are kept for the answer."""


@dataclass(frozen=True, slots=True)
class Found:
    """One plan of the space, as the grid prices it."""

    plan: Plan
    microbatch: int
    step_s: float
    memory_bytes: float

    def to_json(self) -> dict[str, Any]:
        """The plan as text, and its two figures."""
        return {
            "plan_text": plan_text(self.plan),
            "microbatch": self.microbatch,
            "step_s": self.step_s,
            "memory_bytes": self.memory_bytes,
        }


@dataclass(frozen=True, slots=True)
class Result:
    """What a search looked at and found.

    `best`: the fastest plans that fit, fastest first. `pareto`: plans that fit and that no other beats in
    both step time and memory, fastest first. `nearest_miss`: where nothing fits, the plan that
    needs least memory; `reason`: why there is no plan at all.
    """

    plans_considered: int
    plans_feasible: int
    elapsed_s: float
    capacity_bytes: float
    best: tuple[Estimate, ...]
    pareto: tuple[Found, ...]
    nearest_miss: Found | None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The document that `meshwise search --json` prints."""
        miss = self.nearest_miss
        return {
            "plans_considered": self.plans_considered,
            "plans_feasible": self.plans_feasible,
            "elapsed_s": self.elapsed_s,
            "plans_per_s": self.plans_considered / self.elapsed_s,
            "best": [
                {
                    "plan": found.to_json(ledger=False)["plan"],
                    "plan_text": plan_text(found.plan),
                    "microbatch": found.workload.microbatch,
                    "step_s": found.step_s,
                    "mfu": found.mfu,
                    "tokens_per_s": found.tokens_per_s,
                    "memory_bytes": found.memory_bytes,
                }
                for found in self.best
            ],
            "pareto": [found.to_json() for found in self.pareto],
            "nearest_miss": None
            if miss is None
            else miss.to_json() | {"short_bytes": miss.memory_bytes - self.capacity_bytes},
            "reason": self.reason or None,
        }


def free_values(model: Model, world: int, workload: Workload) -> dict[str, Sequence[Any]]:
    """Every value worth trying of the keys that a search chooses where they are not stated."""
    layers, seq = model.num_layers, workload.seq
    pp = [x for x in _divisors(world) if x <= min(MAX_PP, layers)]
    found: dict[str, Sequence[Any]] = {
        "tp": [x for x in _divisors(world) if x <= MAX_TP and model.num_heads % x == 0],
        "cp": [x for x in _divisors(world) if x <= MAX_CP and _shares(seq, x)],
        "pp": pp,
        "vpp": [v for v in range(1, MAX_VPP + 1) if v == 1 or any(v * x <= layers + 2 for x in pp if x > 1)],
        "schedule": [name for name in SCHEDULES if name != "gpipe"],
        "microbatch": [x for x in MICROBATCHES if workload.batch % x == 0],
        "recompute": RECOMPUTE,
        "zero": (0, 1, 2, 3),
    }
    if model.moe is not None:
        found |= {
            "ep": [x for x in _divisors(model.moe.num_experts) if world % x == 0],
            "etp": (None, 1),
        }
    return found


def _shares(seq: int, cp: int) -> bool:
    return cp == 1 or (seq % cp == 0 and seq // cp >= MIN_CONTEXT_TOKENS)


def _divisors(number: int) -> list[int]:
    small = [x for x in range(1, int(number**0.5) + 1) if number % x == 0]
    return sorted({*small, *(number // x for x in small)})


def search(
    model: Model,
    cluster: Cluster,
    *,
    batch: int,
    seq: int,
    stated: Mapping[str, Sequence[Any]] | None = None,
    top: int = 5,
) -> Result:
    """Price every plan of the space and return the `top` fastest that fit the memory.

    `stated`: the values that keys of the plan (and `microbatch`) may have, in place of all of them.
    The result has no `best` where nothing fits. PlanError where a stated key is unknown.
    """
    started = time.perf_counter()
    workload = Workload(batch=batch, seq=seq)
    space: Space = free_values(model, cluster.num_chips, workload) | dict(stated or {})
    capacity = cluster.chip.memory_bytes
    considered, feasible = 0, 0
    fastest: list[Found] = []
    front: list[Found] = []
    miss: Found | None = None
    for cells in price_grid(model, cluster, workload, space, Plan()):
        plans = _distinct(cells)
        step_s, memory = cells.array(cells.step.step_s), cells.array(cells.step.memory_bytes)
        fits = plans & (memory <= capacity)
        considered += int(plans.sum())
        feasible += int(fits.sum())
        if fits.any():
            times = np.where(fits, step_s, np.inf)
            bound = fastest[-1].step_s if len(fastest) == top else np.inf
            fastest = _fastest([*fastest, *_least(cells, times, bound, top)])[:top]
            front = _front([*front, *_front(_front_cells(cells, times))])
        elif not feasible and plans.any():
            least = next(_least(cells, np.where(plans, memory, np.inf), np.inf, 1))
            miss = min(filter(None, (miss, least)), key=lambda found: found.memory_bytes)
    best = tuple(
        estimate(model, cluster, found.plan, Workload(batch=batch, seq=seq, microbatch=found.microbatch))
        for found in fastest
    )
    return Result(
        plans_considered=considered,
        plans_feasible=feasible,
        elapsed_s=time.perf_counter() - started,
        capacity_bytes=capacity,
        best=best,
        pareto=tuple(front[:MAX_FRONT]),
        nearest_miss=None if feasible else miss,
        reason="" if considered else _reason(model, cluster, workload, stated or {}),
    )


def _reason(model: Model, cluster: Cluster, workload: Workload, stated: Mapping[str, Sequence[Any]]) -> str:
    """Why no combination is a plan: what the first stated one breaks by itself, if it does."""
    first = {key: values[0] for key, values in stated.items() if key != "microbatch"}
    microbatch = stated.get("microbatch", (1,))[0]
    try:
        estimate(
            model, cluster, Plan(**first),
            Workload(batch=workload.batch, seq=workload.seq, microbatch=microbatch),
        )  # fmt: skip
    except MeshwiseError as error:
        return str(error)
    return f"no combination of degrees divides {cluster.num_chips} ranks and a batch of {workload.batch}"


def _distinct(cells: Cells) -> NDArray[np.bool_]:
    """Which cells are plans that no cell before them is in other words.

    Without a pipeline all schedules are alike, without replicas all ZeRO stages and overlaps of exchanges.
    """
    mesh = cells.mesh
    piped = mesh.pp > 1
    columns = (
        *(
            mesh.tp,
            mesh.ulysses,
            mesh.ring,
            mesh.pp,
            mesh.vpp * piped,
            mesh.schedule * piped,
            mesh.dp,
            mesh.ep,
        ),
        *(mesh.etp, mesh.zero_group, mesh.microbatch, mesh.imbalance),
    )
    num_rows = len(cells.rows[0])
    table = np.stack([np.broadcast_to(np.asarray(column, dtype=np.float64), num_rows) for column in columns])
    _, first = np.unique(table, axis=1, return_index=True)
    is_first = np.zeros(num_rows, dtype=bool)
    is_first[first] = True
    alone = (mesh.replicas == 1) & (mesh.expert_replicas == 1)
    plans = ~np.asarray(cells.broken) & is_first
    for key, alike in (("zero", alone), ("overlap_dp", alone), ("overlap_pp", mesh.pp == 1)):
        values = getattr(mesh, key)
        if isinstance(values, np.ndarray):
            plans = plans & ~(alike & (values != values.flat[0]))
    return np.broadcast_to(plans, cells.shape)


def _least(cells: Cells, values: NDArray[np.float64], bound: float, most: int) -> Iterator[Found]:
    """The `most` cells of least `values` below `bound`."""
    flat = values.ravel()
    below = np.flatnonzero(flat < bound)
    if len(below) > most:
        below = below[np.argpartition(flat[below], most - 1)[:most]]
    return (_found(cells, int(cell)) for cell in below)


def _found(cells: Cells, cell: int) -> Found:
    index = tuple(int(i) for i in np.unravel_index(cell, cells.shape))
    plan, microbatch = cells.plan_at(index)
    step_s, memory = cells.array(cells.step.step_s)[index], cells.array(cells.step.memory_bytes)[index]
    return Found(plan, microbatch, float(step_s), float(memory))


def _fastest(found: Sequence[Found]) -> list[Found]:
    return sorted(found, key=lambda one: (one.step_s, one.memory_bytes))


def _front_cells(cells: Cells, times: NDArray[np.float64]) -> list[Found]:
    """The cells that no other of these beats in both time and memory."""
    flat, memory = times.ravel(), cells.array(cells.step.memory_bytes).ravel()
    order = np.lexsort((memory, flat))
    order = order[np.isfinite(flat[order])]
    least = np.minimum.accumulate(memory[order])
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = least[1:] < least[:-1]
    return [_found(cells, int(cell)) for cell in order[is_new]]


def _front(found: Sequence[Found]) -> list[Found]:
    front: list[Found] = []
    for one in _fastest(found):
        if not front or one.memory_bytes < front[-1].memory_bytes:
            front.append(one)
    return front

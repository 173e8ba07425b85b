"""The space of a search: the values that are worth trying of every key that the caller leaves free.

`USUAL` keys are free unless the caller states them. They change neither what is computed nor what the
training software must be able to do, but for `SWITCHES`, which are tried where a framework has them.
`key=*` frees any other key of `all_values`: layouts beyond one dimension, the order of the axes on the links,
offloading.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwise.core.errors import PlanError
from meshwise.cost.schedule import SCHEDULES
from meshwise.launch.runs import modules_of, running, values_of
from meshwise.machine.hardware import Chip, Cluster
from meshwise.machine.overheads import own_kinds
from meshwise.model.architecture import Model
from meshwise.plan import plan
from meshwise.plan.mesh import Mesh
from meshwise.plan.workload import Workload

Values = dict[str, Sequence[Any]]
Stated = Mapping[str, Sequence[Any]]

MAX_MICROBATCH_TOKENS = 2**16
MIN_CONTEXT_TOKENS = 1024
"""A rank's share of a sequence below which context parallelism is not tried."""
CAPS = {"tp": 64, "pp": 128, "vpp": 16}
"""The largest sizes that are tried unless a search is told otherwise."""

RECOMPUTED_LAYERS = (None, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Layers of a stage that full recomputation covers (None: all)."""

SWITCHES = plan.PLAN_LISTS["switches"]
USUAL = [*plan.PLAN_LISTS["usual"], *SWITCHES]


def usual_kinds(chip: Chip) -> Values:
    """The kinds that are tried of some keys unless those are `*`; of a chip's own software, those it has.

    GPipe and the two-level exchange are for those who ask.
    """
    kinds = {"cp_kind": plan.CP_KINDS[:3], "schedule": SCHEDULES[1:], "dispatch": plan.DISPATCH}
    return {**kinds, **own_kinds(chip)}


def untried(mesh: Mesh, chip: Chip, stated: Stated) -> Any:
    """Where a switch hides less than it says, or a pipeline's schedule is none of the chip's own software.

    Before Blackwell, Megatron wants one hardware queue for exchanges of tp, many for those of experts and for
    weights that it shards as a whole (arguments.py: CUDA_DEVICE_MAX_CONNECTIONS).
    """
    own, of = [SCHEDULES.index(name) for name in own_kinds(chip).get("schedule", SCHEDULES)], mesh.plan
    many_queues = bool(of.overlap_ep) | (
        (mesh.zero >= 2) & (mesh.replicas > 1) & (not of.done_by.shards_each_weight)
    )
    less = is_switched(of, stated) & of.overlap_tp & many_queues
    return less | (("schedule" not in stated) & (mesh.pp > 1) & ~np.isin(mesh.schedule, own))


def is_switched(of: plan.Plan, stated: Stated) -> bool:
    """Whether a plan has one of the `SWITCHES` on that is not `stated`, nor DualPipe's own."""
    own = {*stated, *["overlap_ep"] * of.is_paired}
    return any(getattr(of, key) for key in SWITCHES if key not in own)


def free_values(
    model: Model, cluster: Cluster, workload: Workload, stated: Stated, to: str = "", *, capped: bool = True
) -> Values:
    """The values of each key that varies: those stated, and those of each free one, the default first.

    `to`: only those that this framework has. `capped`: sizes up to the usual ones, but of keys that are `*`.
    PlanError for `*` where a key has no list of values that keep the result of the training, and where the
    framework has none of the stated values.
    """
    known = all_values(model, cluster, workload, capped=capped)
    every = all_values(model, cluster, workload, capped=False)
    known |= {key: values for key, values in every.items() if plan.ANY in stated.get(key, ())}
    able = [to] if to else running(model, cluster.chip, workload.seq)
    lacking = {key for key in SWITCHES if not any(True in (values_of(of, key) or (True,)) for of in able)}
    found: Values = {key: known[key] for key in USUAL if key in known and key not in lacking}
    for key, kinds in usual_kinds(cluster.chip).items():
        if key in found:
            found[key] = [kind for kind in found[key] if kind in (plan.DEFAULTS[key], *kinds)]
    for key, values in stated.items():
        if plan.ANY in values and key not in known:
            raise PlanError(f"{key}=* cannot be searched here; list values, or free {', '.join(known)}")
        found[key] = known[key] if plan.ANY in values else values
    if "layout" in stated and "1d" not in found["layout"] and "tp" not in stated:
        found["tp"] = [tp for tp in found["tp"] if tp > 1]  # a grid of one rank is 1d
    if "full" not in found["recompute"] and "recompute_layers" not in stated:
        del found["recompute_layers"]
    if to:
        found = _of_framework(to, found, stated)
    if max(found["cp"]) == 1:  # all kinds are one plan
        found["cp_kind"] = found["cp_kind"][:1]
    return {
        key: sorted(values, key=lambda value: value != plan.DEFAULTS.get(key, 1))
        for key, values in found.items()
    }


def _of_framework(to: str, found: Values, stated: Stated) -> Values:
    """The values of `found` that a framework has; its own of a key that is not `stated`, where none is usual.

    PlanError where it has none of the stated values.
    """
    found = {"recompute_modules": own} | found if (own := modules_of(to)) else found
    kept = dict(found)
    for key in plan.KEYS:
        usual, allowed = found.get(key, (plan.DEFAULTS[key],)), values_of(to, key)
        if allowed is None:
            continue
        values = [value for value in usual if value in allowed]
        if key in stated and not values:
            asked, has = ("|".join(map(plan.KEYS[key].show, of)) for of in (usual, allowed))
            raise PlanError(f"{to} has no {key}={asked}; it has {has}")
        if key in found or not values:
            kept[key] = values or allowed[:1]
    return kept


def all_values(model: Model, cluster: Cluster, workload: Workload, *, capped: bool = True) -> Values:
    """All values that a search may try of each key; `capped`: sizes up to the usual ones."""
    layers, seq, world = model.num_layers, workload.seq, cluster.num_chips
    most = CAPS if capped else dict.fromkeys(CAPS, max(world, layers))
    least_tokens = MIN_CONTEXT_TOKENS if capped else 1
    tp = [x for x in divisors(world) if x <= most["tp"] and model.num_heads % x == 0]
    pp = [x for x in divisors(world) if x <= min(most["pp"], layers + 2)]
    most_chunks = (layers + 2) // next((stages for stages in pp if stages > 1), layers + 2)
    cp = [x for x in divisors(world) if x == 1 or (seq % x == 0 and seq // x >= least_tokens)]
    largest = max(1, MAX_MICROBATCH_TOKENS // seq) if capped else workload.batch
    shares, switch = (0.0, 1.0) if cluster.chip.host_bytes_per_s else (0.0,), (False, True)
    found: Values = {
        "layout": tuple(plan.GRID_DIMS),
        "grid": [(), *_grids(tp)],
        "panels": (1, 2, 4),
        "placement": tuple(itertools.permutations(plan.AXES)),
        "sp": (None, False),
        "overlap_tp": switch,
        "tp": tp,
        "cp": cp,
        "cp_kind": plan.CP_KINDS,
        "ulysses": cp,
        "pp": pp,
        "vpp": range(1, min(most["vpp"], most_chunks) + 1),
        "schedule": SCHEDULES,
        "microbatch": [x for x in divisors(workload.batch) if x <= largest],
        "zero_group": [None, *divisors(world)[1:-1]],
        "recompute": plan.RECOMPUTE,
        "recompute_layers": [n for n in RECOMPUTED_LAYERS if n is None or n < layers],
        "recompute_modules": [
            (),
            *((name,) for name in plan.RECOMPUTE_MODULES),
            *(pair for pair in itertools.combinations(plan.RECOMPUTE_MODULES, 2) if "per_op" not in pair),
            plan.DUALPIPE_RECOMPUTES,
        ],
        "zero": (0, 1, 2, 3),
        "offload_optimizer": shares,
        "offload_activations": shares,
        "overlap_dp": (True, False),
        "overlap_pp": (True, False),
    }
    if model.moe is not None:
        found |= {
            "ep": [x for x in divisors(model.moe.num_experts) if world % x == 0],
            "etp": (None, 1),
            "dispatch": plan.DISPATCH,
            "overlap_ep": (None, True),
        }
    return found


def _grids(tp: Sequence[int]) -> list[tuple[int, ...]]:
    """Grids of two and of three dimensions with as many ranks as one of `tp`."""
    pairs = sorted((side, ranks // side) for ranks in tp for side in divisors(ranks))
    cubes = sorted((x, x, ranks // x**2) for ranks in tp for x in divisors(ranks) if not ranks % x**2)
    return [*pairs, *cubes]


def divisors(number: int) -> list[int]:
    """All divisors of `number`, smallest first."""
    small = [x for x in range(1, math.isqrt(number) + 1) if number % x == 0]
    return sorted({*small, *(number // x for x in small)})

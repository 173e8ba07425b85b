"""The space of a search: the values that are worth trying of every key that the caller leaves free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwise.cost.schedule import SCHEDULES
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import RECOMPUTE
from meshwise.plan.workload import Workload

MAX_TP = 64
MAX_CP = 16
MAX_PP = 128
MAX_VPP = 16
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MIN_CONTEXT_TOKENS = 1024
"""A rank's share of a sequence below which context parallelism is not tried."""

RECOMPUTED_LAYERS = (None, 1, 2, 4, 8)
"""Layers of a stage that full recomputation covers (None: all)."""


def free_values(model: Model, cluster: Cluster, workload: Workload) -> dict[str, Sequence[Any]]:
    """The values of each key that a search chooses."""
    layers, seq, world = model.num_layers, workload.seq, cluster.num_chips
    pp = [x for x in divisors(world) if x <= min(MAX_PP, layers)]
    cp = [x for x in divisors(world) if x == 1 or (x <= MAX_CP and _is_long_enough(seq, x))]
    found: dict[str, Sequence[Any]] = {
        "tp": [x for x in divisors(world) if x <= MAX_TP and model.num_heads % x == 0],
        "cp": cp,
        "cp_kind": ("ring", "ulysses", "all_gather") if len(cp) > 1 else ("ring",),
        "pp": pp,
        "vpp": [v for v in range(1, MAX_VPP + 1) if v == 1 or any(v * x <= layers + 2 for x in pp if x > 1)],
        "schedule": [name for name in SCHEDULES if name != "gpipe"],
        "microbatch": [x for x in MICROBATCHES if workload.batch % x == 0],
        "recompute": RECOMPUTE,
        "recompute_layers": RECOMPUTED_LAYERS,
        "zero": (0, 1, 2, 3),
    }
    if model.moe is not None:
        found["ep"] = [x for x in divisors(model.moe.num_experts) if world % x == 0]
        found["etp"] = (None, 1)
    return found


def offloaded_values(cluster: Cluster) -> dict[str, Sequence[Any]]:
    """What is tried beside them where nothing fits: states and activations in the memory of the host."""
    shares = (0.0, 1.0) if cluster.chip.host_bytes_per_s else (0.0,)
    return {"offload_optimizer": shares, "offload_activations": shares}


def _is_long_enough(seq: int, cp: int) -> bool:
    return seq % cp == 0 and seq // cp >= MIN_CONTEXT_TOKENS


def divisors(number: int) -> list[int]:
    """All divisors of `number`, smallest first."""
    small = [x for x in range(1, int(number**0.5) + 1) if number % x == 0]
    return sorted({*small, *(number // x for x in small)})

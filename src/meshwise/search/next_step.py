"""What to try next: the plans one change away from the one that is priced, or two where none of them fits.

A change touches one key and leaves what is computed (types, optimizer, adapters) as it is.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwise.core.errors import MeshwiseError
from meshwise.estimate.one_plan import Estimate
from meshwise.launch.runs import runs
from meshwise.launch.settings import training_on
from meshwise.plan.plan import DEFAULTS, PLAN_LISTS, RECOMPUTE, Plan
from meshwise.plan.workload import usual_batch
from meshwise.search.search import MEMORY_FRAC, Result, search
from meshwise.search.space import usual_kinds

_LEAST_GAIN = 0.01
"""A plan that is faster by less is not worth a change."""
_CARRIED = 4
"""Plans of one change from which a second one is made, those that need least memory."""
_WORK = ("compute", "memory")
"""Parts of a step that are the work of the kernels themselves."""


@dataclass(frozen=True, slots=True)
class NextStep:
    """`run` differs from the plan that was asked about by `changes`, as a person writes them."""

    changes: tuple[str, ...]
    run: Estimate


def largest_cost(found: Estimate) -> tuple[str, float]:
    """What the step spends most on beside the work of its kernels, and which share of it."""
    costs = {name: seconds for name, seconds in found.time_s.items() if name not in _WORK}
    name = max(costs, key=lambda one: costs[one])
    return name, costs[name] / found.step_s


def next_step(found: Estimate) -> NextStep | None:
    """The fastest plan one change away that fits and is faster; or the nearest that fits.

    None where no change helps, or the step does not train.
    """
    if not found.trains:
        return None
    near = [NextStep((text,), run) for text, run in _neighbours(found)]
    fitting = [one for one in near if _has_room(one.run)]
    if found.fits:
        fitting = [one for one in fitting if one.run.step_s < (1 - _LEAST_GAIN) * found.step_s]
    elif not fitting:
        fitting = [
            NextStep((*one.changes, text), run)
            for one in sorted(near, key=lambda one: one.run.memory_bytes["total"])[:_CARRIED]
            for text, run in _neighbours(one.run)
            if _has_room(run)
        ]
    return min(fitting, key=lambda one: one.run.step_s, default=None)


def with_batch(text: str, run: Estimate, asked: Estimate) -> str:
    """`text`, which leads from what was `asked` to `run`, with the batch where the usual one would move."""
    was, now = (usual_batch(one.plan, one.cluster.num_chips, one.workload.microbatch) for one in (asked, run))
    return text + f" with --batch {run.workload.batch}" * (asked.workload.batch == was != now)


def _has_room(run: Estimate) -> bool:
    """Whether a plan leaves free what a search does: the rest is for what the estimate does not know."""
    return run.memory_bytes["total"] <= MEMORY_FRAC * run.cluster.chip.memory_bytes


COMPUTED = PLAN_LISTS["computed"]
"""Keys that say what a job computes, and by whose software: a search leaves them as they are."""


def computed(plan: Plan) -> dict[str, tuple[Any, ...]]:
    """What a plan states of the `COMPUTED` keys, as a search takes it."""
    return {key: (value,) for key in COMPUTED if (value := getattr(plan, key)) != DEFAULTS[key]}


def other_plans(found: Estimate) -> Result:
    """A search of all plans that compute what `found` does, on its machine and for its batch."""
    job, work = (found.model, found.cluster), found.workload
    return search(*job, batch=work.batch, seq=work.seq, stated=computed(found.plan), top=1)


def _neighbours(found: Estimate) -> Iterator[tuple[str, Estimate]]:
    """The plans one change away that a framework runs, where one runs what is priced."""
    able = [one for one in training_on(found.cluster.chip) if np.all(runs((one,), found.model, found.mesh))]
    for key, value in _changes(found):
        text = value if isinstance(value, str) else f"{value:g}"
        with suppress(MeshwiseError):  # it is no plan of this model or cluster
            # what only went with the old value of the key is left open (`stages=even` stays)
            bound = [name for name in PLAN_LISTS.get(f"with_{key}", ()) if getattr(found.plan, name)]
            run = found.changed(**{key: value}, **{name: DEFAULTS[name] for name in bound})
            is_one = run.plan.is_paired == found.plan.is_paired  # DualPipe with experts is several changes
            if is_one and (not able or np.all(runs(able, run.model, run.mesh))):
                yield f"--microbatch {text}" if key == "microbatch" else f"{key}={text}", run


def _changes(found: Estimate) -> Iterator[tuple[str, Any]]:
    plan, sizes = found.plan, {"microbatch": found.workload.microbatch}
    axes = (*("tp", "cp", "pp", "ep") * (plan.layout == "1d" and plan.dp is None), *("vpp",) * (plan.pp > 1))
    sizes |= {key: getattr(plan, key) for key in axes}
    yield from ((key, other) for key, size in sizes.items() for other in (size // 2, 2 * size) if other)
    needs = {"cp_kind": plan.cp, "schedule": plan.pp, "dispatch": plan.ep}
    kinds = {key: of for key, of in usual_kinds(found.cluster.chip).items() if needs[key] > 1}
    kinds |= {"zero": range(4), "recompute": RECOMPUTE, "loss_chunks": (8,) * (plan.loss_chunks == 1)}
    kinds |= {"overlap_tp": (True,) * (plan.tp > 1), "overlap_ep": (True,) * (plan.ep > 1)}
    kinds["offload_optimizer"] = (1.0,) * (not plan.offload_optimizer and not plan.lora_rank)
    yield from ((key, kind) for key, of in kinds.items() for kind in of if kind != getattr(plan, key))

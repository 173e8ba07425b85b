"""Which plans a framework runs: those that its table says whole and that its checks do not refuse.

For one plan `launch` says it by writing the settings. Here the same tables, and the checks of
`catalog/refusals.toml`, are read over a grid of plans at once, so that a search looks at nothing else; and
which values of a key a framework has at all.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache, reduce
from itertools import chain
from typing import Any

import numpy as np

from meshwise.core import refusals
from meshwise.core.columns import any_of
from meshwise.core.errors import PlanError
from meshwise.core.expressions import formulas
from meshwise.launch.facts import Facts, derive, resharding, without_effect
from meshwise.launch.settings import training_on, write_settings
from meshwise.launch.shape import shape_of, unsaid
from meshwise.launch.tables import ANY, Setting, covered, launch_tables, table_of
from meshwise.machine.hardware import Chip
from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import DEFAULTS, KEYS, KINDS, NUMBERS, RECOMPUTE
from meshwise.program.implementation import loss_fusion

_COUNTED = ("sp", "overlap_tp", "vpp", "overlap_pp", "overlap_ep", "zero", "zero_group", "etp")
"""Keys that refusals look at and that may have no effect."""
_IDLE: Facts = DEFAULTS | {"sp": False, "overlap_ep": False, "etp": 1, "zero": 0, "zero_group": 0}
"""What holds of a key that changes nothing."""


@lru_cache(maxsize=512)
def values_of(framework: str, key: str) -> tuple[Any, ...] | None:
    """The values of a key of a plan that the framework has; None: any."""
    table = table_of(framework)
    if key in table:
        return _whole(table[key])
    if key == "recompute":
        forms = _whole(table.get("recompute_form") or table["recompute_fsdp"]) or RECOMPUTE
        forms += ("selective",) * ("per_op" in forms)
        return tuple(kind for kind in RECOMPUTE if kind in forms)
    return None if key in covered(framework) else (DEFAULTS[key],)


def modules_of(framework: str) -> tuple[tuple[str, ...], ...]:
    """What selective recomputation covers where a framework has a list of its own; () is the usual."""
    forms = _whole(table_of(framework).get("recompute_form", {})) or ()
    return ((), ("per_op",)) if "per_op" in forms and "selective" not in forms else ()


def running(model: Model, chip: Chip, seq: int) -> list[str]:
    """The frameworks that run on a chip and whose settings say all of a model."""
    return [name for name in training_on(chip) if says_model(name, model, seq)]


def runs(frameworks: Iterable[str], model: Model, mesh: Mesh) -> Any:
    """Where one of the frameworks runs the training plans of `mesh`."""
    known = [name for name in frameworks if says_model(name, model, int(mesh.seq))]
    of = _counted(model, mesh)
    return reduce(np.logical_or, (~any_of((np.False_, *_refused(name, *of))) for name in known), False)


@lru_cache(maxsize=256)
def says_model(framework: str, model: Model, seq: int) -> bool:
    """Whether the settings of a framework say all of a model, or it takes the model as it is."""
    if framework == "torchtitan":
        return model.name in launch_tables().torchtitan_models
    if not framework.startswith("megatron"):
        return model.diffusion is None
    return not unsaid(model) and not write_settings(framework, shape_of(model, seq))[1]


def refused(frameworks: Iterable[str], model: Model, mesh: Mesh) -> list[Any]:
    """Where training plans of `mesh` do not run in the first framework that runs some, reason by reason."""
    of = _counted(model, mesh)
    each = ([*_refused(name, *of)] for name in frameworks)
    return next((reasons for reasons in each if not any(map(np.all, reasons))), [True])


def check(framework: str, facts: Facts) -> None:
    """PlanError with the first of its own checks by which a framework refuses one plan."""
    for is_refused, sentence in _broken(framework, facts):
        if is_refused:
            raise PlanError(f"{framework} refuses this plan: {sentence.format(**facts)}")


def refusal(framework: str, model: Model, mesh: Mesh, keys: Facts) -> str:
    """Why a framework runs no training plan of `mesh`: a check of its own that refuses all, or what it does
    not say of the `keys` of one of them; "" where neither is so.
    """
    *_, counted = _counted(model, mesh)
    first = {key: np.ravel(of)[0] if isinstance(of, np.ndarray) else of for key, of in counted.items()}
    shown = {key: int(of) if isinstance(of, float) and of % 1 == 0 else of for key, of in first.items()}
    of_model: Facts = {"has_experts": model.moe is not None, "num_layers": model.num_layers}
    unsaid = write_settings(framework, derive(DEFAULTS | keys | of_model))[1].values()
    broken = (text.format(**shown) for holds, text in _broken(framework, counted) if np.all(holds))
    why = *map("refuses all plans: {}".format, broken), *map("does not say {}".format, unsaid)
    return f"{framework} {why[0]}" if why else ""


def _broken(framework: str, facts: Facts) -> Iterator[tuple[Any, str]]:
    """The checks of a framework, each with its sentence; keys that are left out are idle."""
    found = _IDLE | {key: value for key, value in facts.items() if value is not None}
    family = framework.partition("-")[0]
    return chain.from_iterable(refusals.broken(name, found) for name in dict.fromkeys((family, framework)))


def _counted(model: Model, mesh: Mesh) -> tuple[Facts, Facts, Facts]:
    """The facts of a grid of plans, where each key is idle, and the facts as refusals count them."""
    facts = _facts(model, mesh)
    idle = without_effect(facts)
    counted = {key: np.where(idle.get(key, False), _IDLE[key], facts[key]) for key in _COUNTED}
    return facts, idle, facts | counted


def _refused(framework: str, facts: Facts, idle: Facts, counted: Facts) -> Iterator[Any]:
    table = table_of(framework)
    for key in KEYS:
        allowed = values_of(framework, key)
        if allowed is not None and key != "stages":
            yield _is_none_of(facts[key], allowed) & np.logical_not(idle.get(key, False))
    for fact in launch_tables().forms:
        if fact in table and (allowed := _whole(table[fact])) is not None:
            yield _is_none_of(facts[fact], allowed)
    if "pipeline_layout" not in table:
        yield facts["stages"] & (facts["pp"] > 1)
    yield from (is_broken for is_broken, _ in _broken(framework, counted))


def _whole(setting: Setting) -> tuple[Any, ...] | None:
    """The values that a setting says whole; None: any."""
    found = tuple(value for value, option in setting.items() if not option.differs)
    return None if ANY in found else found


def _is_none_of(value: Any, allowed: tuple[Any, ...]) -> Any:
    return ~any_of((np.False_, *(value == (0.0 if one is None else one) for one in allowed)))


def _facts(model: Model, mesh: Mesh) -> Facts:
    """The facts of a grid of training plans, numbers in arrays; 0 where a plan leaves a number out."""
    plan = mesh.plan
    facts: Facts = {key: getattr(plan, key) for key in KEYS} | {key: getattr(mesh, key) for key in NUMBERS}
    facts = {key: 0.0 if value is None else value for key, value in facts.items()}
    facts |= {key: np.take(names, np.asarray(facts[key], dtype=np.intp)) for key, names in KINDS.items()}
    zero = np.where(mesh.replicas == 1, 0, mesh.zero)
    facts |= {"resharding": resharding(zero, mesh.pp), "loss": loss_fusion(plan), "model": model}
    of_numpy = {"where": np.where, "isfinite": np.isfinite, "len": len, "set": set}
    return facts | formulas(launch_tables().grid, of_numpy | facts | {"mesh": mesh, "plan": plan})

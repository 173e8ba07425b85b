"""A parallel plan: how one model is cut over many ranks.

The ranks form a mesh with named axes. Tensor parallelism (`tp`) cuts each matrix, sequence
parallelism (`sp`) the activations between them; context parallelism (`cp`) cuts the sequence
itself; pipeline parallelism (`pp`, with `vpp` virtual stages each) cuts the layers; expert
parallelism (`ep`, with its own tensor degree `etp`) places experts; what is left of the world is
data parallelism (`dp`), over which ZeRO shards states.

Axes are placed on the links in the order of `placement`, the first axis on neighbouring ranks.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from meshwise.core.errors import PlanError
from meshwise.core.units import DTYPE_BYTES
from meshwise.machine.overheads import SOFTWARE

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v")
RECOMPUTE = ("none", "selective", "full")
CP_KINDS = ("ring", "ulysses", "all_gather", "two_level")
LAYOUTS = ("1d", "2d", "2d-cp", "2.5d", "3d")
OPTIMIZERS = ("adam", "adam-fp32", "adam-bf16", "adam-8bit", "muon", "sgd", "none")
ATTENTION = ("flash", "unfused", "grid")
DISPATCH = ("per_expert", "per_rank")
AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Degrees of parallelism and the choices that go with them; see `parse_plan` for the text form.

    `sp` None means: on wherever tp > 1. `dp` None means: what the cluster leaves.
    `grid` is the shape of a tensor layout of two or more dimensions, e.g. (2, 2, 2); `panels`, in how many
    pieces SUMMA sends a block; attention=grid splits the scores over the grid.
    `dispatch`: a token goes to its experts by a plain all-to-all, once per_expert, or once per_rank that
    holds some of them (and once to each node, which passes it on), as DeepEP and HybridEP do.
    `recompute_layers` limits full recomputation to so many layers of each stage (None: all).
    `zero` is the ZeRO stage over dp (3 is FSDP); `zero_group` shards over so many ranks of dp only
    (HSDP; None: all of them). `software` is the generation of the training software whose overheads a step
    pays (`meshwise.machine.overheads`). `stages` gives uneven pipeline stages as numbers of layers.
    """

    tp: int = 1
    sp: bool | None = None
    cp: int = 1
    cp_kind: str = "ring"
    ulysses: int = 1
    pp: int = 1
    vpp: int = 1
    schedule: str = "1f1b"
    stages: tuple[int, ...] | None = None
    dp: int | None = None
    ep: int = 1
    etp: int | None = None
    dispatch: str = "per_expert"
    layout: str = "1d"
    grid: tuple[int, ...] = ()
    panels: int = 1
    zero: int = 1
    zero_group: int | None = None
    recompute: str = "none"
    recompute_layers: int | None = None
    dtype: str = "bf16"
    optimizer: str = "adam"
    grad_dtype: str = "fp32"
    attention: str = "flash"
    offload_optimizer: float = 0.0
    offload_activations: float = 0.0
    overlap_dp: bool = True
    overlap_tp: bool = False
    overlap_ep: bool = False
    overlap_pp: bool = True
    lora_rank: int = 0
    imbalance: float = 1.0
    software: str = SOFTWARE[-1]
    placement: tuple[str, ...] = AXES

    @property
    def sequence_parallel(self) -> bool:
        """Whether the activations between the tensor-parallel matmuls are cut along the sequence."""
        return self.tp > 1 if self.sp is None else self.sp

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model: tp x cp x pp."""
        return self.tp * self.cp * self.pp

    def data_parallel(self, world_size: int) -> int:
        """The data-parallel degree in a world of `world_size` ranks; PlanError if it does not divide."""
        if world_size % self.model_ranks:
            raise PlanError(
                f"{world_size} ranks do not divide by tp={self.tp} x cp={self.cp} x pp={self.pp}; "
                f"use a multiple of {self.model_ranks}"
            )
        dp = world_size // self.model_ranks
        if self.dp is not None and self.dp != dp:
            raise PlanError(
                f"dp={self.dp} contradicts {world_size} ranks / (tp={self.tp} x cp={self.cp} x pp={self.pp})"
                f" = {dp}; leave dp out or change the number of ranks"
            )
        return dp


_CHOICES = {
    "schedule": SCHEDULES,
    "recompute": RECOMPUTE,
    "cp_kind": CP_KINDS,
    "layout": LAYOUTS,
    "optimizer": OPTIMIZERS,
    "attention": ATTENTION,
    "dispatch": DISPATCH,
    "dtype": tuple(DTYPE_BYTES),
    "software": SOFTWARE,
    "grad_dtype": ("fp32", "bf16", "fp16"),
}
_DEGREES = ("tp", "cp", "ulysses", "pp", "vpp", "dp", "ep", "etp", "zero_group", "panels")
_COUNTS = ("recompute_layers", "lora_rank")
_SWITCHES = ("sp", "overlap_dp", "overlap_tp", "overlap_ep", "overlap_pp")
_SHARES = ("offload_optimizer", "offload_activations")
_FIELDS = tuple(field.name for field in fields(Plan))


def parse_plan(text: str) -> Plan:
    """The plan that `text` spells: `tp=8,pp=4,schedule=1f1b,...`, or the path of a TOML file of these keys.

    A layout of several dimensions names its grid: `layout=2d:4x2`. Uneven stages are `stages=10-12-10`,
    a placement `placement=tp-pp-dp-cp`. What is left out has the default of `Plan`.
    """
    if text.endswith(".toml"):
        return plan_from_dict(_read_toml(Path(text)), where=text)
    raw: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise PlanError(f"plan item {item!r} is not key=value; write for example tp=8,pp=4")
        if key in raw:
            raise PlanError(f"plan {text!r} gives {key} twice; give it once")
        raw[key] = value
    return plan_from_dict(raw, where=f"plan {text!r}")


def plan_from_dict(raw: dict[str, Any], where: str = "plan") -> Plan:
    """A checked `Plan` from values as text or as TOML types; PlanError names the key that is wrong."""
    unknown = sorted(set(raw) - set(_FIELDS))
    if unknown:
        raise PlanError(f"{where}: unknown key {unknown[0]!r}; known keys: {', '.join(_FIELDS)}")
    values = {key: _value(key, value, where) for key, value in raw.items()}
    if isinstance(values.get("layout"), tuple):
        values["layout"], values["grid"] = values["layout"]
    return _consistent(Plan(**values), where)


def _value(key: str, value: Any, where: str) -> Any:
    at = f"{where}: {key}={value}"
    if key == "layout":
        return _layout(str(value), at)
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise PlanError(f"{at} is unknown; choose one of {', '.join(_CHOICES[key])}")
        return value
    if key in _SWITCHES:
        known = {"0": False, "1": True, "false": False, "true": True}
        if str(value).lower() not in known:
            raise PlanError(f"{at} must be 0 or 1")
        return known[str(value).lower()]
    if key in ("grid", "stages"):
        parts = value if isinstance(value, list | tuple) else str(value).replace("x", "-").split("-")
        return tuple(_integer(part, at, least=1) for part in parts)
    if key == "placement":
        axes = tuple(value) if isinstance(value, list | tuple) else tuple(str(value).split("-"))
        if sorted(map(str, axes)) != sorted(AXES):
            raise PlanError(f"{at} must order the axes {', '.join(AXES)}, as in tp-cp-dp-pp")
        return axes
    if key in _SHARES:
        return _number(value, at, least=0.0, most=1.0)
    if key == "imbalance":
        return _number(value, at, least=1.0)
    if key == "zero":
        return _integer(value, at, least=0, most=3)
    return _integer(value, at, least=1 if key in _DEGREES else 0)


def _layout(text: str, at: str) -> tuple[str, tuple[int, ...]]:
    name, colon, grid = text.partition(":")
    if name not in LAYOUTS:
        raise PlanError(f"{at} is unknown; choose one of {', '.join(LAYOUTS)}, with a grid as in 2d:4x2")
    dims = tuple(_integer(part, at, least=1) for part in grid.split("x")) if colon else ()
    wanted = {"1d": (0, 1), "2d": (0, 2), "2d-cp": (0, 2), "2.5d": (0, 3), "3d": (0, 3)}[name]
    if len(dims) not in wanted:
        raise PlanError(f"{at} needs a grid of {wanted[1]} numbers, as in {name}:{'x'.join('2' * wanted[1])}")
    return name, dims


def _integer(value: Any, at: str, *, least: int, most: int | None = None) -> int:
    try:
        number = int(value) if not isinstance(value, float) or value.is_integer() else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(value, bool) or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise PlanError(f"{at} must be a whole number {limits}")
    return number


def _number(value: Any, at: str, *, least: float, most: float = math.inf) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (least <= number <= most) or math.isinf(number):
        limits = f"at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
        raise PlanError(f"{at} must be a number {limits}")
    return number


def _consistent(plan: Plan, where: str) -> Plan:
    """`plan` with what its fields imply for each other, or PlanError where they contradict."""
    if plan.layout != "1d" and plan.grid and math.prod(plan.grid) != plan.tp:
        if plan.tp != 1:
            shape = "x".join(map(str, plan.grid))
            raise PlanError(f"{where}: the grid {shape} has {math.prod(plan.grid)} ranks but tp={plan.tp}")
        plan = replace(plan, tp=math.prod(plan.grid))
    if plan.schedule in ("1f1b", "gpipe", "zb-h1") and plan.vpp > 1:
        if plan.schedule != "1f1b":
            raise PlanError(
                f"{where}: schedule={plan.schedule} has no virtual stages; use vpp=1 or interleaved"
            )
        plan = replace(plan, schedule="interleaved")
    if plan.schedule in ("zb-v", "dualpipe-v") and plan.vpp == 1:
        plan = replace(plan, vpp=2)
    if plan.stages is not None and len(plan.stages) != plan.pp * plan.vpp:
        raise PlanError(
            f"{where}: stages lists {len(plan.stages)} stages but pp={plan.pp} x vpp={plan.vpp} has "
            f"{plan.pp * plan.vpp}; list one number of layers for each"
        )
    return plan


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise PlanError(f"cannot read plan file {path}: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{path} is not valid TOML: {error}") from None

"""A parallel plan: how one model is cut over many ranks.

The ranks form a mesh with named axes. Tensor parallelism (`tp`) cuts each matrix, sequence
parallelism (`sp`) the activations between them; context parallelism (`cp`) cuts the sequence
itself; pipeline parallelism (`pp`, with `vpp` virtual stages each) cuts the layers; expert
parallelism (`ep`, with its own tensor degree `etp`) places experts; what is left of the world is
data parallelism (`dp`), over which ZeRO shards states.

Axes are placed on the links in the order of `placement`, the first axis on neighbouring ranks.
"""

import math
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwise.core.errors import MeshwiseError, PlanError, did_you_mean
from meshwise.core.files import read_catalog
from meshwise.core.refusals import broken
from meshwise.core.toml import read_toml
from meshwise.core.units import WEIGHT_BITS, Num, values_by_key
from meshwise.cost.schedule import SCHEDULES
from meshwise.machine.overheads import SOFTWARE
from meshwise.plan.fields import catalog_fields, check_fields, read_field
from meshwise.plan.implementation import IMPLEMENTATIONS, Implementation

_CATALOG = read_catalog("plan_keys.toml")


def _names(key: str) -> tuple[str, ...]:
    return tuple(_CATALOG[key]["names"])


RECOMPUTE, CP_KINDS, DISPATCH = _names("recompute"), _names("cp_kind"), _names("dispatch")
RECOMPUTE_MODULES = _names("recompute_modules")
"""What selective recomputation may cover; see `program.segments`."""
GRID_DIMS = {"1d": 0, "2d": 2, "2d-cp": 2, "2.5d": 3, "3d": 3}
"""The tensor-parallel layouts, and how many numbers the grid of each has."""
CORE_ATTENTION = ("core_attn",)
"""What selective recomputation covers unless a plan says otherwise."""
DUALPIPE_RECOMPUTES = ("mla_up_proj", "layernorm", "moe_act")
"""What DeepSeek-V3 recomputes (arXiv 2412.19437, section 3.2.3)."""
NARROW_DTYPES = ("fp8", "int8", "fp4")
LORA_TARGETS, AXES = _names("lora_targets"), _names("placement")
_NAMES = {"schedules": SCHEDULES, "layouts": GRID_DIMS, "weights": WEIGHT_BITS, "software": SOFTWARE}
"""Names of values that say more than a name where they are stated."""
_ZB_V, _DUALPIPE, _DUALPIPE_V = (SCHEDULES.index(name) for name in ("zb-v", "dualpipe", "dualpipe-v"))
EVEN: tuple[int, ...] = ()
"""`Plan.stages` that hold as many layers each as far as these divide, whatever embedding and head take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Degrees of parallelism and the choices that go with them; see `parse_plan` for the text form.

    Making one raises PlanError where a value, or a combination of values, makes no sense on any model.
    A grid sets tp, 1f1b with vpp > 1 is interleaved, and zb-v and dualpipe-v have vpp=2. An implementation
    runs on software of its own where none is stated. DualPipe with
    experts is DeepSeek's framework (arXiv 2412.19437), whose choices count where the plan leaves them open:
    exchanges behind the other microbatch of a pair (overlap_ep), tokens sent once to a rank, recomputation of
    `DUALPIPE_RECOMPUTES`, and under fp8 tokens sent, and inputs of activation functions kept, in fp8.
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
    dispatch: str = ""
    dispatch_dtype: str = ""
    layout: str = "1d"
    grid: tuple[int, ...] = ()
    panels: int = 1
    zero: int = 1
    zero_group: int | None = None
    recompute: str = ""
    recompute_layers: int | None = None
    recompute_every: int = 1
    recompute_modules: tuple[str, ...] = ()
    loss_chunks: int = 1
    loss_fusion: str | None = None
    dtype: str = "bf16"
    head_dtype: str = "bf16"
    act_input_dtype: str = ""
    optimizer: str = "adam"
    grad_dtype: str = "fp32"
    param_dtype: str = "bf16"
    attention: str = "flash"
    optimizer_in_bwd: bool = False
    offload_optimizer: float = 0.0
    offload_activations: float = 0.0
    overlap_dp: bool = True
    overlap_tp: bool = False
    overlap_ep: bool | None = None
    overlap_pp: bool = True
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    frozen_dtype: str | None = None
    tower: str = "trained"
    tower_dp: bool = False
    tower_recompute: str = ""
    kv_dtype: str = "bf16"
    weight_dtype: str | None = None
    expert_dtype: str | None = None
    wide_modules: tuple[str, ...] = ()
    imbalance: float = 1.0
    implementation: str = "megatron"
    software: str = ""
    placement: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        check_fields(self, KEYS, PlanError)
        for name, value in _implied(self):
            object.__setattr__(self, name, value)
        sizes = numbers_of(self)
        refuse(number_rules(self, sizes), {"plan": self, **sizes})
        if self.grid:
            refuse(grid_rules(self.layout, self.grid, self.tp))
        refuse(_choice_rules(self), {"plan": self})

    @property
    def sequence_parallel(self) -> bool:
        """Whether the activations between the tensor-parallel matmuls are cut along the sequence."""
        return self.tp > 1 if self.sp is None else self.sp

    @property
    def is_paired(self) -> bool:
        """Whether the exchanges of experts hide behind the other microbatch of a pair (see `is_paired`)."""
        has_pair = is_paired(number_of("schedule", self.schedule), self.ep)
        return bool(has_pair) and self.done_by.pairs_microbatches

    @property
    def selective_modules(self) -> tuple[str, ...]:
        """What recompute=selective covers, under this plan."""
        return self.recompute_modules or (DUALPIPE_RECOMPUTES if self.is_paired else CORE_ATTENTION)

    @property
    def done_by(self) -> Implementation:
        """What the software that runs the plan does."""
        return IMPLEMENTATIONS[self.implementation]

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model: tp x cp x pp."""
        return self.tp * self.cp * self.pp

    def data_parallel(self, world_size: int) -> int:
        """The data-parallel degree in a world of `world_size` ranks; PlanError if it does not divide."""
        refuse(world_rules(world_size, numbers_of(self)))
        return world_size // self.model_ranks


KEYS = catalog_fields(_CATALOG, _NAMES)
"""What each field may hold, and what it means."""


def _keys_of(*works: str) -> tuple[str, ...]:
    return tuple(key for key, entry in _CATALOG.items() if entry.get("work") in works)


TRAINING_KEYS, WEIGHT_KEYS, PROMPT_KEYS = _keys_of("training"), _keys_of("formats"), _keys_of("prompts")
"""Keys that mean nothing without a backward; but to an engine; but to an engine that takes prompts alone."""
ENGINE_KEYS = _keys_of("all", "formats")
"""Keys that a serving engine knows."""
IDLE: dict[str, str] = {key: entry["idle"] for key, entry in _CATALOG.items() if "idle" in entry}
"""Where a key of a training plan changes nothing, in terms of the others."""
FSDP2_VALUES = {
    key: tuple(map(KEYS[key].read, entry["fsdp2"])) for key, entry in _CATALOG.items() if "fsdp2" in entry
}
"""What implementation=fsdp2 can be told, where that is less than a plan can say."""


def _implied(plan: Plan) -> Iterator[tuple[str, Any]]:
    """What the fields of a plan imply for each other, as new values of fields."""
    if plan.grid and plan.layout != "1d" and plan.tp == 1:
        yield "tp", math.prod(plan.grid)
    if plan.schedule == "1f1b" and plan.vpp > 1:
        yield "schedule", "interleaved"
    if plan.schedule in ("zb-v", "dualpipe-v") and plan.vpp == 1:
        yield "vpp", 2
    paired = plan.is_paired
    recompute = plan.recompute or ("selective" if paired or plan.recompute_modules else "none")
    narrow = "fp8" if paired and plan.dtype == "fp8" else "bf16"
    for name, value in (
        ("overlap_ep", paired),
        ("dispatch", DISPATCH[paired]),
        ("dispatch_dtype", narrow),
        ("act_input_dtype", narrow),
        ("software", plan.done_by.software),
        ("recompute", recompute),
        ("recompute_modules", plan.selective_modules if recompute == "selective" else ()),
    ):
        if getattr(plan, name) in (None, "", ()):
            yield name, value


PLAN_LISTS: dict[str, list[str]] = read_catalog("plan_lists.toml")
"""Keys by what they are for."""
NUMBERS = PLAN_LISTS["numbers"]
"""Keys that are numbers (see `number_of`), so that a grid of plans can have an axis of each."""
KINDS = {"cp_kind": CP_KINDS, "schedule": SCHEDULES, "dispatch": DISPATCH, "recompute": RECOMPUTE}
"""Those of them whose values are names; the number is the place among these."""


def number_of(key: str, value: Any) -> float:
    """A value of `key` as the number that formulas take; 0 (or infinite: all layers) where it is left out."""
    if key in KINDS:
        return float(KINDS[key].index(value))
    if key == "recompute_layers":
        return math.inf if value is None else float(value)
    return float(value or 0.0)


def numbers_of(plan: Plan) -> dict[str, Num]:
    """All `NUMBERS` of one plan."""
    return {key: number_of(key, getattr(plan, key)) for key in NUMBERS}


def is_paired(schedule: Num, ep: Num) -> Any:
    """Where DualPipe runs the forward of a microbatch of experts beside the backward of another."""
    return ((schedule == _DUALPIPE) | (schedule == _DUALPIPE_V)) & (ep > 1)


def chunks_of_rank(schedule: Num, vpp: Num) -> Num:
    """Chunks of layers that a rank holds: `vpp`, but two in a V that states none."""
    return vpp + ((schedule == _ZB_V) | (schedule == _DUALPIPE_V)) * (vpp == 1)


class Rule(NamedTuple):
    """Where a rule is broken (a truth value, or one for each cell of a grid), and how one plan is told.

    `text` holds names in braces: those of `values`, or of what is told (`error`).
    """

    is_broken: Any
    kind: type[MeshwiseError]
    text: str
    values: Mapping[str, Any]

    def error(self, names: Mapping[str, Any]) -> MeshwiseError:
        """What one plan is told; `names` are its numbers, shown as whole ones, and its choices."""
        kinds = {key: values[int(names[key])] for key, values in KINDS.items() if key in names}
        return self.kind(_Whole().vformat(self.text, (), {**names, **kinds, **self.values}))


def rules_of(table: str, kind: type[MeshwiseError] = PlanError, /, **names: Any) -> Iterator[Rule]:
    """The rules of a table of `catalog/refusals.toml`, whose conditions and sentences are of `names`."""
    return (Rule(is_broken, kind, text, names) for is_broken, text in broken(table, names))


def refuse(rules: Iterable[Rule], names: Mapping[str, Any] | None = None) -> None:
    """The error of the first of `rules` that one plan breaks; `names` are what it is told by."""
    for one in rules:
        if one.is_broken:
            raise one.error(names or {})


class _Whole(string.Formatter):
    """Numbers of a plan, which formulas take as floats, as whole numbers."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return super().format_field(int(value) if isinstance(value, float) else value, format_spec)


def world_rules(world: Num, sizes: Mapping[str, Num]) -> Iterator[Rule]:
    """Rules of the numbers `sizes` of one plan, or of a grid, in a world of so many ranks."""
    names = {axis: sizes[axis] for axis in ("tp", "cp", "pp")}
    least = names["tp"] * names["cp"] * names["pp"]
    found = np.maximum(world // least, 1.0)
    return rules_of("world of a plan", **names, world=world, least=least, stated=sizes["dp"], dp=found)


def number_rules(plan: Plan, sizes: Mapping[str, Num]) -> Iterator[Rule]:
    """Rules among the numbers `sizes` of one plan or of a grid like `plan`, whatever the model."""
    vpp = chunks_of_rank(sizes["schedule"], sizes["vpp"])
    return rules_of(
        "numbers of a plan", plan=plan, sizes=sizes, vpp=vpp, num_chunks=sizes["pp"] * vpp,
        modules="+".join(plan.recompute_modules), listed=len(plan.stages or ()), kinds=KINDS,
    )  # fmt: skip


def _choice_rules(plan: Plan) -> Iterator[Rule]:
    """Rules among the choices of one plan, and of each key that nothing would read."""
    others = "+".join(module for module in plan.recompute_modules if module != "per_op")
    targets = "+".join(plan.lora_targets)
    return rules_of("choices of a plan", plan=plan, narrow=NARROW_DTYPES, others=others, targets=targets)


def grid_rules(layout: str, grid: tuple[int, ...], ranks: int) -> Iterator[Rule]:
    """Rules of a layout, its grid and the ranks of tp; each holds only where those before it do."""
    dims, shape, size = GRID_DIMS[layout], "x".join(map(str, grid)), math.prod(grid)
    words = {"shape": shape, "size": size, "like": "x".join("2" * dims), "num_sides": len({*grid})}
    return rules_of("grid", layout=layout, grid=grid, ranks=ranks, dims=dims, **words)


DEFAULTS: dict[str, Any] = {field.name: getattr(Plan(), field.name) for field in fields(Plan)}
"""The fields of a plan that states nothing."""


def parse_plan(text: str | Mapping[str, Any], software: str = "") -> Plan:
    """The plan that `text` spells: `tp=8,pp=4,schedule=1f1b,...`, or the path of a TOML file of these keys.

    They may be a mapping, too. A layout with a grid may name it: `layout=2d:4x2`. Uneven stages are
    `stages=10-12-10`, a placement `placement=tp-pp-dp-cp`. What is left out has the default of `Plan`, or of
    the argument `software`.

    Raises:
        PlanError: The text or the file cannot be read, or `Plan` refuses what it says.
    """
    try:
        return Plan(**{"software": software, **plan_keys(text)})
    except PlanError as error:
        raise PlanError(f"{text}: {error}" if str(text).endswith(".toml") else str(error)) from None


def plan_keys(text: str | Mapping[str, Any]) -> dict[str, Any]:
    """The keys that `text` (or the TOML file of that path) states, each with a checked value."""
    return {key: read_field(key, value, KEYS, PlanError) for key, value in _read(text).items()}


ANY = "*"
"""All values of a key, where a key may have several."""


def plan_choices(text: str | Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The same where a key may have several values: `tp=4|8`, `tp=*`, a list in a mapping or a TOML file."""
    found = {}
    for key, value in _read(text).items():
        several = value.split("|") if isinstance(value, str) else value
        values = several if isinstance(several, Iterable) else [value]
        read = [one if one in (ANY, None) else read_field(key, one, KEYS, PlanError) for one in values]
        found[key] = tuple(dict.fromkeys(read))
    return found


def _read(text: str | Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a plan's text or file as they are written; `layout=2d:4x2` is a layout and a grid."""
    if isinstance(text, Mapping):
        raw = {**text}
    elif text.endswith(".toml"):
        raw = read_toml(Path(text), PlanError)
    else:
        raw = {**values_by_key(text, "plan", PlanError)}
    for key, value in raw.items():
        if value in ("", [], ()):
            raise PlanError(f"plan item {key!r} is not key=value; write for example tp=8,pp=4")
    layout, colon, grid = str(raw.get("layout", "")).partition(":")
    if colon:
        if "grid" in raw:
            raise PlanError(f"layout={raw['layout']} and grid={raw['grid']} both give a grid; give it once")
        raw |= {"layout": layout, "grid": grid}
    for key in raw:
        if key not in KEYS:
            known = [*KEYS, "--batch", "--seq", "--microbatch"]
            near = did_you_mean(str(key), known, "meshwise list plan shows all")
            raise PlanError(f"unknown plan key {key!r}; {near}")
    return raw


DATA_PARALLEL = "data parallel"
"""What the plan of no keys is called."""


@lru_cache(256)
def plan_text(plan: Plan) -> str:
    """The shortest text that `parse_plan` turns back into an equal plan."""
    stated = {key: getattr(plan, key) for key in KEYS if getattr(plan, key) != DEFAULTS[key]}
    made = Plan(**stated)  # of which some fields may imply others
    stated |= {key: getattr(plan, key) for key in KEYS if getattr(plan, key) != getattr(made, key)}
    for key in reversed(tuple(stated)):
        fewer = {other: value for other, value in stated.items() if other != key}
        if _makes(fewer, plan):
            stated = fewer
    texts = {key: KEYS[key].show(value) for key, value in stated.items()}
    if "grid" in texts:
        texts["layout"] += f":{texts.pop('grid')}"
    return ",".join(f"{key}={text}" for key, text in texts.items())


def _makes(keys: dict[str, Any], plan: Plan) -> bool:
    try:
        return Plan(**keys) == plan
    except PlanError:
        return False

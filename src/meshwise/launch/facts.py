"""What a plan says about a job, in the terms that frameworks ask for it; and back.

Facts are the keys of a plan (resolved: what it leaves out is filled in), the workload, and what follows from
them: a framework may ask for the number of replicas of a sharded model instead of the ranks that share it.
`facts_of` states them for a plan, `derive` adds what follows, `plan_of` reads a plan out of facts.
"""

import re
from dataclasses import replace
from typing import Any

import numpy as np

from meshwise.core.errors import DataError
from meshwise.core.expressions import formulas, value_of
from meshwise.core.refusals import refuse
from meshwise.launch.tables import launch_tables
from meshwise.machine.hardware import Cluster
from meshwise.machine.overheads import SOFTWARE
from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import DEFAULTS, ENGINE_KEYS, EVEN, IDLE, KEYS, LORA_TARGETS, WEIGHT_KEYS, Plan
from meshwise.plan.stages import chunk_layers, layers_of_chunks
from meshwise.program.implementation import loss_fusion

Facts = dict[str, Any]

EAGER = "eager"
"""The loss of software that compiles nothing."""
MOST_LAYOUT = 10**5


def facts_of(model: Model, mesh: Mesh, cluster: Cluster) -> Facts:
    """The facts of one plan, resolved and its layers placed; a key without effect is left out."""
    loss = loss_fusion(mesh.plan)
    is_eager = SOFTWARE[mesh.plan.software].is_eager and loss == "none"
    facts: Facts = {key: getattr(mesh.plan, key) for key in KEYS} | {"loss": EAGER if is_eager else loss}
    facts |= {key: int(getattr(mesh, key)) for key in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "ulysses")}
    facts |= {key: int(getattr(mesh, key)) for key in ("batch", "seq", "microbatch")}
    group = int(mesh.zero_group)
    facts |= {
        "sp": mesh.plan.sequence_parallel,
        "zero_group": None if group == facts["dp"] * facts["cp"] else group,
        **{key: getattr(model, key) for key in ("num_layers", "mtp_layers")},
        "num_gpus": cluster.num_chips,
        "chip": cluster.chip,
        "has_experts": model.moe is not None,
        "num_chosen": model.moe and model.moe.computed,
        "redundant_experts": (model.moe and model.moe.copies) or None,
    }
    sizes = layers_of_chunks(model, mesh)
    facts["stages"] = sizes if len(set(sizes)) > 1 else None
    for key in set(KEYS) - set(ENGINE_KEYS) if mesh.serves else idle_keys(facts):
        del facts[key]
    return derive(facts) | (formulas(launch_tables().served, _FUNCTIONS | facts) if mesh.serves else {})


def without_effect(facts: Facts) -> dict[str, Any]:
    """Keys of a training plan, and whether (in a grid: in which cells) they change nothing in this world."""
    dp = facts.get("dp")
    names = facts | {"replicas": 0 if dp is None else dp * facts["cp"]}
    return dict.fromkeys(WEIGHT_KEYS, True) | {key: value_of(where, names) for key, where in IDLE.items()}


def idle_keys(facts: Facts) -> set[str]:
    """Keys of one training plan that change nothing in this world."""
    return {key for key, idle in without_effect(facts).items() if idle}


def resharding(zero: Any, pp: Any) -> Any:
    """When torchtitan gives gathered weights back, for each ZeRO stage of a grid.

    Weights that stay gathered are stage 2: gradients are reduced in each microbatch. In a pipeline they are
    stage 1: torch's schedules reduce once a step.
    """
    names = np.array([["none", "never_summed", "never", "always"], ["none", "never", "never", "always"]])
    return names[np.asarray(pp > 1, dtype=np.intp), np.asarray(zero, dtype=np.intp)]


def derive(facts: Facts) -> Facts:
    """`facts`, and what follows from them (`catalog/launch.toml`); None where it does not apply."""
    ones = {key: int(facts.get(key) or 1) for key in ("tp", "cp", "pp", "dp", "ep", "vpp")}
    known: Facts = {"zero": 0, "overlap_pp": True, "overlap_ep": False} | facts | ones
    known["recompute_modules"] = facts.get("recompute_modules") or ()
    found = dict.fromkeys(("adapted", "adapts"))
    found |= formulas(launch_tables().derived, _FUNCTIONS | known)
    if facts.get("lora_rank"):  # layers with adapters, by their names in `transformers`
        names = tuple(f"{name}_proj" for name in facts.get("lora_targets") or LORA_TARGETS)
        found |= {"adapted": names, "adapts": names if facts.get("lora_targets") else "all-linear"}
    return facts | found


def _quantization(dtype: str, weights: str | None, experts: str | None) -> str:
    """The format in which an engine keeps weights, the one of experts, and the type that it computes in.

    Each only where it is not what the format before it implies.
    """
    weights = weights or {"fp8": "fp8", "fp4": "nvfp4"}.get(dtype)
    experts = None if experts == weights else experts
    found = ", ".join(filter(None, [weights, experts and f"experts {experts}"])) or "none"
    implied = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}.get(weights or experts or "", "bf16")
    return found if dtype in (implied, "fp16", "fp32") else f"{found} in {dtype}"


def plan_of(facts: Facts) -> Plan:
    """The plan that facts say, without keys that only repeat what follows from others."""
    idle = idle_keys(dict(DEFAULTS) | facts)
    keys = {key: facts[key] for key in KEYS if key in facts and key not in idle and facts[key] is not None}
    tp, num_chunks = keys.get("tp", 1), keys.get("pp", 1) * keys.get("vpp", 1)
    replicas = (facts.get("dp") or 0) * facts["cp"]
    for key, implied in (("sp", tp > 1), ("etp", tp), ("zero_group", replicas)):
        if keys.get(key) == implied:
            del keys[key]
    num_layers = facts.get("num_layers") or 0
    even = chunk_layers(num_layers, num_chunks) if 0 < num_chunks <= num_layers else None
    is_listed = "stages" in keys and num_layers % num_chunks > 0  # no schedule deals these out by itself
    if keys.get("pp", 1) > 1 and keys.get("stages", even) == even and not is_listed:
        keys["stages"] = EVEN
    keys.pop("dp", None)
    stated = keys.pop("loss_fusion", None)
    plan = Plan(**keys)
    return plan if stated in (None, loss_fusion(plan)) else replace(plan, loss_fusion=stated)


def recover(facts: Facts) -> Facts:
    """The plan's keys out of the facts that a framework states in its own terms (`catalog/launch.toml`)."""
    found = formulas(launch_tables().recovered, _FUNCTIONS | READING | facts | {"stated": facts})
    asked = dict.fromkeys(("pipeline_layout", "recompute_form", "recompute_num", "instances"))
    refuse("recovered job", DataError, **asked | facts | found)
    return facts | {key: value for key, value in found.items() if value is not None or key in facts}


# --- Megatron-LM's text of uneven stages: Et*19|t*21|t*21|t*19L ----------------------------------


def _layout_text(stages: tuple[int, ...], mtp_layers: int) -> str:
    texts = [f"t*{size}" if size else "" for size in stages]
    texts[0], texts[-1] = "E" + texts[0], texts[-1] + "m" * mtp_layers + "L"
    return "|".join(texts)


def _layout_of_ends(
    num_layers: int | None, pp: int | None, chunks: int, first: int | None, last: int | None,
    mtp_layers: int | None,
) -> str | None:  # fmt: skip
    """The layout of a pipeline whose first or last stage has its own number of layers, in chunks."""
    if not (num_layers and pp and (first or last)):
        return None
    between = pp - bool(first) - bool(last)
    left = num_layers - (first or 0) - (last or 0)
    if left < 0 or between < 0 or left % max(between, 1):
        raise DataError(f"{num_layers} layers do not divide into {pp} stages of which the ends are stated")
    inner = [left // max(between, 1)] * between
    stages = [first or 0] * bool(first) + inner + [last or 0] * bool(last)
    return _layout_text(tuple(size // chunks for size in stages) * chunks, mtp_layers or 0)


def _chunks_of(num_layers: int | None, pp: int | None, layers_per_chunk: int | None) -> int | None:
    return max(num_layers // pp // layers_per_chunk, 1) if num_layers and pp and layers_per_chunk else None


def _layout_stages(text: str) -> tuple[int, ...]:
    plain = text.replace(",", "").replace(" ", "")
    while group := re.search(r"\(([^()]*)\)\*(\d{1,4})", plain):
        plain = plain[: group.start()] + group[1] * int(group[2]) + plain[group.end() :]
        if len(plain) > MOST_LAYOUT:
            raise DataError(f"--pipeline-model-parallel-layout has more than {MOST_LAYOUT} characters")
    stages = plain.split("|")
    if wrong := [stage for stage in stages if not re.fullmatch(r"(E|L|m|t(\*\d+)?)*", stage)]:
        raise DataError(f"--pipeline-model-parallel-layout {text} is not understood at {wrong[0]!r}")
    return tuple(sum(int(num or 1) for num in re.findall(r"t(?:\*(\d+))?", stage)) for stage in stages)


_FUNCTIONS = {
    **{"bool": bool, "str": str, "max": max, "layout_text": _layout_text, "quantization_of": _quantization},
    "resharding_of": lambda zero, pp: str(resharding(zero, pp)),
}
"""What formulas of the catalog call."""
READING: dict[str, Any] = {
    "layout_of": lambda text, mtp_layers: _layout_text(_layout_stages(text), mtp_layers or 0),
    **{"layout_of_ends": _layout_of_ends, "chunks_of": _chunks_of, "layout_stages": _layout_stages},
    "len": len,
}
"""What those of `[instead]` and `[recovered]` call."""

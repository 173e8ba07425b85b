"""Jobs of post-training as settings of verl and NeMo-RL, and such settings as a job.

Both ways go through *facts*, plain names and values: `catalog/rl_settings.toml` says what they are of a job,
which setting holds which fact, and what options they are; `catalog/rl_arguments.json` which settings a
version has, of which type and default.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwise.core.errors import DataError, PlanError
from meshwise.core.expressions import formulas
from meshwise.core.files import read_catalog, read_text
from meshwise.core.refusals import refuse
from meshwise.core.toml import nested
from meshwise.launch.arguments import framework_arguments
from meshwise.launch.read import parse_yaml, shell_words
from meshwise.launch.write import File, Launch, yaml_text
from meshwise.plan.plan import KEYS, Plan, plan_text
from meshwise.rl.framework import OVERLAPPED
from meshwise.rl.job import RlJob

Facts = dict[str, Any]

COMMANDS = {
    "verl": "python3 -m verl.trainer.main_ppo",
    "nemo-rl": "uv run examples/run_grpo.py --config examples/configs/recipe.yaml",
}
BASE_RECIPE = "grpo_math_1B.yaml"
"""The recipe of NeMo-RL in examples/configs from which all others inherit."""
TRAINED_KEYS = ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "zero", "recompute", "implementation", "dtype")
"""Keys of a training plan that settings hold."""


@cache
def _tables() -> dict[str, Any]:
    return read_catalog("rl_settings.toml")


def facts_of(job: RlJob) -> Facts:
    """What a job is, in plain names."""
    names = {"job": job, "of": job.rollouts, "plan": job.train_plan, "engine_plan": job.rollout_plan}
    names |= {"algorithm": job.algorithm, "scorers": job.scorers, "overlaps": job.mode in OVERLAPPED}
    return formulas(_tables()["facts"], _FUNCTIONS | names)


def _table(framework: str, facts: Facts) -> dict[str, str]:
    """The settings that hold for what `facts` say, and the fact of each."""
    parts = _tables()[framework]
    chosen = ["always", facts.get("trainer", "megatron")]
    chosen += ["split"] * (not facts.get("is_colocated", True))
    chosen += ["overlapped"] * bool(facts.get("is_overlapped"))
    return {setting: fact for name in chosen for setting, fact in parts[name].items()}


def write_settings(job: RlJob, framework: str) -> Launch:
    """What starts a job under verl or NeMo-RL; PlanError for what the framework refuses."""
    facts, known = facts_of(job), framework_arguments(framework)
    plan, node = job.train_plan, facts["node_gpus"]
    refuse(
        framework, PlanError, job=job, of=job.rollouts, plan=plan, is_fsdp2=facts["is_fsdp2"], node=node,
        is_uneven=job.is_split and facts["nodes"] > 1 and job.rollout_gpus % node,
    )  # fmt: skip
    table = _table(framework, facts).items()
    settings = {name: facts[fact] for name, fact in table if facts[fact] is not None}
    settings = {name: _typed(known.arguments[name].type, one) for name, one in settings.items()}
    words = [f"{name}={_word(value)}" for name, value in settings.items()]
    recipe = f"defaults: {BASE_RECIPE}\n{yaml_text(nested(settings))}"
    text = recipe if framework == "nemo-rl" else "\n".join(words) + "\n"
    file = File("recipe.yaml" if framework == "nemo-rl" else "overrides.txt", text)
    command = COMMANDS[framework] + (f" {shlex.join(words)}" if framework == "verl" else "")
    return Launch(
        framework=framework, version=known.version, files=(file, File("job.sh", f'{command} "$@"\n')),
        arguments=tuple(words), not_expressed=tuple(_not_expressed(job, framework)), command=command,
        elsewhere=("model: policy.model_name or actor_rollout_ref.model.path names its checkpoint", "data"),
    )  # fmt: skip


def _typed(kind: str, value: Any) -> Any:
    return {"float": float, "int": int}.get(kind, lambda same: same)(value)


def _word(value: Any) -> str:
    return msgspec.json.encode(value).decode().strip('"')


def _not_expressed(job: RlJob, framework: str) -> list[str]:
    plan, lost = job.train_plan, []
    usual = Plan(implementation=plan.implementation)
    keys = [key for key in KEYS if getattr(plan, key) != getattr(usual, key) and key not in TRAINED_KEYS]
    if framework == "nemo-rl" and plan.vpp > 1:
        keys.append("vpp")
    lost += [f"{key}={KEYS[key].show(getattr(plan, key))}: no setting says it" for key in keys]
    if job.rollouts.oversample > 1:
        lost.append("oversample: DAPO of verl and NeMo-RL's use_dynamic_sampling decide while they run")
    return lost


# --- back --------------------------------------------------------------------------------------


def read_settings(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The options of `rl` that a file states, its framework among them, and what no option holds.

    A YAML file, or a script with `name=value` words. DataError where it is of neither framework.
    """
    stated = {name: value for name, value in _stated(path).items() if "${" not in str(value)}
    framework = max(COMMANDS, key=lambda name: len(stated.keys() & {*framework_arguments(name).arguments}))
    known = framework_arguments(framework)
    names = stated.keys() & known.arguments.keys()
    if not names:
        raise DataError(f"{path} has no setting of verl or NeMo-RL; name a recipe, or a script of overrides")
    for name in names:
        kind = known.arguments[name].type
        if re.search("int|float", kind) and not isinstance(stated[name], int | float | None):
            raise DataError(f"{path}: {name} {stated[name]} must be of type {kind}")
    first: Facts = {"trainer": "megatron"}
    for parts in _tables()[framework].values():
        first |= {fact: stated[name] for name, fact in parts.items() if name in stated}
    if first.get("is_fsdp2") is True or str(first["trainer"]).startswith("fsdp"):
        first["trainer"] = "fsdp2"
    if first["trainer"] not in _tables()[framework]:
        raise DataError(f"{path}: the trainer {first['trainer']} is not read; megatron, fsdp and fsdp2 are")
    # verl's asynchronous jobs have files of their own
    first.setdefault("is_overlapped", "staleness" in first)
    table = _table(framework, first)
    defaults = {fact: known.arguments[name].default for name, fact in table.items()}
    given = {fact: value for fact, value in defaults.items() if "${" not in str(value) and value != "???"}
    facts = given | first | {fact: stated[name] for name, fact in table.items() if name in stated}
    unread = sorted(f"{name}={stated[name]}" for name in names - table.keys())
    return _options(framework, facts, path), unread


def _stated(path: Path) -> Facts:
    text = read_text(path, "job")
    if re.search(r"^[\w-]+:", text, re.MULTILINE):
        found = parse_yaml(text, path)
    else:
        words = [word.lstrip("+") for word in shell_words(text, path)]
        found = dict(word.split("=", 1) for word in words if re.match(r"[\w.]+\.[\w.]+=", word))
    return {name: _parsed(value) for name, value in found.items()}


def _parsed(value: Any) -> Any:
    text = str(value).strip("'\"")
    try:
        return msgspec.json.decode(text.lower())
    except msgspec.DecodeError:
        return text


def _options(framework: str, facts: Facts, path: Path) -> dict[str, Any]:
    """The options of `rl` that facts are."""
    try:
        found = {name: facts[name] for name in ("prompts", "samples", "memory_frac", "engine")}
        found |= formulas(_tables()["options"], _FUNCTIONS | facts)
        names = ("tp", "pp", "cp", "ep", "vpp", *(("etp",) if (facts.get("ep") or 1) > 1 else ()))
        keys: dict[str, Any] = {key: facts[key] for key in names if facts.get(key)}
        keys |= {} if facts["trainer"] == "megatron" else {"zero": 3, "implementation": "fsdp2"}
        keys |= {"sp": False} if facts.get("tp", 1) > 1 and facts.get("sequence_parallel") is False else {}
        plan = Plan(**keys, recompute=found.pop("recompute"))
        tp, pp, ep = (facts.get(f"rollout_{axis}") or 1 for axis in ("tp", "pp", "ep"))
        replicas = facts.get("rollout_dp") or 1  # tp x replicas ranks share experts, if any do
        engine = Plan(tp=tp, pp=pp, ep=ep, dp=replicas if ep == 1 and replicas > 1 else None)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise DataError(f"{path} does not say enough of a job of {framework}: {error}") from None
    found = {name: value for name, value in found.items() if value is not None and name not in _BETWEEN}
    plans = {"train_plan": plan_text(plan), "rollout_plan": plan_text(engine) or "tp=1"}
    return found | plans | {"framework": framework}


_FUNCTIONS = {"bool": bool, "int": int, "max": max, "min": min, "round": round}
_BETWEEN = ("split", "longest", "cap")
"""What formulas of the catalog call, and what those of options only need on the way."""

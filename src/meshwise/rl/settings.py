"""Jobs of post-training as settings of verl and NeMo-RL, and such settings as a job.

Both ways go through *facts*, plain names and values: `catalog/rl_settings.toml` says which setting holds
which fact, `catalog/rl_arguments.json` which settings a version has, of which type and default.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwise.core.errors import DataError, PlanError
from meshwise.core.files import catalog_text, read_catalog, read_text
from meshwise.core.refusals import refuse
from meshwise.core.toml import nested
from meshwise.launch.read import parse_yaml, shell_words
from meshwise.launch.write import File, Launch, yaml_text
from meshwise.plan.plan import DEFAULTS, KEYS, Plan, plan_text
from meshwise.rl.framework import OVERLAPPED
from meshwise.rl.job import RlJob

Facts = dict[str, Any]

COMMANDS = {
    "verl": "python3 -m verl.trainer.main_ppo",
    "nemo-rl": "uv run examples/run_grpo.py --config examples/configs/recipe.yaml",
}
ESTIMATORS = {"grpo": "grpo", "rloo": "rloo", "dapo": "grpo", "ppo": "gae"}
"""verl's names of advantage estimators, by algorithm."""
BASE_RECIPE = "grpo_math_1B.yaml"
"""The recipe of NeMo-RL in examples/configs from which all others inherit."""
TRAINED_KEYS = ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "zero", "recompute", "implementation", "dtype")
"""Keys of a training plan that settings hold."""
KL_PENALTY = 0.01
"""NeMo-RL's default, where a reference scores."""


class RlSetting(msgspec.Struct, frozen=True):
    """One setting of a framework."""

    type: str
    default: Any


class RlSettings(msgspec.Struct, frozen=True):
    """All settings of a framework that a job maps to, at a version; the file has source and date too."""

    version: str
    arguments: dict[str, RlSetting]


@cache
def known_settings() -> dict[str, RlSettings]:
    """The settings of every framework."""
    return msgspec.json.decode(catalog_text("rl_arguments.json"), type=dict[str, RlSettings])


@cache
def _tables() -> dict[str, dict[str, dict[str, str]]]:
    return read_catalog("rl_settings.toml")


def facts_of(job: RlJob, algorithm: str) -> Facts:
    """What a job is, in plain names."""
    rollouts, plan, engine = job.rollouts, job.train_plan, job.rollout_plan
    overlapped, trainer = job.mode in OVERLAPPED, "megatron" if plan.implementation == "megatron" else "fsdp2"
    facts: Facts = {}
    for of, names in (
        (rollouts, ("prompts", "samples", "prompt", "max_output", "turns", "longest")),
        (job, ("pack_length", "score_tokens", "memory_frac", "in_flight", "staleness")),
        (plan, ("tp", "pp", "cp")),
    ):
        facts |= {name: getattr(of, name) for name in names}
    facts |= {f"rollout_{axis}": getattr(engine, axis) for axis in ("tp", "pp", "ep")}
    facts |= {
        "ep": plan.ep if job.model.moe else None,
        "etp": (plan.tp if plan.etp is None else plan.etp) if job.model.moe else None,
        "has_turns": rollouts.turns > 1,
        "estimator": ESTIMATORS[algorithm],
        "engine": (job.engine or job.framework.engine).partition(",")[0],
        "rollout_dp": job.engine_gpus // (engine.tp * engine.pp),
        "trainer": trainer,
        "is_megatron": trainer == "megatron",
        "is_fsdp2": trainer == "fsdp2",
        "is_packed": True,
        "microbatch": 1,
        "has_reference": any(name == "reference" for name, _ in job.scorers),
        "kl_penalty": KL_PENALTY * any(name == "reference" for name, _ in job.scorers),
        "vpp": plan.vpp if plan.vpp > 1 else None,
        "sequence_parallel": bool(plan.sequence_parallel),
        "granularity": None if plan.recompute == "none" else plan.recompute,
        "is_recomputed": plan.recompute == "full",
        "update_prompts": rollouts.prompts / job.updates,
        "update_samples": rollouts.num_samples // job.updates,
        "is_colocated": not job.is_split,
        "is_offloaded": not job.is_split,
        "is_overlapped": overlapped,
    }
    node = min(job.cluster.chips_per_host, job.cluster.num_chips)
    pools = {"": job.cluster.num_chips, "train_": job.train_gpus, "rollout_": job.rollout_gpus}
    for pool, gpus in pools.items():
        facts |= {f"{pool}nodes": -(-gpus // node), f"{pool}node_gpus": min(node, gpus)}
    return facts


def _table(framework: str, facts: Facts) -> dict[str, str]:
    """The settings that hold for what `facts` say, and the fact of each."""
    parts = _tables()[framework]
    chosen = ["always", facts.get("trainer", "megatron")]
    chosen += ["split"] * (not facts.get("is_colocated", True))
    chosen += ["overlapped"] * bool(facts.get("is_overlapped"))
    return {setting: fact for name in chosen for setting, fact in parts[name].items()}


def write_settings(job: RlJob, framework: str, algorithm: str) -> Launch:
    """What starts a job under verl or NeMo-RL; PlanError for what the framework refuses."""
    facts, known = facts_of(job, algorithm), known_settings()[framework]
    plan, node = job.train_plan, facts["node_gpus"]
    refuse(
        framework, PlanError, job=job, of=job.rollouts, plan=plan, is_fsdp2=facts["is_fsdp2"], node=node,
        is_uneven=job.is_split and facts["nodes"] > 1 and job.rollout_gpus % node,
    )  # fmt: skip
    settings = {
        name: facts[fact] for name, fact in _table(framework, facts).items() if facts[fact] is not None
    }
    settings = {name: _typed(known.arguments[name], value) for name, value in settings.items()}
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


def _typed(setting: RlSetting, value: Any) -> Any:
    return {"float": float, "int": int}.get(setting.type, lambda same: same)(value)


def _word(value: Any) -> str:
    return msgspec.json.encode(value).decode().strip('"')


def _not_expressed(job: RlJob, framework: str) -> list[str]:
    plan, lost = job.train_plan, []
    keys = [key for key in KEYS if getattr(plan, key) != DEFAULTS[key] and key not in TRAINED_KEYS]
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
    stated = _stated(path)
    every = known_settings()
    framework = max(every, key=lambda name: len(stated.keys() & every[name].arguments.keys()))
    known = every[framework]
    names = stated.keys() & known.arguments.keys()
    if not names:
        raise DataError(f"{path} has no setting of verl or NeMo-RL; name a recipe, or a script of overrides")
    first: Facts = {"trainer": "megatron"}
    for parts in _tables()[framework].values():
        first |= {fact: stated[name] for name, fact in parts.items() if name in stated}
    if first.get("is_fsdp2") is True or str(first["trainer"]).startswith("fsdp"):
        first["trainer"] = "fsdp2"
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
    colocated, overlapped = facts.get("is_colocated", True), facts.get("is_overlapped") or False
    mode = "colocated" if colocated else "split"
    if not colocated and overlapped:
        mode = "one_step_off" if facts.get("staleness") == 1 else "async"
    try:
        longest = facts.get("longest") or facts["prompt"] + facts["max_output"]
        cap = facts.get("max_output", longest)
        prompt = facts.get("prompt") or max(longest - cap, 1)
        samples = facts["prompts"] * facts["samples"]
        updates = facts["prompts"] / facts["update_prompts"] if "update_prompts" in facts else (
            samples / facts["update_samples"]
        )  # fmt: skip
        names = ("tp", "pp", "cp", "ep", "vpp", *(("etp",) if (facts.get("ep") or 1) > 1 else ()))
        keys: dict[str, Any] = {key: facts[key] for key in names if facts.get(key)}
        full = facts.get("is_recomputed") or facts.get("granularity") == "full"
        keys |= {} if facts["trainer"] == "megatron" else {"zero": 3, "implementation": "fsdp2"}
        keys |= {"sp": False} if facts.get("tp", 1) > 1 and facts.get("sequence_parallel") is False else {}
        plan = Plan(**keys, recompute="full" if full else facts.get("granularity") or "none")
        tp, pp, ep = (facts.get(f"rollout_{axis}") or 1 for axis in ("tp", "pp", "ep"))
        replicas = facts.get("rollout_dp") or 1  # tp x replicas ranks share experts, if any do
        engine = Plan(tp=tp, pp=pp, ep=ep, dp=replicas if ep == 1 and replicas > 1 else None)
        found: dict[str, Any] = {
            "prompts": facts["prompts"], "samples": facts["samples"], "prompt": prompt,
            "max_output": min(cap, longest - prompt) or cap, "updates": max(int(updates), 1), "mode": mode,
            "train_plan": plan_text(plan), "rollout_plan": plan_text(engine) or "tp=1",
            "memory_frac": facts["memory_frac"], "framework": framework, "engine": facts["engine"],
        }  # fmt: skip
        if mode != "colocated":
            found["rollout_gpus"] = facts["rollout_nodes"] * facts["rollout_node_gpus"]
        if mode in OVERLAPPED:
            found["partial"] = facts["in_flight"]
        if mode == "async":
            found["staleness"] = max(round(facts["staleness"]), 1)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise DataError(f"{path} does not say enough of a job of {framework}: {error}") from None
    found |= {name: facts[name] for name in ("pack_length", "score_tokens") if facts.get(name)}
    found["reference"] = bool(facts.get("kl_penalty", facts.get("has_reference", True)))
    return found

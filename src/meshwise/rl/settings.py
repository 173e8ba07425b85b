"""Jobs of post-training as settings of verl and NeMo-RL, and such settings as a job.

Both ways go through *facts*, plain names and values: `catalog/rl_settings.toml` says what they are of a job,
which setting holds which fact, and what options they are; `catalog/rl_arguments.json` which settings a
version has, of which type and default.
"""

import operator
import re
import shlex
from collections.abc import Callable, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

import msgspec

from meshwise.core.errors import DataError, PlanError
from meshwise.core.expressions import formulas
from meshwise.core.files import read_catalog, read_text
from meshwise.core.refusals import refuse, told
from meshwise.core.toml import flat, nested
from meshwise.core.yaml import parse_yaml, yaml_text
from meshwise.launch.arguments import framework_arguments
from meshwise.launch.facts import Facts
from meshwise.launch.read import shell_words
from meshwise.launch.write import File, Launch
from meshwise.plan.plan import KEYS, Plan, plan_text
from meshwise.rl.framework import OVERLAPPED
from meshwise.rl.job import RlJob
from meshwise.serve.engine import parse_engine

FRAMEWORKS = ("verl", "nemo-rl")
_KEYS = ("tp", "sp", "pp", "cp", "ep", "etp", "zero", "recompute", "implementation", "dtype", "lora_rank")
TRAINED_KEYS = {"verl": (*_KEYS, "vpp", "recompute_layers", "recompute_every"), "nemo-rl": _KEYS}
"""Keys of a training plan that settings of a framework hold."""
ROLLOUT_KEYS = ("tp", "pp", "ep", "dp", "sp", "etp", "implementation", "software")
"""Keys of an engine's plan that settings hold, or that no engine has."""

BASE_RECIPE = "grpo_math_1B.yaml"
"""The recipe of NeMo-RL in examples/configs from which all others inherit."""
_MOST_STEPS, _MOST_CHARACTERS = 20, 1000
"""Recipes that inherit one from another and references of a setting; characters of a value on the way."""
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {
    "mul": operator.mul,
    "add": operator.add,
    "div": operator.truediv,
    "max": max,
    "min": min,
}


@cache
def _tables() -> dict[str, Any]:
    return read_catalog("rl_settings.toml")


def facts_of(job: RlJob) -> Facts:
    """What a job is, in plain names."""
    names = {"job": job, "of": job.rollouts, "plan": job.train_plan, "engine_plan": job.rollout_plan}
    names |= {"algorithm": job.algorithm, "scorers": job.scorers, "overlaps": job.mode in OVERLAPPED}
    names |= {"serves": parse_engine(job.engine or job.framework.engine)}
    return formulas(_tables()["facts"], _FUNCTIONS | names)


def _table(framework: str, facts: Facts) -> dict[str, str]:
    """The settings that hold for what `facts` say, and the fact of each."""
    parts = _tables()[framework]
    chosen = ["always", facts.get("trainer", "megatron")]
    chosen += ["split"] * (not facts.get("is_colocated", True))
    chosen += ["overlapped"] * bool(facts.get("is_overlapped"))
    chosen += ["queued"] * bool(facts.get("is_queued")) + ["filtered"] * bool(facts.get("filters_groups"))
    return {setting: fact for name in chosen for setting, fact in parts.get(name, {}).items()}


def write_settings(job: RlJob, framework: str, assumed: Sequence[str] = ()) -> Launch:
    """What starts a job under verl or NeMo-RL, and what is `assumed`; PlanError for what it refuses."""
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
    (program,) = formulas(_tables()["program"][framework], facts).values()
    command = program + (f" {shlex.join(words)}" if framework == "verl" else "")
    lies = ["data"] + ["recipe.yaml: copy it into examples/configs of NeMo-RL"] * (framework == "nemo-rl")
    return Launch(
        framework=framework, version=known.version, files=(file, File("job.sh", f'{command} "$@"\n')),
        arguments=tuple(words), not_expressed=tuple(_not_expressed(job, framework)), command=command,
        elsewhere=("model: policy.model_name or actor_rollout_ref.model.path names it", *lies, *assumed),
    )  # fmt: skip


def _typed(kind: str, value: Any) -> Any:
    return {"float": float, "int": int}.get(kind, lambda same: same)(value)


def _word(value: Any) -> str:
    return msgspec.json.encode(value).decode().strip('"')


def _not_expressed(job: RlJob, framework: str) -> list[str]:
    plan, lost = job.train_plan, []
    known, verl, is_fsdp2 = TRAINED_KEYS[framework], framework == "verl", bool(plan.done_by.parts)
    usual = Plan(implementation=plan.implementation, pp=plan.pp, vpp=plan.vpp if "vpp" in known else 1)
    keys = [key for key in KEYS if key not in known and getattr(plan, key) != getattr(usual, key)]
    keys += ["dtype"] * (plan.dtype != "bf16" and (plan.dtype != "fp8" or verl or is_fsdp2))
    lost += [f"{key}={KEYS[key].show(getattr(plan, key))}: no setting says it" for key in keys]
    engine = {key: getattr(job.rollout_plan, key) for key in KEYS if key not in ROLLOUT_KEYS}
    said = {**{key: getattr(Plan(), key) for key in engine}, "weight_dtype": "fp8", "dtype": "bf16"}
    stated = {key: value for key, value in engine.items() if value not in (None, said[key])}
    lost += [f"rollout {key}={KEYS[key].show(value)}: no setting says it" for key, value in stated.items()]
    return lost + told("untold of rl", job=job, of=job.rollouts, plan=plan, verl=verl, is_fsdp2=is_fsdp2)


# --- back --------------------------------------------------------------------------------------


def read_settings(path: Path, prompt: int | None = None) -> tuple[dict[str, Any], list[str]]:
    """The options of `rl` that a file states, its framework among them, and what no option holds.

    `prompt`: tokens of the mean prompt; its answer has the others of a sample [the cap or the usual prompt].
    A YAML file with the recipes that it inherits from (`defaults:`), or a script with `name=value` words;
    references to other settings (`${policy.precision}`) are followed. DataError where it is of neither.
    """
    every = _stated(path)
    written = {name: value for name, value in every.items() if value != ""}
    framework = max(FRAMEWORKS, key=lambda name: len(written.keys() & {*framework_arguments(name).arguments}))
    known = framework_arguments(framework).arguments
    if not any(name.startswith(tuple(_tables()["read"][framework])) for name in written):
        raise DataError(f"{path} is no job of verl or NeMo-RL; name a recipe of GRPO, or a script")
    defaults = {name: one.default for name, one in known.items() if one.default not in (None, "???")}
    settings = {name: _parsed(value) for name, value in resolved({**defaults, **written}).items()}
    stated = {name: settings[name] for name in (*known, _ONE_STEP_OFF) if name in written}
    first = _kind(framework, stated)
    if first["trainer"] not in _tables()[framework]:
        raise DataError(f"{path}: the trainer {first['trainer']} is not read; megatron, fsdp and fsdp2 are")
    table = _table(framework, first)
    facts = {fact: settings[name] for name, fact in table.items() if name in settings}
    for name in stated:
        if table.get(name, _OF_CLUSTER[0]) not in _OF_CLUSTER:
            _check_type(name, known[name].type, stated[name], path)
    facts |= {} if prompt is None else {"prompt": prompt}
    options = _options(framework, first | facts, {fact: name for name, fact in table.items()}, path)
    assumed = formulas(_tables()["assumed"], _FUNCTIONS | first | facts)
    unread = [f"{name} is empty and priced as by default" for name in every if name in {*table} - {*written}]
    unread += _others(framework, settings, {*written} - {*table})
    for name, fact in table.items():
        if name in settings and settings[name] != assumed.get(fact, settings[name]):
            unread.append(f"{name}={settings[name]} is priced as {assumed[fact]}")
    return options, [*unread, *told("read rl job", prompt=options["prompt"], stated=prompt)]


def _others(framework: str, settings: Facts, names: set[str]) -> list[str]:
    """Of settings that no option holds what may change a price: it is not as usual, not off, not free."""
    known = framework_arguments(framework).arguments
    switches = (name for name in settings if name.endswith((".enable", ".enabled")))
    off = (f"{re.escape(name.rpartition('.')[0])}\\..*" for name in switches if not settings[name])
    free = re.compile("|".join([*_tables()["free"][framework], *off]))
    changed = {name for name in names & known.keys() if settings[name] != known[name].default}
    changed |= {name for name in names - known.keys() if settings[name] and not free.fullmatch(name)}
    return sorted(f"{name}={settings[name]} is not priced" for name in changed - {_MODEL})


def _kind(framework: str, stated: Facts) -> Facts:
    """What any part of the framework's table finds stated, and the facts by which its parts are chosen."""
    found: Facts = {"trainer": "megatron"}
    for parts in _tables()[framework].values():
        found |= {fact: stated[name] for name, fact in parts.items() if name in stated}
    if found.get("is_fsdp2") is True or str(found["trainer"]).startswith("fsdp"):
        found["trainer"] = "fsdp2"
    if framework == "verl":
        found["is_queued"] = any(name.startswith("async_training.") for name in stated)
        found |= {"staleness": 1} if stated.get(_ONE_STEP_OFF) else {}
        found["is_overlapped"] = bool(found.get("staleness"))
        is_apart = found["is_queued"] or found["is_overlapped"]
        found["is_colocated"] = not is_apart and found.get("is_colocated", True)
    return found


def _check_type(name: str, kind: str, value: Any, path: Path) -> None:
    if "$" in str(value):
        raise DataError(f"{path}: the value {value} of {name} is not in the file; write it out")
    if re.search("int|float", kind) and not isinstance(value, int | float | None):
        raise DataError(f"{path}: {name} {value} must be of type {kind}")


def _stated(path: Path) -> Facts:
    """The settings of a file by name; those of recipes that it inherits from, where it does not say them."""
    text = read_text(path, "job")
    if not re.search(r"^[\w-]+:", text, re.MULTILINE):
        words = [word.lstrip("+") for word in shell_words(text, path)]
        found = dict(word.split("=", 1) for word in words if re.match(r"[\w.]+\.[\w.]+=", word))
        is_verl = any("actor_rollout_ref." in name for name in found)
        return found | (_of_program(text, words, found) if is_verl else {})
    return read_recipe(text, path)


def _of_program(text: str, words: list[str], stated: Facts) -> Facts:
    """What verl's program and the configuration that it names say beside `stated` settings."""
    line = " ".join([*words, *stated])
    named = re.search(r"^[^#\n]*\bmodel_engine=(?!dp\b)(\w+)", text, re.MULTILINE)  # to a shell a variable
    is_megatron = re.search(r"--config-name[= ]\S*megatron|\.actor\.megatron\.", line)
    trainer = named[1] if named else "megatron" if is_megatron else "fsdp"
    return {_VERL_TRAINER: stated.get(_VERL_TRAINER, trainer), _ONE_STEP_OFF: "one_step_off_policy" in line}


def _parsed(value: Any) -> Any:
    text = str(value).strip("'\"")
    try:
        return msgspec.json.decode(text.lower())
    except msgspec.DecodeError:
        return text


def _options(framework: str, facts: Facts, names_of: dict[str, str], path: Path) -> dict[str, Any]:
    """The options of `rl` that facts are; `names_of` them are the settings that say them."""
    try:
        found = {name: facts[name] for name in ("samples", "memory_frac")}
        found |= formulas(_tables()["options"], _FUNCTIONS | facts)
        for name in ("train_plan", "rollout_plan"):
            keys = formulas(_tables()[name], _FUNCTIONS | facts)
            plan = Plan(**{key: value for key, value in keys.items() if value is not None})
            found[name] = plan_text(plan) or "tp=1"
    except (KeyError, TypeError, ZeroDivisionError) as error:
        what = names_of.get(error.args[0], error.args[0])
        raise DataError(f"{path} does not say enough of a job of {framework}: {what}") from None
    stated = {name: value for name, value in found.items() if value is not None}
    return stated | {"framework": framework}


_VERL_TRAINER, _ONE_STEP_OFF = "actor_rollout_ref.actor.strategy", "one_step_off_policy"
"""What follows from verl's `model_engine` or from the configuration, and from the program, that are named."""
_MODEL = "policy.model_name"
"""What the argument MODEL says."""
_OF_CLUSTER = ("nodes", "train_nodes", "train_node_gpus")
"""Facts that `--cluster` says."""
_FUNCTIONS = {"bool": bool, "int": int, "max": max, "min": min, "round": round, "str": str}
"""What formulas of the catalog call."""


# --- recipes as OmegaConf has them: they inherit from others, and settings refer to others --------------


def read_recipe(text: str, path: Path, above: tuple[Path, ...] = ()) -> Facts:
    """The settings of a recipe, `text` of `path`, by dotted name, with those that it inherits from others."""
    tree, found = parse_yaml(text, str(path)), {}
    bases = tree.pop("defaults", None) or []
    for name in [bases] if isinstance(bases, str) else bases:
        base = (path.parent / str(name)).resolve()
        if base in above or len(above) > _MOST_STEPS:
            raise DataError(f"{path} inherits from {name}, and that from {path}")
        if base.name == BASE_RECIPE and not base.is_file():
            found["grpo.name"] = BASE_RECIPE  # whose settings are the defaults of the catalog
        else:
            found |= read_recipe(read_text(base, "recipe"), base, (*above, base))
    return found | flat(tree)


def resolved(settings: Facts) -> Facts:
    """`settings` with values for `${name}`, `${.name}` (beside it) and `${mul:a,b}`, where there are some."""
    return {name: _follow(name, value, settings) for name, value in settings.items()}


def _follow(name: str, value: Any, settings: Facts) -> Any:
    text = value
    for _ in range(_MOST_STEPS):
        if not isinstance(text, str) or "${" not in text or len(text) > _MOST_CHARACTERS:
            break
        try:
            text = _REFERENCE.sub(lambda match: str(_refer(match[1].strip(), name, settings)), text)
        except (KeyError, ValueError, ZeroDivisionError, OverflowError):
            break
    return value if "${" in str(text) else text


def _refer(text: str, at: str, settings: Facts) -> Any:
    """What a reference of the setting `at` stands for, no other within it; KeyError where nothing says it."""
    function, _, rest = text.rpartition(":")
    values = [part.strip() for part in rest.split(",")]
    if function == "oc.select":
        return settings.get(values[0], values[-1])
    if function:
        number: float = reduce(_RESOLVERS[function], [float(value) for value in values])
        return int(number) if number.is_integer() else number
    name = text.lstrip(".")
    beside = at.split(".")[: len(name) - len(text)] if text != name else []
    return settings[".".join([*beside, name])]

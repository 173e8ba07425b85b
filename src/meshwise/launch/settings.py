"""Facts to the arguments of a framework and back, by the framework's table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwise.launch.arguments import framework_arguments, read_value
from meshwise.launch.facts import Facts
from meshwise.launch.tables import ANY, VALUE, Near, Setting, launch_tables, table_of
from meshwise.plan.plan import DEFAULTS, KEYS

Settings = dict[str, Any]

TRAINING = ("megatron-lm", "megatron-bridge", "torchtitan", "deepspeed", "accelerate")
SERVING = ("vllm", "sglang", "tensorrt-llm")
FINETUNING = ("peft", "unsloth", "torchtune")
"""Those of one card; of others, only what a search chooses among is in `TRAINING`."""
FRAMEWORKS = TRAINING + FINETUNING + SERVING
_WORK = ("batch", "seq", "microbatch")


def write_settings(framework: str, facts: Facts) -> tuple[Settings, dict[str, str]]:
    """The arguments that say `facts`, and a sentence for each key that cannot be said as it is."""
    table, covers = table_of(framework), launch_tables().covers
    settings: Settings = {}
    missing: dict[str, str] = {}
    for fact, setting in table.items():
        value = facts.get(fact)
        if fact not in facts or (value is None and None not in setting):
            continue
        chosen = _option(setting, value)
        keys = covers.get(fact, (fact,))
        if chosen is None:
            known = ", ".join(_shown(fact, one) for one in setting if one not in (ANY, None))
            missing |= {key: f"it offers only {known}" for key in keys if _is_stated(key, facts)}
            continue
        if isinstance(chosen, Near):
            missing[keys[0]] = chosen.differs
            chosen = chosen.settings
        shown = list(value) if isinstance(value, tuple) else value
        settings |= {name: shown if one is VALUE else one for name, one in chosen.items()}
    covered = {key for fact in table for key in (fact, *covers.get(fact, ()))} | {"dp"}
    for key in (*KEYS, *_WORK):
        if key not in covered and _is_stated(key, facts) and facts[key] != DEFAULTS.get(key):
            missing[key] = "it has no setting for this"
    missing |= {key: why for key, why in launch_tables().outside.get(framework, {}).items() if key in missing}
    return settings, {key: f"{key}={_shown(key, facts[key])}: {why}" for key, why in missing.items()}


def _is_stated(key: str, facts: Facts) -> bool:
    return facts.get(key) is not None


def _shown(key: str, value: Any) -> str:
    try:
        return KEYS[key].show(value)
    except (KeyError, TypeError, ValueError):
        return str(value)


def _option(setting: Setting, value: Any) -> Any:
    return setting.get(value, setting.get(ANY))


def read_settings(framework: str, stated: Settings) -> tuple[Facts, list[str]]:
    """The facts that the arguments `stated` say, and where they only come near to one."""
    facts: Facts = {}
    near = []
    for fact, setting in table_of(framework).items():
        for value, settings in _most_specific_first(setting):
            names = _in_file(framework, stated, settings)
            if names is None:
                continue
            held = {name: _held(framework, stated, name) for name in names}
            if all(
                held[name] is not None if want is VALUE else held[name] == want
                for name, want in names.items()
            ):
                values = [held[name] for name, want in names.items() if want is VALUE]
                if value is ANY and not values:
                    break
                held_value = values[0] if value is ANY else value
                facts[fact] = tuple(held_value) if isinstance(held_value, list) else held_value
                if isinstance(settings, Near):
                    near.append(f"{fact}={value}: {framework} differs, {settings.differs}")
                break
    return facts, near


def _in_file(framework: str, stated: Settings, settings: Any) -> Settings | None:
    """The arguments of an option that a file may hold: those of the Trainer are on its command line."""
    names = settings.settings if isinstance(settings, Near) else settings
    if framework not in ("deepspeed", "accelerate"):
        return names
    found = {name: want for name, want in names.items() if not name.startswith("--") or name in stated}
    return found if found or not names else None


def _most_specific_first(setting: Setting) -> Iterator[tuple[Any, Any]]:
    """The options of a fact: those with more arguments, exact ones and literal values first."""

    def rank(option: tuple[Any, Any]) -> tuple[int, bool, bool]:
        value, settings = option
        names = settings.settings if isinstance(settings, Near) else settings
        return -len(names), isinstance(settings, Near), value is ANY

    return iter(sorted(setting.items(), key=rank))


def _held(framework: str, stated: Settings, name: str) -> Any:
    """What holds for an argument: its value as stated, or what the framework does unasked."""
    if name in stated:
        return read_value(framework, name, stated[name])
    return framework_arguments(framework).arguments[name].unstated

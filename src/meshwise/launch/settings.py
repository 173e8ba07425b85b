"""Facts to the arguments of a framework and back, by the framework's table."""

from functools import partial
from typing import Any

from meshwise.core.errors import DataError
from meshwise.core.expressions import value_of
from meshwise.launch.arguments import framework_arguments, read_value
from meshwise.launch.facts import READING, Facts
from meshwise.launch.tables import ANY, OF_TRAINER, VALUE, Wording, covered, launch_tables, table_of
from meshwise.machine.hardware import Chip
from meshwise.machine.overheads import software_on
from meshwise.plan.plan import DEFAULTS, KEYS

Settings = dict[str, Any]

TRAINING = ("megatron-lm", "megatron-bridge", "torchtitan", "deepspeed", "accelerate")
SERVING = ("vllm", "sglang", "tensorrt-llm")
FINETUNING = ("peft", "unsloth")
SEARCHED = (*TRAINING, "peft")
"""Those that a search chooses among."""
_MAKERS = {"intel": ("deepspeed", "accelerate")}
"""Frameworks that train on the chips of makers where others do not."""
FRAMEWORKS = TRAINING + FINETUNING + SERVING
_WORK = ("batch", "seq", "microbatch")


def training_on(chip: Chip) -> tuple[str, ...]:
    """The frameworks of `SEARCHED` that run on a chip: none where that runs software of its own alone."""
    return () if software_on(chip) else _MAKERS.get(chip.vendor, SEARCHED)


def write_settings(framework: str, facts: Facts) -> tuple[Settings, dict[str, str]]:
    """The arguments that say `facts`, and a sentence for each key that cannot be said as it is."""
    table, covers = table_of(framework), launch_tables().covers
    settings: Settings = {}
    missing: dict[str, str] = {}
    for fact, setting in table.items():
        value = facts.get(fact)
        if fact not in facts or (value is None and None not in setting):
            continue
        chosen = setting.get(value, setting.get(ANY))
        keys = covers.get(fact, (fact,))
        if chosen is None:
            known = ", ".join(_shown(fact, one) for one in setting if one not in (ANY, None))
            missing |= {key: f"it offers only {known}" for key in keys if facts.get(key) is not None}
            continue
        if chosen.differs:
            missing[next((key for key in keys if facts.get(key) is not None), keys[0])] = chosen.differs
        shown = list(value) if isinstance(value, tuple) else value
        settings |= {name: shown if one is VALUE else one for name, one in chosen.settings.items()}
    for key in (*KEYS, *_WORK):
        if key not in covered(framework) and facts.get(key) not in (None, DEFAULTS.get(key)):
            missing[key] = "it has no setting for this"
    missing |= {key: why for key, why in launch_tables().outside.get(framework, {}).items() if key in missing}
    return settings, {key: f"{key}={_shown(key, facts[key])}: {why}" for key, why in missing.items()}


def _shown(key: str, value: Any) -> str:
    try:
        return KEYS[key].show(value)
    except (KeyError, TypeError, ValueError):
        return str(value)


def restated(framework: str, stated: Settings) -> Settings:
    """`stated` with what other arguments say in those of the framework's table."""
    found = dict(stated)

    def of(name: str) -> Any:
        return read_value(framework, name, found[name]) if name in found else None

    names = {"of": of, "agreed": partial(_agreed, framework, stated), "stated": stated} | READING
    for name, text in launch_tables().instead.get(framework.partition("-")[0], {}).items():
        value = value_of(text, names)
        if name.startswith("_"):  # a step on the way
            names[name] = value
        elif value is False:
            found.pop(name, None)
        elif value is not None:
            found[name] = value
    return found


def _agreed(framework: str, stated: Settings, name: str, argument: str) -> Any:
    """The value that a file and an argument of the Trainer's say, or either; DataError if they differ."""
    if stated.get(name) == "auto":
        if not any(one.startswith("--") for one in stated):
            raise DataError(f"{framework}: {name} is auto, which {argument} says; name its script")
        return _held(framework, stated, argument)
    values = [read_value(framework, one, stated[one]) for one in (name, argument) if one in stated]
    if len(set(values)) > 1:
        raise DataError(f"{framework}: {name} is {values[0]} and {argument} {values[1]}; write one of them")
    return values[0] if values else None


def read_settings(framework: str, stated: Settings) -> tuple[Facts, list[str]]:
    """The facts that the arguments `stated` say, and where they only come near to one."""
    facts: Facts = {}
    near = []
    beside = ("$", "--") if framework in OF_TRAINER else ("$",)
    for fact, setting in table_of(framework).items():
        for value, option in sorted(setting.items(), key=_rank):
            names = [one for one in option.settings if one in stated or not one.startswith(beside)]
            pairs = [(option.settings[one], _held(framework, stated, one)) for one in names]
            is_said = all(held is not None if want is VALUE else held == want for want, held in pairs)
            if not is_said or (option.settings and not pairs):
                continue
            said = value if value is not ANY else next((held for want, held in pairs if want is VALUE), None)
            if value is not ANY or said is not None:
                facts[fact] = tuple(said) if isinstance(said, list) else said
                if option.differs:
                    near.append(f"{fact}={said}: {framework} differs, {option.differs}")
            break
    return facts, near


def _rank(option: tuple[Any, Wording]) -> tuple[int, bool, bool]:
    """Options with more arguments, exact ones and literal values come first."""
    value, (settings, differs) = option
    return -len(settings), bool(differs), value is ANY


def _held(framework: str, stated: Settings, name: str) -> Any:
    """What holds for an argument: its value as stated, or what the framework does unasked."""
    if name in stated:
        return read_value(framework, name, stated[name])
    return framework_arguments(framework).arguments[name].unstated

"""The shape of a model in the terms of Megatron-LM's arguments, and back.

Only what those arguments can say; `unsaid` lists the fields of a model that they cannot.
"""

import math
import re
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

from meshwise.core.errors import DataError
from meshwise.core.expressions import formulas, value_of
from meshwise.core.units import whole
from meshwise.launch.facts import Facts
from meshwise.launch.tables import launch_tables
from meshwise.model.architecture import MLA, Model, MoE, checked_model, is_moe_layer, layer_kind
from meshwise.model.config_rules import moe_rule

MOST = 10**7
"""The largest product of the numbers in an expression of layers."""
_OF_EXPERTS = {"num_experts": "num_experts", "top_k": "top_k", "expert_ffn": "ffn_hidden"} | {
    name: name for name in ("shared_gate", "balance_bias")
}
_OF_SOME_EXPERTS = {"shared_ffn": "shared_ffn_hidden"} | {
    name: name for name in ("capacity_factor", "expert_groups", "top_groups")
}
"""Fields of experts by the facts that say them; those of the latter are left out where they are 0."""


def unsaid(model: Model) -> list[str]:
    """`field=value` for each field of `model` that has no argument and is not the usual.

    Towers that read nothing are no part of it.
    """
    model = replace(model, towers=tuple(tower for tower in model.towers if tower.num_tokens))
    found = [
        f"model.{field.name}={_shown(getattr(model, field.name))}"
        for field in fields(model)
        if field.name not in launch_tables().said and getattr(model, field.name) != field.default
    ]
    for name in ("latent", "zero_experts"):
        if value := getattr(model.moe, name, 0):
            found.append(f"model.moe.{name}={value}")
    if model.moe and model.moe.router_bias != model.linear_bias:  # as all linear layers of Megatron Core
        found.append(f"model.moe.router_bias={model.moe.router_bias}")
    return found


def _shown(value: Any) -> Any:
    """A value in a few words: of a part what is not the usual, of several their names or how they differ."""
    if isinstance(value, tuple):
        names = (one.name for one in value if hasattr(one, "name"))
        return ", ".join(names) or f"blocks of {len({*value})} kinds"
    if not is_dataclass(value):
        return value
    own = ((field.name, getattr(value, field.name), field.default) for field in fields(value))
    stated = ", ".join(f"{name}={here!r}" for name, here, usual in own if here != usual)
    return f"{type(value).__name__}({stated})"


def shape_of(model: Model, seq: int) -> Facts:
    """The facts of a model that Megatron-LM is told."""
    mla, moe = model.mla, model.moe
    facts: Facts = {name: getattr(model, name) for name in launch_tables().said if hasattr(model, name)}
    facts |= formulas(launch_tables().shape, {"model": model, "seq": seq, "max": max, "str": str})
    if mla is not None:
        facts |= {field.name: getattr(mla, field.name) or None for field in fields(mla)}
    if moe is not None:
        pattern = [int(is_moe_layer(model, layer)) for layer in range(model.num_layers)]
        facts |= {fact: getattr(moe, field) for fact, field in _OF_EXPERTS.items()}
        facts |= {fact: getattr(moe, field) or None for fact, field in _OF_SOME_EXPERTS.items()}
        facts["moe_layers"] = str(pattern).replace(" ", "")
    return facts


def model_of(facts: Facts, tp: int, where: str) -> Model | None:
    """The model that the facts say; None where they name no shape, or leave the vocabulary to a tokenizer."""
    if not all(facts.get(key) for key in ("num_layers", "hidden", "num_heads", "vocab")):
        return None
    mla = MLA(**{field.name: facts.get(field.name) or 0 for field in fields(MLA)}) if facts["mla"] else None
    names = {"tp": tp, "own": mla, "int": int, "window_of": _window, "whole": _whole}
    said = formulas(launch_tables().model, facts | names)
    model = Model(name=where, mla=mla, **said)
    return checked_model(_with_experts(model, facts) if facts.get("num_experts") else model, where)


def _window(text: Any) -> int:
    """Tokens that `--window-size` left,right lets a token look back on, its own among them; -1: all."""
    left = str(text or "-1").strip("()[]").partition(",")[0]
    return 0 if left == "-1" else _whole("--window-size", left) + 1


def _whole(argument: str, text: Any) -> int:
    if (found := whole(str(text))) is None:
        raise DataError(f"{argument} {text} must begin with a whole number")
    return found


def _with_experts(model: Model, facts: Facts) -> Model:
    shared, width = facts.get("shared_ffn") or 0, facts.get("expert_ffn") or model.ffn_hidden
    num_shared = max(shared // width, 1) if shared else 0
    has_experts = [here > 0 for here in _pattern(facts.get("moe_layers") or 1, model.num_layers)]
    rule = moe_rule(has_experts)
    stated: Facts = {field: facts[fact] for fact, field in _OF_EXPERTS.items() if fact != "expert_ffn"}
    stated |= {field: facts.get(fact) or 0 for fact, field in _OF_SOME_EXPERTS.items()}
    stated["router_bias"] = "linear" in facts["biases"].split("+")
    moe = MoE(ffn_hidden=width, num_shared_experts=num_shared, **(rule or {}), **stated)
    kinds = (replace(layer_kind(model, i), moe=here) for i, here in enumerate(has_experts))
    return replace(model, moe=moe, layers=() if rule else tuple(kinds))


# --- which layers have experts: ([0]*3+[1]*58) -------------------------------------------------


def _pattern(text: Any, num_layers: int) -> list[int]:
    """`--moe-layer-freq`: a list expression, or n: every n-th layer from the first."""
    value, text = None, str(text)
    with suppress(SyntaxError, ValueError, TypeError, RecursionError):
        size = math.prod(int(number) for number in re.findall(r"\d+", text) if number.strip("0"))
        if re.fullmatch(r"[][\d,+* ()]+", text) and "**" not in text and size <= MOST:
            value = value_of(text, {})
    if isinstance(value, int) and value > 0:
        return [int(layer % value == 0) for layer in range(num_layers)]
    if not isinstance(value, list | tuple) or len(value) != num_layers:
        raise DataError(f"--moe-layer-freq {text} does not say for {num_layers} layers which have experts")
    return list(value)

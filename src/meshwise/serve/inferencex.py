"""How benchmarks start the engines that they measure, where their rows do not say so.

Most measured points come from InferenceX (github.com/SemiAnalysisAI/InferenceX). Its client sends ten
requests for each of `concurrency`, all at once under that limit, draws lengths from 0.8 to 1 of the stated,
and ignores ends of sequence, so that engines which reserve output reserve all of it. Its scripts set the
tokens of a pass, how often SGLang looks for arrivals, how long TensorRT-LLM holds prompts back, and the type
of the cache; some runs guess tokens, and the oldest choose their layout (`catalog/inferencex.toml`). Whose
client a row is of follows from its source; engines of other clients run as they come.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from meshwise.core.expressions import formulas
from meshwise.core.files import read_catalog
from meshwise.serve.engine import Engine

CATALOG = read_catalog("inferencex.toml")


@dataclass(frozen=True, slots=True)
class ServingLayout:
    """Degrees of an instance: `etp` ranks cut each expert, `ep` hold different ones."""

    tp: int
    dp: int
    etp: int
    ep: int


@dataclass(frozen=True, slots=True)
class BenchmarkScript:
    """What the script of a row states. `speculate` is written as for `serve`; empty: no guesses.

    `habits`: those of its client; `plan`: keys of a plan, also of the checkpoint; `settings` of the engine.
    `frontends`, each of which counts on its own, pass requests on to the workers.
    """

    layout: ServingLayout
    habits: Mapping[str, Any]
    plan: Mapping[str, Any]
    speculate: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    frontends: int = 1


def client(row: Mapping[str, str]) -> dict[str, Any]:
    """The habits of the client of a row, and how its engine is `started`, by the source that it states."""
    source = row.get("source", "").lower()
    stated = {"source": source, "part": source.rpartition(", ")[2]}
    return _ruled("clients", stated | {"engine": row["backend"], "precision": row["precision"]})


def script(row: Mapping[str, str], model: str, layout: ServingLayout, workers: int = 1) -> BenchmarkScript:
    """The script of a row that states `layout` of `workers`, of two pools those that decode."""
    habits = client(row)
    stated = _ruled("checkpoints", habits | {"model": model})
    if habits["started"] != "by scripts":
        return BenchmarkScript(layout, habits, _plan(stated))
    is_one_pool = row["mode"] == "agg"
    stated |= {"system": row["system"], "day": row.get("measured", ""), "clients": int(row["concurrency"])}
    stated["lengths"] = f"{row['input_tokens']}/{row['output_tokens']}"
    ruled = _ruled("layouts" if is_one_pool else "pool_layouts", stated | {"tp": layout.tp})
    spread = CATALOG["spreads"].get(ruled.get("spreads"), {})
    layout = replace(layout, **formulas(spread, {"of": layout}))
    stated |= {"tp": layout.tp, "dp": layout.dp, "ep": layout.ep, "workers": workers}
    stated["prompt_dp"] = int(row.get("prefill_attention_dp") or 1)
    found = _ruled("rules" if is_one_pool else "pools", stated | {"drafts": 0})
    settings = {each.name: found[each.name] for each in fields(Engine) if each.name in found}
    names = {"clients": stated["clients"], "prompt": int(row["input_tokens"]), "max": max, "dp": layout.dp}
    settings |= formulas({name: text for name, text in settings.items() if isinstance(text, str)}, names)
    guesses = f"drafts={found['drafts']},accept={CATALOG['acceptance']}" if found["drafts"] else ""
    return BenchmarkScript(layout, habits, _plan(found), guesses, settings, found.get("frontends", 1))


def _plan(found: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a plan among what rules set."""
    keys = {key: found[key] for key in ("kv_dtype", "weight_dtype", "dispatch") if key in found}
    return keys | {"wide_modules": tuple(found.get("wide_modules", ()))}


def _ruled(rules: str, stated: dict[str, Any]) -> dict[str, Any]:
    """`stated`, with what the rules set of that."""
    for rule in CATALOG[rules]:
        if all(_holds(stated[column], wanted) for column, wanted in rule.items() if column != "set"):
            stated |= rule["set"]
    return stated


def _holds(value: Any, wanted: str | Sequence[Any]) -> bool:
    """Whether `value` begins with one of the words of a text, or lies between the two of a list."""
    if isinstance(wanted, str):
        return value.startswith(tuple(wanted.split()))
    return wanted[0] <= value <= wanted[1]

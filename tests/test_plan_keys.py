"""No key of a plan is ignored: on some plan each value changes what is priced, or it is refused."""

from typing import Any

import pytest

import meshwise as mw
from meshwise.plan.plan import DEFAULTS, KEYS, RECOMPUTE_MODULES, plan_keys

DENSE, EXPERTS, LATENT = "llama3-8b", "mixtral-8x7b", "deepseek-v3"
BASES = [  # model and plan to start from; on 64 GPUs
    (DENSE, "tp=4,pp=4,cp=2"),
    (DENSE, "tp=2,pp=4,vpp=2,recompute=full"),
    (DENSE, "tp=2,pp=2,zero=3"),
    (DENSE, "pp=2,cp=4,cp_kind=ulysses,attention=unfused"),
    (DENSE, "tp=2,cp=4,cp_kind=two_level,sp=0"),
    (DENSE, "layout=2d:2x2"),
    (DENSE, "software=megatron-2020"),
    (DENSE, "lora_rank=16"),
    (EXPERTS, "tp=2,ep=4,etp=1,pp=2"),
    (DENSE, "dtype=fp8"),
    (LATENT, "ep=64,etp=1,pp=1,recompute=selective"),
]
OTHERS = {  # other values of keys whose values are not listed in `Field.values`
    "sp": ("0", "1"),
    "stages": ("even", "7-9-8-8", "9-7-9-7"),
    "layout": ("2d:4x2", "3d:2x2x2"),
    "grid": ("4x1",),
    "offload_optimizer": ("0.5",),
    "offload_activations": ("0.5",),
    "imbalance": ("1.5",),
    "recompute_modules": RECOMPUTE_MODULES,
    "placement": ("dp-pp-cp-tp",),
    "lora_rank": ("8",),
    "lora_targets": ("q+v",),
    "lora_dropout": ("0.1",),
}
EXPERT_KEYS = ("ep=2", "etp=2", "dispatch=per_rank", "dispatch_dtype=fp8", "imbalance=1.5", "overlap_ep=1")


def values_of(key: str) -> tuple[str, ...]:
    listed = KEYS[key].values
    if listed.startswith("one of "):
        return tuple(OTHERS.get(key, listed.removeprefix("one of ").split(", ")))
    if listed == "0 or 1":
        return OTHERS.get(key, ("0", "1"))
    return OTHERS.get(key, ("0", "1", "2", "3") if key == "zero" else ("2",))


def priced(model: str, keys: dict[str, Any]) -> Any:
    """What is priced, without what only repeats the question; or the sentence of a refusal."""
    try:
        found = mw.estimate(model, "h100-80g-sxm:64", mw.Plan(**keys), batch=64, seq=4096)
    except mw.MeshwiseError as error:
        assert "\n" not in str(error)
        return str(error)
    document = found.to_json()
    return {name: part for name, part in document.items() if name not in ("plan", "workload", "model")}


@pytest.mark.parametrize("key", KEYS)
def test_every_value_of_every_key_counts(key: str) -> None:
    for text in values_of(key):
        stated = plan_keys(f"{key}={text}")
        if stated[key] == DEFAULTS[key]:
            continue
        for model, base in BASES:
            keys = plan_keys(base)
            if keys.get(key) != stated[key] and priced(model, keys | stated) != priced(model, keys):
                break
        else:
            pytest.fail(f"{key}={text} changes nothing")


@pytest.mark.parametrize("text", EXPERT_KEYS)
def test_keys_of_experts_are_refused_without_experts(text: str) -> None:
    refusal = priced(DENSE, plan_keys(f"tp=2,{text}"))
    key = text.partition("=")[0]
    assert refusal == f"{key} is stated but {DENSE} has no experts; leave {key} out"

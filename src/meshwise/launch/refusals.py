"""Combinations that a framework's own checks refuse, each as a condition on the facts and a sentence.

Facts are numbers, or arrays over a grid of plans, so a condition is put together by & and not by `and`.

Source: the checks of each framework at the version of `catalog/framework_arguments.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from meshwise.core.errors import PlanError
from meshwise.launch.facts import Facts
from meshwise.launch.settings import FINETUNING
from meshwise.plan.plan import DEFAULTS

Refusal = tuple[Callable[[Facts], Any], str]

IDLE: Facts = DEFAULTS | {"sp": False, "overlap_ep": False, "etp": 1, "zero": 0, "zero_group": 0}
"""What holds of a key that changes nothing."""

_MEGATRON: list[Refusal] = [
    (lambda f: f["overlap_tp"] & (f["sp"] == 0), "overlap_tp=1 needs sequence parallelism; use sp=1"),
    (
        lambda f: f["overlap_ep"] & (f["pp"] > 1) & (f["vpp"] == 1),
        "overlap_ep=1 with pp={pp} needs virtual stages; use vpp=2 or more",
    ),
    (
        lambda f: f["overlap_ep"] & (f["recompute"] == "full"),
        "overlap_ep=1 excludes recompute=full; leave one of them out",
    ),
    (
        lambda f: (f["zero"] >= 2) & (f["optimizer"] not in ("adam", "adam-8bit", "sgd")),
        "zero={zero} takes optimizer=adam or sgd, not {optimizer}",
    ),
    (
        lambda f: (f["cp"] > 1) & (f["seq"] % (2 * f["cp"]) > 0),
        "seq={seq} must divide by 2 x cp={cp}; use another sequence or cp",
    ),
    (
        lambda f: f["linear_bias"] & (f["etp"] > 1) & f["has_experts"],
        "experts with biases need etp=1, not etp={etp}",
    ),
    (
        lambda f: (f["overlap_pp"] == 0) & (f["vpp"] > 1) & (f["pp"] == 2),
        "overlap_pp=0 with virtual stages needs pp of at least 3",
    ),
]
_TORCHTITAN: list[Refusal] = [
    (lambda f: f["tied_embedding"] & (f["pp"] > 1), "tied embeddings do not go with pp={pp}; use pp=1"),
    (lambda f: f["kv_heads"] % f["tp"] > 0, "tp={tp} must divide the {kv_heads} key-value heads"),
    (lambda f: f["seq"] > f["max_seq"], "seq={seq} exceeds the {max_seq} positions of the model"),
    (
        lambda f: (f["zero"] == 0) & (f["cp"] > 1),
        "cp={cp} always shards the states over the ranks of cp; use zero=2 or zero=3",
    ),
    (
        lambda f: f["zero_group"] % f["cp"] > 0,
        "zero_group={zero_group} must be a multiple of cp={cp}",
    ),
]
_DEEPSPEED: list[Refusal] = [
    (
        lambda f: (f["offload_optimizer"] > 0) & (f["offload_optimizer"] < 1) & (f["zero"] != 3),
        "offload_optimizer={offload_optimizer} needs zero=3; below it, all or nothing is offloaded",
    ),
    (
        lambda f: (f["offload_optimizer"] > 0) & (f["zero"] == 0),
        "offload_optimizer needs zero=1, 2 or 3",
    ),
    (
        lambda f: (f["pp"] > 1) & (f["zero"] >= 2),
        "pp={pp} excludes zero={zero}; use zero=0 or 1, or pp=1",
    ),
    (
        lambda f: (f["ep"] > 1) & (f["zero"] == 3) & (f["cp"] > 1),
        "ep={ep} with zero=3 excludes sequence parallelism; use cp=1",
    ),
    (
        lambda f: (f["optimizer"] == "adam-bf16") & (f["zero"] == 0),
        "optimizer=adam-bf16 needs zero=1, 2 or 3",
    ),
]
_ACCELERATE: list[Refusal] = [
    (lambda f: f["pp"] > 1, "it has no pipeline; use pp=1"),
    (
        lambda f: (f["tp"] * f["cp"] > 1) & (f["dp"] > 1) & ((f["zero"] == 0) | (f["zero_group"] == f["cp"])),
        "tp or cp above 1 with replicas needs sharded states; use zero=2 or zero=3",
    ),
    _TORCHTITAN[-1],
]
_SGLANG: list[Refusal] = [
    (
        lambda f: f["copies"] > 1 and f["num_nodes"] > 1,
        "dp={dp} replicas do not spread over several nodes; start one server on each node",
    ),
]
_MEGATRON_LM: list[Refusal] = [
    *_MEGATRON,
    (
        lambda f: f["loss"] == "in_place",  # megatron-core 0.19, #5162
        "loss_fusion=in_place is Transformer Engine's loss, refused since 0.19; use loss_fusion=kernels",
    ),
]
_FINETUNING: list[Refusal] = [
    (
        lambda f: f["num_gpus"] > 1,
        "its settings are for one card, not {num_gpus}; use --cluster CHIP:1, or --to accelerate for more",
    ),
]
REFUSALS: dict[str, list[Refusal]] = {
    "megatron-lm": _MEGATRON_LM,
    "megatron-bridge": _MEGATRON,
    "torchtitan": _TORCHTITAN,
    "deepspeed": _DEEPSPEED,
    "accelerate": _ACCELERATE,
    "sglang": _SGLANG,
    **dict.fromkeys(FINETUNING, _FINETUNING),
}


def broken(framework: str, facts: Facts) -> Iterator[tuple[Any, str]]:
    """Each condition of a framework (of a grid: where it holds) with its sentence; keys left out are idle."""
    found = IDLE | {key: value for key, value in facts.items() if value is not None}
    return ((is_refused(found), sentence) for is_refused, sentence in REFUSALS.get(framework, []))


def check(framework: str, facts: Facts) -> None:
    """PlanError with the first sentence that holds."""
    for is_refused, sentence in broken(framework, facts):
        if is_refused:
            raise PlanError(f"{framework} refuses this plan: {sentence.format(**facts)}")

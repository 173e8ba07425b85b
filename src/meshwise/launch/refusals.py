"""Combinations that a framework's own checks refuse, each as a condition on the facts and a sentence.

Source: the checks of each framework at the version of `catalog/framework_arguments.json`.
"""

from __future__ import annotations

from collections.abc import Callable

from meshwise.core.errors import PlanError
from meshwise.launch.facts import Facts

Refusal = tuple[Callable[[Facts], object], str]

_MEGATRON: list[Refusal] = [
    (lambda f: f.get("overlap_tp") and not f.get("sp"), "overlap_tp=1 needs sequence parallelism; use sp=1"),
    (
        lambda f: f.get("overlap_ep") and f["pp"] > 1 and f["chunks"] == 1,
        "overlap_ep=1 with pp={pp} needs virtual stages; use vpp=2 or more",
    ),
    (
        lambda f: f.get("overlap_ep") and f["recompute"] == "full",
        "overlap_ep=1 excludes recompute=full; leave one of them out",
    ),
    (
        lambda f: f["weights_sharded"] and f["optimizer"] not in ("adam", "adam-8bit", "sgd"),
        "zero={zero} takes optimizer=adam or sgd, not {optimizer}",
    ),
    (
        lambda f: f["cp"] > 1 and f["seq"] % (2 * f["cp"]),
        "seq={seq} must divide by 2 x cp={cp}; use another sequence or cp",
    ),
    (
        lambda f: f["linear_bias"] and f.get("etp", 1) > 1 and f["has_experts"],
        "experts with biases need etp=1, not etp={etp}",
    ),
    (
        lambda f: f.get("overlap_pp") is False and f.get("vpp", 1) > 1 and f["pp"] == 2,
        "overlap_pp=0 with virtual stages needs pp of at least 3",
    ),
]
_TORCHTITAN: list[Refusal] = [
    (lambda f: f["tied_embedding"] and f["pp"] > 1, "tied embeddings do not go with pp={pp}; use pp=1"),
    (lambda f: f["kv_heads"] % f["tp"], "tp={tp} must divide the {kv_heads} key-value heads"),
    (lambda f: f["seq"] > f["max_seq"], "seq={seq} exceeds the {max_seq} positions of the model"),
    (
        lambda f: f.get("zero") == 0 and f["cp"] > 1,
        "cp={cp} always shards the states over the ranks of cp; use zero=2 or zero=3",
    ),
    (
        lambda f: f.get("zero_group") and f["zero_group"] % f["cp"],
        "zero_group={zero_group} must be a multiple of cp={cp}",
    ),
]
_DEEPSPEED: list[Refusal] = [
    (
        lambda f: 0 < f["offload_optimizer"] < 1 and f.get("zero") != 3,
        "offload_optimizer={offload_optimizer} needs zero=3; below it, all or nothing is offloaded",
    ),
    (lambda f: f["offload_optimizer"] and not f.get("zero"), "offload_optimizer needs zero=1, 2 or 3"),
    (
        lambda f: f["pp"] > 1 and f.get("zero", 0) >= 2,
        "pp={pp} excludes zero={zero}; use zero=0 or 1, or pp=1",
    ),
    (
        lambda f: f.get("ep", 1) > 1 and f.get("zero") == 3 and f["cp"] > 1,
        "ep={ep} with zero=3 excludes sequence parallelism; use cp=1",
    ),
    (
        lambda f: f["optimizer"] == "adam-bf16" and not f.get("zero"),
        "optimizer=adam-bf16 needs zero=1, 2 or 3",
    ),
]
_ACCELERATE: list[Refusal] = [
    (lambda f: f["pp"] > 1, "it has no pipeline; use pp=1"),
    (
        lambda f: f["tp"] * f["cp"] > 1 and f["replicate"] > 1 and f["shard"] == 1,
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
REFUSALS: dict[str, list[Refusal]] = {
    "megatron-lm": _MEGATRON,
    "megatron-bridge": _MEGATRON,
    "torchtitan": _TORCHTITAN,
    "deepspeed": _DEEPSPEED,
    "accelerate": _ACCELERATE,
    "sglang": _SGLANG,
}


def check(framework: str, facts: Facts) -> None:
    """PlanError with the first sentence that holds."""
    for is_refused, sentence in REFUSALS.get(framework, []):
        if is_refused(facts):
            raise PlanError(f"{framework} refuses this plan: {sentence.format(**facts)}")

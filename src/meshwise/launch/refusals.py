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

Refusals = Iterator[tuple[Any, str]]

IDLE: Facts = DEFAULTS | {"sp": False, "overlap_ep": False, "etp": 1, "zero": 0, "zero_group": 0}
"""What holds of a key that changes nothing."""


def _megatron(f: Facts) -> Refusals:
    behind_experts, is_sharded = f["overlap_ep"], f["zero"] >= 2
    is_known = f["optimizer"] in ("adam", "adam-8bit", "sgd")
    yield f["overlap_tp"] & (f["sp"] == 0), "overlap_tp=1 needs sequence parallelism; use sp=1"
    yield behind_experts & (f["pp"] > 1) & (f["vpp"] == 1), "overlap_ep=1 with pp={pp} needs vpp=2 or more"
    yield behind_experts & (f["recompute"] == "full"), "overlap_ep=1 excludes recompute=full; leave one out"
    yield is_sharded & (not is_known), "zero={zero} takes optimizer=adam or sgd, not {optimizer}"
    yield (f["cp"] > 1) & (f["seq"] % (2 * f["cp"]) > 0), "seq={seq} must divide by 2 x cp={cp}"
    of_experts = f["linear_bias"] & f["has_experts"]
    yield of_experts & (f["etp"] > 1), "experts with biases need etp=1, not etp={etp}"
    is_blocking = (f["overlap_pp"] == 0) & (f["vpp"] > 1)
    yield is_blocking & (f["pp"] == 2), "overlap_pp=0 with virtual stages needs pp of at least 3"


def _megatron_lm(f: Facts) -> Refusals:
    yield from _megatron(f)
    is_refused = f["loss"] == "in_place"  # megatron-core 0.19, #5162
    yield is_refused, "loss_fusion=in_place is Transformer Engine's loss, refused since 0.19; use kernels"


def _torchtitan(f: Facts) -> Refusals:
    yield f["tied_embedding"] & (f["pp"] > 1), "tied embeddings do not go with pp={pp}; use pp=1"
    yield f["kv_heads"] % f["tp"] > 0, "tp={tp} must divide the {kv_heads} key-value heads"
    yield f["seq"] > f["max_seq"], "seq={seq} exceeds the {max_seq} positions of the model"
    is_whole = (f["zero"] == 0) & (f["cp"] > 1)
    yield is_whole, "cp={cp} always shards the states over the ranks of cp; use zero=2 or zero=3"
    yield from _groups_of_cp(f)


def _groups_of_cp(f: Facts) -> Refusals:
    yield f["zero_group"] % f["cp"] > 0, "zero_group={zero_group} must be a multiple of cp={cp}"


def _deepspeed(f: Facts) -> Refusals:
    share, zero = f["offload_optimizer"], f["zero"]
    is_part = (share > 0) & (share < 1) & (zero != 3)
    yield is_part, "offload_optimizer={offload_optimizer} needs zero=3; below it, all or nothing is offloaded"
    yield (share > 0) & (zero == 0), "offload_optimizer needs zero=1, 2 or 3"
    yield (f["pp"] > 1) & (zero >= 2), "pp={pp} excludes zero={zero}; use zero=0 or 1, or pp=1"
    is_cut = (f["ep"] > 1) & (f["cp"] > 1)
    yield is_cut & (zero == 3), "ep={ep} with zero=3 excludes sequence parallelism; use cp=1"
    is_narrow = f["optimizer"] == "adam-bf16"
    yield is_narrow & (zero == 0), "optimizer=adam-bf16 needs zero=1, 2 or 3"


def _accelerate(f: Facts) -> Refusals:
    yield f["pp"] > 1, "it has no pipeline; use pp=1"
    is_whole = (f["zero"] == 0) | (f["zero_group"] == f["cp"])
    is_cut = (f["tp"] * f["cp"] > 1) & (f["dp"] > 1)
    yield is_cut & is_whole, "tp or cp above 1 with replicas needs sharded states; use zero=2 or zero=3"
    yield from _groups_of_cp(f)


def _sglang(f: Facts) -> Refusals:
    are_far = f["copies"] > 1 and f["num_nodes"] > 1
    yield are_far, "dp={dp} replicas do not spread over several nodes; start one server on each node"


def _of_one_card(f: Facts) -> Refusals:
    yield f["num_gpus"] > 1, "its settings are for one card, not {num_gpus}; use --cluster CHIP:1"


REFUSALS: dict[str, Callable[[Facts], Refusals]] = {
    "megatron-lm": _megatron_lm,
    "megatron-bridge": _megatron,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "sglang": _sglang,
    **dict.fromkeys(FINETUNING, _of_one_card),
}


def broken(framework: str, facts: Facts) -> Refusals:
    """Each condition of a framework (of a grid: where it holds) with its sentence; keys left out are idle."""
    found = IDLE | {key: value for key, value in facts.items() if value is not None}
    return REFUSALS.get(framework, lambda f: iter(()))(found)


def check(framework: str, facts: Facts) -> None:
    """PlanError with the first sentence that holds."""
    for is_refused, sentence in broken(framework, facts):
        if is_refused:
            raise PlanError(f"{framework} refuses this plan: {sentence.format(**facts)}")

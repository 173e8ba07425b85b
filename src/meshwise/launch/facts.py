"""What a plan says about a job, in the terms that frameworks ask for it; and back.

Facts are the keys of a plan (resolved: what it leaves out is filled in), the workload, and what follows from
them: a framework may ask for the number of replicas of a sharded model instead of the ranks that share it.
`facts_of` states them for a plan, `derive` adds what follows, `plan_of` reads a plan out of facts.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from meshwise.core.errors import DataError
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.mesh import Mesh
from meshwise.plan.plan import DEFAULTS, ENGINE_KEYS, EVEN, KEYS, LORA_TARGETS, WEIGHT_KEYS, Plan
from meshwise.plan.stages import chunk_layers, layers_of_chunks
from meshwise.program.implementation import loss_fusion

Facts = dict[str, Any]


def facts_of(model: Model, mesh: Mesh, cluster: Cluster) -> Facts:
    """The facts of one plan, resolved and its layers placed; a key without effect is left out."""
    facts: Facts = {key: getattr(mesh.plan, key) for key in KEYS} | {"loss": loss_fusion(mesh.plan)}
    facts |= {key: int(getattr(mesh, key)) for key in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "ulysses")}
    facts |= {key: int(getattr(mesh, key)) for key in ("batch", "seq", "microbatch")}
    group = int(mesh.zero_group)
    facts |= {
        "sp": mesh.plan.sequence_parallel,
        "zero_group": None if group == facts["dp"] * facts["cp"] else group,
        "num_layers": model.num_layers,
        "mtp_layers": model.mtp_layers,
        "num_gpus": cluster.num_chips,
        "has_experts": model.moe is not None,
        "redundant_experts": (model.moe and model.moe.copies) or None,
    }
    sizes = layers_of_chunks(model, mesh)
    facts["stages"] = sizes if len(set(sizes)) > 1 else None
    for key in set(KEYS) - set(ENGINE_KEYS) if mesh.serves else idle_keys(facts):
        del facts[key]
    return derive(facts) | (_serving(facts) if mesh.serves else {})


def without_effect(facts: Facts) -> dict[str, Any]:
    """Keys of a training plan, and whether (in a grid: in which cells) they change nothing in this world."""
    dp = facts.get("dp")
    replicas = 0 if dp is None else dp * facts["cp"]
    alone = {
        "sp overlap_tp": facts["tp"] == 1,
        "cp_kind": facts["cp"] == 1,
        "ulysses": (facts["cp"] == 1) | (facts["cp_kind"] != "two_level"),
        "vpp stages overlap_pp": facts["pp"] == 1,
        "schedule": (facts["pp"] == 1) & (facts["schedule"] != "gpipe"),  # which keeps all microbatches alive
        "ep etp dispatch overlap_ep imbalance": not facts["has_experts"],
        "zero overlap_dp": replicas == 1,
        "zero_group": (replicas == 1) | (facts["zero"] == 0),
        "recompute_layers recompute_every": facts["recompute"] != "full",
        "recompute_modules": facts["recompute"] != "selective",
        "grid panels": facts["layout"] == "1d",
        "frozen_dtype lora_targets lora_dropout": facts["lora_rank"] == 0,
        " ".join(WEIGHT_KEYS): True,
    }
    return {key: idle for keys, idle in alone.items() for key in keys.split()}


def idle_keys(facts: Facts) -> set[str]:
    """Keys of one training plan that change nothing in this world."""
    return {key for key, idle in without_effect(facts).items() if idle}


def resharding(zero: Any, pp: Any) -> Any:
    """When torchtitan gives gathered weights back, for each ZeRO stage of a grid.

    Weights that stay gathered are stage 2: gradients are reduced in each microbatch. In a pipeline they are
    stage 1: torch's schedules reduce once a step.
    """
    names = np.array([["none", "never_summed", "never", "always"], ["none", "never", "never", "always"]])
    return names[np.asarray(pp > 1, dtype=np.intp), np.asarray(zero, dtype=np.intp)]


def derive(facts: Facts) -> Facts:
    """`facts`, and what follows from them; None where it does not apply."""
    get = facts.get
    tp, cp, pp, dp, ep = (int(get(key) or 1) for key in ("tp", "cp", "pp", "dp", "ep"))
    vpp, zero, group, layers = get("vpp") or 1, get("zero", 0), get("zero_group"), get("recompute_layers")
    stages, microbatch, num_layers = get("stages"), get("microbatch"), get("num_layers")
    ulysses, batch = get("ulysses"), get("batch")
    piped = pp > 1
    form = "per_op" if "per_op" in (get("recompute_modules") or ()) else get("recompute")
    found: Facts = {
        "chunks": vpp if piped and stages is None else 1,
        "pipeline_layout": None if stages is None else _layout_text(stages, get("mtp_layers", 0)),
        "levels": (ulysses, cp // ulysses) if ulysses else None,
        "instances": 1 if group is None else dp * cp // group,
        "shard": 1 if not zero else dp if group is None else group // cp,
        "recompute_form": form if layers is None else "uneven" if layers % vpp else "block",
        "recompute_num": get("recompute_every") if layers is None else layers // vpp,
        "resharding": str(resharding(zero, pp)),
        "gather_overlap": bool(get("overlap_dp") and zero),
        "p2p_overlap": get("overlap_pp", True) if vpp > 1 or get("overlap_pp", True) else "blocking",
        "etp_beside_ep": get("etp") if ep > 1 or get("etp") != tp else None,
        "local_batch": microbatch,
        "pipeline_microbatch": microbatch if piped else None,
        "layers_per_chunk": num_layers // (pp * vpp) if piped and num_layers and stages is None else None,
        **_adapters(facts),
        "host_syncs": piped or ep > 1,
        "weights_sharded": zero >= 2,
        "cp_size": 1 if get("cp_kind") == "ulysses" else cp,
        "sp_size": cp if get("cp_kind") == "ulysses" else 1,
        "recompute_fsdp": get("recompute") if zero else None,
        "recompute_ddp": None if zero else get("recompute"),
        "fuses_experts": bool(get("has_experts")),
        "launcher": "FSDP" if zero or tp * cp > 1 else "MULTI_GPU",
        "num_gpus": get("num_gpus") or (tp * cp * pp * dp if get("dp") else None),
    }
    found["replicate"] = dp // found["shard"] if found["shard"] else None
    if batch and microbatch:
        found["num_microbatches"] = batch // (dp * microbatch)
        if piped:
            found["local_batch"] = batch // dp
    return facts | found


def _adapters(facts: Facts) -> Facts:
    """Which layers have adapters, by their names in `transformers` and torchtune; how weights are loaded."""
    rank, targets = facts.get("lora_rank"), facts.get("lora_targets")
    names = tuple(f"{name}_proj" for name in targets or LORA_TARGETS) if rank else None
    attention = [name.replace("o_proj", "output_proj") for name in names or () if name[0] in "qkvo"]
    whole = facts.get("optimizer") in ("adam", "adam-fp32") and not rank
    loaded = {"fp16": "float16", "fp32": "float32"}.get(facts.get("dtype", ""), "bfloat16")
    return {
        "adapted": names,
        "adapted_attention": tuple(attention) if rank else None,
        "adapts_mlp": len(attention) < len(names) if names else None,
        "recompute_adapters": facts.get("recompute") if rank else None,
        "loaded": "float32" if whole else loaded,
    }


def _serving(facts: Facts) -> Facts:
    """What serving engines ask for."""
    tp, dp, ep, etp = (facts[key] for key in ("tp", "dp", "ep", "etp"))
    whole = not facts["has_experts"] or (ep == 1 and etp == tp)
    across = ep * etp > tp
    return {
        "requests": max(facts["batch"] // dp, 1),
        "ep_over_all": False if whole else True if ep == tp * dp else ep,
        "ep_within_tp": 1 if whole else ep if ep * etp == tp * (dp if across else 1) else f"{ep} x etp={etp}",
        "world_tp": tp * dp if across else tp,
        "attention_dp": dp if across else 1,
        "copies": 1 if across else dp,
        "quantization": _quantization(facts),
    }


def _quantization(facts: Facts) -> str:
    """The format in which an engine keeps weights, the one of experts, and the type that it computes in.

    Each only where it is not what the format before it implies.
    """
    dtype = facts["dtype"]
    weights = facts["weight_dtype"] or {"fp8": "fp8", "fp4": "nvfp4"}.get(dtype)
    experts = None if facts["expert_dtype"] == weights else facts["expert_dtype"]
    parts = [weights] if weights else []
    parts += [f"experts {experts}"] if experts else []
    implied = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}.get(weights or experts or "", "bf16")
    found = ", ".join(parts) or "none"
    return found if dtype in (implied, "fp16", "fp32") else f"{found} in {dtype}"


def plan_of(facts: Facts) -> Plan:
    """The plan that facts say, without keys that only repeat what follows from others."""
    idle = idle_keys(dict(DEFAULTS) | facts)
    keys = {key: facts[key] for key in KEYS if key in facts and key not in idle and facts[key] is not None}
    tp, num_chunks = keys.get("tp", 1), keys.get("pp", 1) * keys.get("vpp", 1)
    replicas = (facts.get("dp") or 0) * facts["cp"]
    for key, implied in (("sp", tp > 1), ("etp", tp), ("zero_group", replicas)):
        if keys.get(key) == implied:
            del keys[key]
    num_layers = facts.get("num_layers") or 0
    even = chunk_layers(num_layers, num_chunks) if 0 < num_chunks <= num_layers else None
    if keys.get("pp", 1) > 1 and keys.get("stages", even) == even:
        keys["stages"] = EVEN
    keys.pop("dp", None)
    stated = keys.pop("loss_fusion", None)
    plan = Plan(**keys)
    return plan if stated in (None, loss_fusion(plan)) else replace(plan, loss_fusion=stated)


def recover(facts: Facts) -> Facts:
    """The plan's keys out of the facts that a framework states in its own terms."""
    found = dict(facts)
    if "loss" in facts:
        found["loss_fusion"] = facts["loss"]
    if "cp_size" in facts:
        found["cp"] = max(facts["cp_size"], facts["sp_size"])
        found["cp_kind"] = "ulysses" if facts["sp_size"] > 1 else "all_gather"
    tp, cp, pp = (found.get(key) or 1 for key in ("tp", "cp", "pp"))
    num_layers = facts.get("num_layers")
    form = facts.get("recompute_form")
    if facts.get("pipeline_layout"):
        found["stages"] = _layout_stages(facts["pipeline_layout"])
        found["chunks"], rest = divmod(len(found["stages"]), pp)
        if rest:
            raise DataError(
                f"the pipeline's layout has {len(found['stages'])} parts, which pp={pp} does not divide"
            )
    if "chunks" in found:
        found["vpp"] = found["chunks"]
    if facts.get("layers_per_chunk") and num_layers:
        found["vpp"] = max(num_layers // (pp * facts["layers_per_chunk"]), 1)
    if facts.get("levels"):
        found["ulysses"] = facts["levels"][0]
    if form is not None:
        found["recompute"] = {"block": "full", "per_op": "selective"}.get(form, form)
    if form == "per_op":
        found["recompute_modules"] = (form,)
    if form == "full":
        found["recompute_every"] = facts.get("recompute_num") or 1
    if form == "block":
        found["recompute_layers"] = facts["recompute_num"] * found.get("vpp", 1)
    if "p2p_overlap" in facts:
        found["overlap_pp"] = facts["p2p_overlap"]
    if "shard" in facts:
        found |= _sharding(found, tp * cp * pp)
    if "num_microbatches" in facts and facts.get("batch") and facts.get("microbatch"):
        found["dp"] = facts["batch"] // (facts["microbatch"] * facts["num_microbatches"])
    if "dp" not in found and facts.get("num_gpus"):
        found["dp"] = facts["num_gpus"] // (tp * cp * pp)
    if facts.get("instances", 1) > 1 and "dp" not in found:
        raise DataError("how many GPUs share the states depends on their number; say it with --cluster")
    if facts.get("instances", 1) > 1:
        found["zero_group"] = found["dp"] * cp // facts["instances"]
    if found.get("shard") and found.get("zero"):
        found["zero_group"] = found["shard"] * cp
    if "etp_beside_ep" in facts:
        found["etp"] = facts["etp_beside_ep"] or tp
    if "local_batch" in facts:
        found["microbatch"] = facts.get("pipeline_microbatch") if pp > 1 else facts["local_batch"]
    return found


def _sharding(facts: Facts, model_ranks: int) -> Facts:
    """dp, the ranks that share a sharded model, and the ZeRO stage, of FSDP's two degrees.

    A degree of -1, or FSDP without degrees, shards over all that is left of the world.
    """
    shard, replicate, num_gpus = facts["shard"], facts["replicate"], facts.get("num_gpus")
    left = num_gpus // (model_ranks * replicate) if num_gpus else None
    if facts.get("launcher") == "MULTI_GPU":
        shard, replicate = 1, left
    elif shard < 0 or (facts.get("launcher") == "FSDP" and shard * replicate == 1):
        shard = left
    is_sharded = shard != 1 or facts["cp"] > 1
    kept = 2 if facts["pp"] == 1 else 1
    unstated = {"never": kept, "always": 3}.get(facts.get("resharding", ""), 3 if facts["pp"] == 1 else 1)
    zero = facts.get("zero") or unstated
    found: Facts = {"shard": shard, "replicate": replicate, "zero": zero if is_sharded else 0}
    if shard and replicate:
        found["dp"] = shard * replicate
    if "recompute_fsdp" in facts or "recompute_ddp" in facts:
        found["recompute"] = facts.get("recompute_fsdp" if is_sharded else "recompute_ddp", "none")
    return found


# --- Megatron-LM's text of uneven stages: Et*19|t*21|t*21|t*19L ----------------------------------


def _layout_text(stages: tuple[int, ...], mtp_layers: int) -> str:
    texts = [f"t*{size}" if size else "" for size in stages]
    texts[0], texts[-1] = "E" + texts[0], texts[-1] + "m" * mtp_layers + "L"
    return "|".join(texts)


def _layout_stages(text: str) -> tuple[int, ...]:
    sizes = []
    for stage in text.replace(",", "").split("|"):
        if not re.fullmatch(r"(E|L|m|t(\*\d+)?)*", stage):
            raise DataError(f"--pipeline-model-parallel-layout {text} is not understood at {stage!r}")
        sizes.append(sum(int(count or 1) for count in re.findall(r"t(?:\*(\d+))?", stage)))
    return tuple(sizes)

"""Measured steps of post-training in meshwise's words, and what is predicted of each.

A row has the columns of a table of published steps: job, layout, lengths, seconds by phase. `preset` is our
name of the model, else its own, `model`. What a row leaves open is filled: the fewest GPUs of an engine that
hold the longest sample; ZeRO 1 under Megatron, ZeRO 3 under FSDP; the cap is what a packed bin leaves behind
the prompt. A row without chip, mean length, cap or size of the batch is not expressed, nor are several turns,
whose environment no row states.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwise.core.errors import DataError, PlanError
from meshwise.core.refusals import refuse
from meshwise.core.units import DTYPE_BYTES, positive
from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.plan.plan import Plan
from meshwise.rl.framework import RlFramework, find_framework
from meshwise.rl.job import MODES, OpenJob, RlJob
from meshwise.rl.layouts import smallest_engine
from meshwise.rl.rollouts import Rollouts
from meshwise.rl.step import RlStep
from meshwise.serve.measured import count

COLUMNS = ("software", "mode_kind", "chip", "prompts_per_step", "samples_per_prompt", "step_s")
"""Columns that every table of steps has."""

WITHOUT_REFERENCE = ("DAPO", "GPG")
"""Algorithms without a penalty on the distance from a reference (arXiv 2503.14476, 2504.02546)."""


def measured(row: Mapping[str, str]) -> dict[str, float]:
    """The seconds that a row states, by quantity."""
    names = ("step_s", "generation_s", "train_s", "sync_s", "logprob_s", "ref_s")
    found = {name: positive(row.get(name) or "") or 0.0 for name in names}
    found["scoring_s"] = found.pop("logprob_s") + found.pop("ref_s")
    return {name: seconds for name, seconds in found.items() if seconds}


def predicted(step: RlStep) -> dict[str, float]:
    """What a row measures of a step. On shared GPUs optimizer states leave within the sync."""
    phases = step.phases_s
    same = {f"{name}_s": phases[name] for name in ("generation", "scoring", "train")}
    return same | {"step_s": sum(phases.values()), "sync_s": phases["sync"] + phases["switch"] / 2.0}


def framework_of(row: Mapping[str, str], without: str = "") -> RlFramework:
    """The constants of a row's software, or as if its version was not known."""
    name = next((name for name in ("nemo-rl", "verl") if row["software"].lower().startswith(name)), "")
    if not name:
        raise DataError(f"column software: {row['software']!r} has no constants; known are NeMo-RL and verl")
    version = re.search(r"v?(\d+\.\d+)", row["software"])
    return find_framework(f"{name}={version[1]}" if version else name, without)


def job_of(row: Mapping[str, str], framework: RlFramework) -> RlJob:
    """A row in our words; a MeshwiseError says what is not expressed."""
    row = defaultdict(str, row, model=row.get("preset") or row.get("model") or "")
    refuse("measured step of rl", DataError, row=row, modes=MODES, known=", ".join(MODES))
    model, rollouts = find_model(row["model"]), _rollouts(row)
    has_reference = row["algorithm"].upper() not in WITHOUT_REFERENCE
    gpus = _count(row, "gpus") or (_count(row, "gpus_rollout") or 0) + (_count(row, "gpus_train") or 0)
    cluster = find_cluster(f"{row['chip']}:{gpus}")
    pack, per_step = _count(row, "pack_length"), _count(row, "train_global_batch")
    scored = _count(row, "logprob_batch_size")
    dtype = row["dtype"] or "bf16"
    if dtype not in DTYPE_BYTES:
        raise PlanError(f"column dtype: {dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    split, overlapped = row["mode_kind"] != "colocated", row["mode_kind"] == "async"
    asked = OpenJob(
        model=model, cluster=cluster, rollouts=rollouts, framework=framework, mode=row["mode_kind"],
        rollout_gpus=_count(row, "gpus_rollout") if split else None, reference=has_reference,
        memory_frac=float(row["rollout_memory_frac"] or 0) or None, old_logprobs=True,
        train_plan=_train_plan(row, dtype, model.moe is not None),
        updates=max(rollouts.num_samples // per_step, 1) if per_step else 1,
        pack_length=pack, score_tokens=pack * scored if pack and scored else None,
        staleness=max(math.ceil(float(row["staleness"] or 1)), 1) if overlapped else None,
        partial=row["partial_rollout"] == "1" if overlapped else None,
    )  # fmt: skip
    frac, tp = asked.usual_memory_frac, _count(row, "rollout_tp")
    engine = smallest_engine(model, cluster, rollouts, frac, dtype) if tp is None else Plan(
        tp=tp, pp=_count(row, "rollout_pp") or 1, ep=_count(row, "rollout_ep") or 1, dtype=dtype
    )  # fmt: skip
    return replace(asked, rollout_plan=engine).job()


def _rollouts(row: Mapping[str, str]) -> Rollouts:
    names = ("prompts_per_step", "samples_per_prompt", "prompt_len")
    prompts, samples, prompt = (count(row, name) for name in names)
    cap, pack = _count(row, "response_len_max"), _count(row, "pack_length")
    longest = pack - prompt if pack else cap
    return Rollouts(
        prompts=prompts, samples=samples, prompt=prompt, output=float(row["response_len_mean"]),
        max_output=min(cap or longest or 1, longest or 1),
    )  # fmt: skip


def _train_plan(row: Mapping[str, str], dtype: str, has_experts: bool) -> Plan:
    degrees = {axis: _count(row, f"train_{axis}") or 1 for axis in ("tp", "pp", "cp", "ep")}
    stated: dict[str, Any] = {"recompute": row["train_recompute"] or "none", "dtype": dtype}
    is_fsdp = not row["train_framework"].startswith("Megatron")
    zero = int(row["train_zero"] or (3 if is_fsdp else 1))
    stated |= {"implementation": "fsdp2" if is_fsdp else "megatron", "etp": 1 if has_experts else None}
    return Plan(zero=zero, **(stated | degrees))


def _count(row: Mapping[str, str], column: str) -> int | None:
    """The whole number of a cell; None where it is empty."""
    return count(row, column) if row[column] else None

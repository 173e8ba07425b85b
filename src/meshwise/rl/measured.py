"""Measured steps of post-training in meshwise's words, and what is predicted of each.

A row has the columns of a table of published steps: job, layout, lengths, seconds by phase. `preset` is our
name of the model, else its own, `model`. What a row leaves open is filled: the fewest GPUs of an engine that
hold the longest sample; ZeRO 1 under Megatron, ZeRO 3 under FSDP; the cap is what a packed bin leaves behind
the prompt. A row without chip, mean length, cap or size of the batch is not expressed, nor are several turns,
whose environment no row states.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from meshwise.core.errors import DataError, PlanError
from meshwise.core.expressions import formulas
from meshwise.core.files import read_catalog
from meshwise.core.refusals import refuse
from meshwise.core.units import DTYPE_BYTES, positive
from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.plan.plan import Plan
from meshwise.rl.engines import engine_layouts
from meshwise.rl.framework import RlFramework, find_framework
from meshwise.rl.job import MODES, OpenJob, RlJob
from meshwise.rl.rollouts import Rollouts
from meshwise.rl.step import RlStep
from meshwise.serve.measured import count

COLUMNS = ("software", "mode_kind", "chip", "prompts_per_step", "samples_per_prompt", "step_s")
"""Columns that every table of steps has."""

_NAMES = read_catalog("measured_names.toml")


def unknown_columns(names: Sequence[str]) -> list[str]:
    """Columns of a table of steps that are none of its; none of other tables."""
    known = " ".join(_NAMES["rl_columns"].values()).split()
    return [name for name in names if {*COLUMNS} <= {*names} and name not in known]


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
    names = {"row": row, "count": partial(_count, row), "pack": _count(row, "pack_length")}
    names |= {"float": float, "int": int, "max": max, "min": min, "ceil": math.ceil}
    names["model"] = model = find_model(row["model"])
    names["rollouts"] = rollouts = Rollouts(**formulas(_NAMES["rl_rollouts"], names))
    gpus = _count(row, "gpus") or (_count(row, "gpus_rollout") or 0) + (_count(row, "gpus_train") or 0)
    cluster = find_cluster(f"{row['chip']}:{gpus}")
    names["dtype"] = dtype = row["dtype"] or "bf16"
    if dtype not in DTYPE_BYTES:
        raise PlanError(f"column dtype: {dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    train_plan = Plan(**formulas(_NAMES["rl_train_plan"], names))
    asked = OpenJob(
        model=model, cluster=cluster, rollouts=rollouts, framework=framework, train_plan=train_plan,
        **formulas(_NAMES["rl_job"], names),
    )  # fmt: skip
    if row["rollout_tp"]:
        engine: Plan | None = Plan(**formulas(_NAMES["rl_rollout_plan"], names))
    else:
        engine = next(engine_layouts(model, cluster, rollouts, asked.usual_memory_frac, dtype), None)
    refuse("smallest engine", PlanError, found=engine, of=asked)
    return replace(asked, rollout_plan=engine).job()


def _count(row: Mapping[str, str], column: str) -> int | None:
    """The whole number of a cell; None where it is empty."""
    return count(row, column) if row[column] else None

"""What a training framework does where a run does not say: `catalog/frameworks.toml`.

Blank cells of a run are filled from the first entry that names its framework and is not older than its
release. Only what changes a prediction has a default; facts of the model and the hardware have none.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

from meshwise.calibrate.runs import Run
from meshwise.core.files import read_catalog


class Defaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the catalog. Fields with the name of a column of `Run` fill its blank cells.

    `implementation`, `cp_kind` and `software` are values of `meshwise.plan.Plan`; `graphed_software` is the
    software of a run whose iteration is one CUDA graph, if not the same, and `graphed_narrow_head` whether
    its head computes in fp8 (else bf16). `frozen_dtype` "as_computed": frozen weights are kept in the type of
    narrow matmuls. `dispatcher_in_racks`: where direct links join more than one host, if not the same.
    `selective` names the modules of selective recomputation, by the kind of model (mla, moe or dense);
    `tried` are changes of the plan, each a plan's text: where a run does not fit, the first that it leaves
    open and that fits is taken. An empty `loss_fusion` is as the software does.
    """

    names: tuple[str, ...]
    source: str
    software: str
    graphed_software: str = ""
    graphed_narrow_head: bool = False
    until: str = "9999-12"

    zero_stage: int = 1
    sequence_parallel: bool = True
    attention_kernel: str = "flash"
    optimizer: str = "adam"
    lora_targets: str = "all"
    lora_dropout: float = 0.0
    frozen_dtype: str = ""
    grad_dtype: str = "fp32"
    recompute_kind: str | None = None
    tp_comm_overlap: bool = False
    grad_reduce_overlap: bool = True
    moe_a2a_overlap: bool = False
    cuda_graph: str = "none"
    launch_blocking: bool = False
    dispatcher: str = "alltoall"
    dispatcher_in_racks: str = ""
    routing: str = "learned"
    memory_kind: str = "device"

    implementation: str = "megatron"
    cp_kind: str = "ring"
    loss_fusion: str = ""
    loss_chunks: int = 1
    dropout_frac: float = 0.0
    vocab_multiple: int = 1
    selective: dict[str, str] = {}
    tried: tuple[str, ...] = ("recompute=selective", "recompute=full")


HOST_RANKS = 16
"""The most chips of one host."""


@cache
def _catalog() -> dict[str, Any]:
    return read_catalog("frameworks.toml")


@cache
def entries() -> tuple[Defaults, ...]:
    """The catalog, in its order."""
    return msgspec.convert(tuple(_catalog()["frameworks"]), tuple[Defaults, ...])


def defaults_of(run: Run) -> Defaults:
    """The entry for the framework and release of `run`; where there is none, that without a name."""
    name = (run.framework or "").lower().replace("_", "-").replace(" ", "-")
    month = released(run)
    fitting = [entry for entry in entries() if month <= entry.until]
    return next(entry for known in (name, "") for entry in fitting if known in entry.names)


def released(run: Run) -> str:
    """Year and month of a release like 26.04.01 or 2024-12, or of one that the catalog dates.

    Without one, January of the run's year.
    """
    dated = _catalog()["releases"].get((run.framework or "").lower(), {})
    release = run.framework_release or ""
    found = re.fullmatch(r"(?:20)?(\d\d)[.-](0[1-9]|1[0-2])(?:[.-]\d\d)?", dated.get(release, release))
    return f"20{found[1]}-{found[2]}" if found else f"{run.year}-01"


def filled(run: Run) -> Run:
    """`run` with its blank cells filled by the defaults of its framework."""
    defaults = defaults_of(run)
    blank = [name for name in Defaults.__struct_fields__ if getattr(run, name, "") is None]
    values = {name: getattr(defaults, name) for name in blank}
    if "dispatcher" in values and (run.scale_up_ranks or 0) > HOST_RANKS:
        values["dispatcher"] = defaults.dispatcher_in_racks or defaults.dispatcher
    return msgspec.structs.replace(run, **values)

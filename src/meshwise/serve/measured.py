"""Measured serving points in meshwise's words: what a benchmark client saw, predicted by the simulation.

A row has the columns of aiconfigurator's public sample: system, backend, model, precision, layout, lengths,
concurrency. Its client (InferenceX) releases ten requests for each of `concurrency` at once, lets that many
run, draws lengths from 0.8 to 1 of the stated, and ignores ends of sequence, so that engines which reserve
output reserve all of it. Disaggregated rows have two pools of instances. Caches are fp8 unless the model is
bf16. Where a chip has no units for fp4, experts are kept in mxfp4 and computed in bf16, as gpt-oss is
published. Experts cut over attention-dp ranks are priced as spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwise.core.errors import DataError, PlanError, WorkloadError
from meshwise.machine.hardware import find_cluster
from meshwise.model.architecture import Model
from meshwise.model.find import find_model
from meshwise.plan.plan import Plan
from meshwise.serve.engine import ENGINES, Engine
from meshwise.serve.load import Fleet, under_load
from meshwise.serve.requests import in_closed_loop
from meshwise.serve.serving import Serving, serving

SYSTEMS = {
    "h100_sxm": "h100-80g-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200-sxm",
    "b300_sxm": "b300-sxm",
    "gb200": "gb200",
}
"""Chips by the sample's names of systems."""

MODELS = {
    "llama-3.1-8b": "llama3-8b",
    "llama-3.1-70b": "llama3-70b",
    "deepseek-v3": "deepseek-v3",
    "deepseek-r1": "deepseek-v3",
    "gpt-oss-120b": "gpt-oss-120b",
    "gpt-oss-20b": "gpt-oss-20b",
    "qwen3-235b-a22b": "qwen3-235b-a22b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3-32b": "qwen3-32b",
    "qwen3.5-397b-a17b": "qwen3.5-397b-a17b",
    "minimax-m2.5": "minimax-m2",
}
"""Presets by how the sample's names of models begin."""

LENGTH_RATIO = 0.8
REQUESTS_EACH = 10


COLUMNS = (
    *("mode", "system", "backend", "model", "precision", "tp", "attention_dp", "moe_tp", "moe_ep"),
    *("input_tokens", "output_tokens", "concurrency"),
)
"""Columns that `predict` reads."""


def predict(row: Mapping[str, str]) -> dict[str, float]:
    """Mean `ttft_s` and mean `tpot_s` of a row; a MeshwiseError says why there are none."""
    prompt, output = (_count(row, name) for name in ("input_tokens", "output_tokens"))
    model = find_model(_model(row["model"]))
    pools = ("prefill_", "decode_") if row["mode"] == "disagg" else ("",)
    *first, last = (_instance(row, pool, model, prompt, output) for pool in pools)
    workers = [_count(row, f"{pool}workers") if pool else 1 for pool in pools]
    fleet = Fleet(last, workers[-1], first[0] if first else None, workers[0])
    clients = _count(row, "concurrency")
    engine = _engine(row["backend"], clients, attends_alone=last.dp > 1)
    requests = in_closed_loop(clients, prompt, output, num=REQUESTS_EACH * clients, ratio=LENGTH_RATIO)
    load = under_load(fleet, requests, engine)
    if load is None:
        raise WorkloadError(f"{model.name} in {row['precision']} does not fit on {fleet.num_chips} chips")
    return {"ttft_s": float(load.served.ttft_s.mean()), "tpot_s": float(load.served.tpot_s.mean())}


def _instance(row: Mapping[str, str], pool: str, model: Model, prompt: int, output: int) -> Serving:
    """An instance of the row, or of its pool `prefill_` or `decode_`."""
    tp, dp, ep, etp = (_count(row, f"{pool}{name}") for name in ("tp", "attention_dp", "moe_ep", "moe_tp"))
    cluster = find_cluster(f"{_found(SYSTEMS, 'system', row['system'])}:{tp * dp}")
    dtype = row["precision"]
    plan = Plan(tp=tp, dtype=dtype, kv_dtype="bf16" if dtype == "bf16" else "fp8")
    if model.moe is not None and dtype == "fp4" and dtype not in cluster.chip.matrix_flop_per_s:
        plan = replace(plan, dtype="bf16", expert_dtype="mxfp4")
    if model.moe is not None:
        spread_ep, spread_etp = (ep, etp) if dp == 1 else (ep * etp, 1)
        plan = replace(plan, ep=spread_ep, etp=spread_etp)
    return serving(model, cluster, plan, prompt=prompt, output=output)


def _count(row: Mapping[str, str], column: str) -> int:
    text = row.get(column, "")
    if not text.isdecimal() or not int(text):
        raise DataError(f"column {column}: {text!r} is no count")
    return int(text)


def _engine(name: str, clients: int, *, attends_alone: bool) -> Engine:
    """The engine as the client's scripts start it (InferenceX: --scheduler-recv-interval, timeout_iters)."""
    engine: Engine = _found(ENGINES, "backend", name)
    engine = replace(engine, reserve_frac=float(engine.reserve_frac > 0))
    if name == "trtllm" and attends_alone:
        return replace(engine, align_passes=60)
    if name != "sglang" or attends_alone:
        return engine
    return replace(engine, poll_passes=30 if clients >= 16 else 10)


def _model(text: str) -> str:
    """The preset of the longest name that the last part of `text` begins with."""
    name = text.lower().rpartition("/")[2]
    begins = [known for known in MODELS if name.startswith(known)]
    return str(_found(MODELS, "model", max(begins, key=len, default=name)))


def _found(names: Mapping[str, Any], what: str, name: str) -> Any:
    if name not in names:
        raise PlanError(f"{what} {name!r} is not known; known are {', '.join(names)}")
    return names[name]

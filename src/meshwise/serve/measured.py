"""Measured serving points in meshwise's words: what a benchmark client saw, predicted by the simulation.

A row has the columns of aiconfigurator's public sample: system, backend, model, precision, layout, lengths,
concurrency; and those that it may state, of docs/data.md. What it does not say is as the client of its source
does it (`serve.inferencex`).
Disaggregated rows have two pools of instances. Where a chip has no units for fp4, experts are kept in mxfp4
and computed in bf16, as gpt-oss is published.

The rate of a closed loop follows from its latencies (Little's law): where a row does not state
`output_tokens_per_s_per_gpu`, measured and predicted rates are those of measured and predicted latencies.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwise.core.errors import ClusterError, DataError, PlanError, WorkloadError
from meshwise.core.expressions import formulas
from meshwise.core.refusals import refuse
from meshwise.core.units import positive, whole
from meshwise.machine.hardware import Chip, Cluster, find_chip, find_cluster
from meshwise.model.architecture import Model
from meshwise.model.find import find_model
from meshwise.plan.fields import read_words
from meshwise.plan.plan import Plan
from meshwise.serve import inferencex
from meshwise.serve.engine import ENGINES, SETTINGS, Engine, of_version
from meshwise.serve.load import Fleet, LoadResult, cache_tokens, under_load
from meshwise.serve.requests import Lengths, Requests, in_closed_loop
from meshwise.serve.router import RouterPolicy
from meshwise.serve.serving import serving, speculating

STATED = ("ttft_s", "tpot_s")
COUNTS = ("input_tokens", "output_tokens", "concurrency")
LAYOUT = ("tp", "attention_dp", "moe_tp", "moe_ep")
"""Degrees of an instance as `ServingLayout` has them; of a pool they begin with `prefill_` or `decode_`."""
COLUMNS = ("mode", "system", "backend", "model", "precision", *LAYOUT, *COUNTS, *STATED)
"""Columns that every table of points has."""
RATE = "output_tokens_per_s_per_gpu"
"""What is measured of a point: mean latencies, and the rate over all chips."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredPoint:
    """What a row measured: `requests` to `engine` on `fleet`."""

    fleet: Fleet
    requests: Requests
    engine: Engine


def point(row: Mapping[str, str]) -> MeasuredPoint:
    """A row in our words; a MeshwiseError says what is not expressed."""
    prompt, output, _ = (count(row, name) for name in COUNTS)
    if bad := [name for name, value in measured(row, None).items() if value is None and row.get(name)]:
        raise DataError(f"column {bad[0]}: {row[bad[0]]!r} is not above 0")
    name, model = row["model"].lower().rpartition("/")[2], find_model(row["model"])
    pools = ("prefill_", "decode_") if row["mode"] == "disagg" else ("",)
    layouts = [inferencex.ServingLayout(*(count(row, pool + name) for name in LAYOUT)) for pool in pools]
    workers = [count(row, f"{pool}workers", None if pool else 1) for pool in pools]
    scripts = [inferencex.script(row, name, layout, workers[-1]) for layout in layouts]
    instances = [_instance(row, pool, model, script) for pool, script in zip(pools, scripts, strict=True)]
    engine = _launched(row, scripts[-1])
    engines = (engine.of_prompts, engine) if len(pools) > 1 else (engine,)
    *first, last = (
        serving(model, cluster, plan, prompt=prompt, output=output, engine=of_pool)
        for (cluster, plan), of_pool in zip(instances, engines, strict=True)
    )
    if scripts[-1].speculate:
        last = speculating(last, scripts[-1].speculate)
    router = RouterPolicy(frontends=scripts[-1].frontends)
    fleet = Fleet(last, workers[-1], first[0] if first else None, workers[0], router=router)
    of = MeasuredPoint(fleet, _requests(row, scripts[-1].habits), engine)
    _check_room(of, row)
    return of


def _check_room(of: MeasuredPoint, row: Mapping[str, str]) -> None:
    """PlanError for a layout without half of the room for the sequences that ran at once by its rate.

    By Little's law they are the rate of tokens times the time of one; the mean of those that run has
    generated half of its output.
    """
    seen = measured(row, of)
    prompt, output = (sum(each) / len(each) for each in (of.requests.prompt, of.requests.output))
    running = (seen.get(RATE) or 0.0) * (seen.get("tpot_s") or 0.0) * of.fleet.num_chips
    room = of.fleet.workers * cache_tokens(of.fleet.serving) / (prompt + output / 2.0)
    refuse("measured point", PlanError, running=running, room=room)


def _launched(row: Mapping[str, str], script: inferencex.BenchmarkScript) -> Engine:
    """The engine of a row as it was started. Clients ignore ends of sequence, so all output is reserved."""
    name = row["backend"]
    if name not in ENGINES:
        raise PlanError(f"backend {name!r} is not known; known are {', '.join(ENGINES)}")
    engine = of_version(name, row.get("backend_version") or ENGINES[name].version)
    engine = replace(engine, reserve_frac=float(engine.reserve_frac > 0), foresees_ends=name == "sglang")
    if engine.name == "trtllm" and script.layout.dp > 1:
        engine = replace(engine, align_passes=60)
    if row["tp"] == "8":  # the same pull requests
        engine = replace(engine, expert_tile=1)
    batch = "max_batch" if row.get("max_batch") else "concurrency"
    names = {"of": engine.on(chip_of(row)), "dp": script.layout.dp, "min": min}
    names |= {"prompt": count(row, "input_tokens"), "batch": count(row, batch)}
    generated = inferencex.CATALOG["generated"][name] if script.habits["started"] == "by generator" else {}
    stated = read_words(row.get("engine_settings", ""), SETTINGS, DataError, "engine_settings")
    return engine.having(**script.settings, **formulas(generated, names)).having(**stated)


def _requests(row: Mapping[str, str], habits: Mapping[str, Any]) -> Requests:
    """The requests of a row: what it states of them, else by the `habits` of its client."""
    prompt, output, clients = (count(row, name) for name in COUNTS)
    num = count(row, "num_requests", habits["requests_each"] * clients)
    ratio = positive(row.get("length_ratio") or str(habits["length_ratio"])) or math.inf
    if ratio > 1:
        raise DataError(f"column length_ratio: {row['length_ratio']!r} is no share above 0, up to 1")
    requests = in_closed_loop(min(clients, num), Lengths(prompt, output, ratio), num=num)
    prompts = count(row, "num_prompts", habits["num_prompts"])
    warmups = min(habits["warmups_each"] * clients, prompts)
    return _repeated(requests, prompts, tuple(range(warmups))) if prompts else requests


def _repeated(requests: Requests, prompts: int, kept: tuple[int, ...]) -> Requests:
    """`requests` with their first `prompts` over and over; caches hold those `kept` at the start."""
    turn = [i % prompts for i in range(len(requests.prompt))]
    prompt, output = (tuple(tokens[i] for i in turn) for tokens in (requests.prompt, requests.output))
    blocks = tuple((i,) for i in turn)
    return replace(requests, prompt=prompt, output=output, blocks=blocks, block_tokens=max(prompt), kept=kept)


def unread_columns(names: Sequence[str]) -> list[str]:
    """Columns of a table of points that are neither read nor known to be for people; none of other tables."""
    known = {*COLUMNS, *inferencex.CATALOG["columns"]} if {*COLUMNS} <= {*names} else {*names}
    return [name for name in names if not {name, re.sub("^(prefill|decode)_", "", name)} & known]


def simulated(row: Mapping[str, str]) -> LoadResult:
    """A row under its load; a MeshwiseError says why there is none."""
    of = point(row)
    load = under_load(of.fleet, of.requests, of.engine)
    if load is None:
        name = of.fleet.serving.model.name
        raise WorkloadError(f"{name} in {row['precision']} does not fit on {of.fleet.num_chips} chips")
    return load


def predicted(row: Mapping[str, str], load: LoadResult) -> dict[str, float]:
    """What the client of a row would see."""
    ttft_s, tpot_s = (float(each.mean()) for each in (load.served.ttft_s, load.served.tpot_s))
    rate = load.output_tokens_per_s / load.fleet.num_chips if row.get(RATE) else _rate(load, ttft_s, tpot_s)
    return {"ttft_s": ttft_s, "tpot_s": tpot_s, RATE: rate}


def measured(row: Mapping[str, str], load: LoadResult | MeasuredPoint | None) -> dict[str, float | None]:
    """What a row states, and its rate unless all requests come at once.

    None where the rate needs a missing `load`, or a cell is bad.
    """
    found = {name: positive(row[name]) for name in (*STATED, RATE) if row.get(name)}
    ttft_s, tpot_s = (found.get(name) for name in STATED)
    num, clients = (whole(row.get(name, "")) or 0 for name in ("num_requests", "concurrency"))
    if RATE not in found and ttft_s and tpot_s and not 0 < num <= clients:
        found[RATE] = _rate(load, ttft_s, tpot_s) if load else None
    return found


def regime_of(row: Mapping[str, str], load: LoadResult | None) -> dict[str, str]:
    """The kind of a point, by aspect."""
    name = row.get("model", "").rpartition("/")[2]
    return {"engine": row.get("backend", ""), "model": name, "cache": load.regime if load else ""}


def _rate(load: LoadResult | MeasuredPoint, ttft_s: float, tpot_s: float) -> float:
    """Output tokens a second and GPU of a closed loop with these latencies."""
    requests = load.requests
    output = sum(requests.output) / len(requests.output)
    return requests.concurrency * output / (ttft_s + (output - 1.0) * tpot_s) / load.fleet.num_chips


def _instance(
    row: Mapping[str, str], pool: str, model: Model, script: inferencex.BenchmarkScript
) -> tuple[Cluster, Plan]:
    """The instance of a row, or of its pool, as it was started."""
    layout, dtype = script.layout, row["precision"]
    pp = count(row, f"{pool}pp", 1)
    cluster = find_cluster(f"{chip_of(row).name}:{layout.tp * pp * layout.dp}")
    kv_dtype = row.get("kv_dtype") or script.plan["kv_dtype"]
    plan = Plan(tp=layout.tp, pp=pp, dtype=dtype, **{**script.plan, "kv_dtype": kv_dtype})
    if model.moe is not None and dtype == "fp4" and dtype not in cluster.chip.matrix_flop_per_s:
        plan = replace(plan, dtype="bf16", expert_dtype="mxfp4")
    if model.moe is not None:
        plan = replace(plan, ep=layout.ep, etp=layout.etp)
    return cluster, plan


def count(row: Mapping[str, str], column: str, otherwise: int | None = None) -> int:
    """The whole number of a cell, or `otherwise` where it is blank; DataError where it is none."""
    if otherwise is not None and not row.get(column):
        return otherwise
    found = whole(row.get(column, ""))
    if not found:
        raise DataError(f"column {column}: {row.get(column, '')!r} is no count")
    return found


def chip_of(row: Mapping[str, str]) -> Chip:
    """The chip of the system that a row names: one of the catalog, with a - or a _ between its parts."""
    return find_chip(row.get("system", "").replace("_", "-"))


def chip_name(row: Mapping[str, str]) -> str:
    """The name of that chip, nothing if there is none."""
    try:
        return chip_of(row).name
    except ClusterError:
        return ""

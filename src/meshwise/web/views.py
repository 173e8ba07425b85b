"""What each view answers: from the state of its form (texts by name, as on the command line) to a page."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from meshwise import api
from meshwise.core.errors import ClusterError, DataError, ModelError, WorkloadError
from meshwise.core.files import parse_text
from meshwise.estimate.one_plan import Estimate
from meshwise.machine.hardware import Cluster, cluster_text, find_cluster, parse_cluster
from meshwise.model.architecture import Model
from meshwise.model.find import find_model
from meshwise.model.huggingface import model_from_config
from meshwise.plan.plan import KEYS, Plan, parse_plan, plan_keys, plan_text
from meshwise.report.accuracy_page import accuracy_page
from meshwise.report.estimate_page import compare_page, op_sections, summary_page
from meshwise.report.explain_page import explain_page
from meshwise.report.frontier_page import frontier_page
from meshwise.report.html import Page, Text, sections_html
from meshwise.report.search_page import search_page
from meshwise.report.serve_page import serve_page
from meshwise.report.trace_page import trace_page
from meshwise.web.drop import Drop
from meshwise.web.forms import COUNTS, DEGREES, asks, names

State = Mapping[str, str]
_KEPT = 64
"""Results that are kept, so that the parts of a view are asked for one after the other."""


@dataclass(frozen=True, slots=True)
class Server:
    """What a server was started with: the folder below which traces may be read; and what was dropped."""

    traces: Path | None = None
    drop: Drop = field(default_factory=Drop)

    def folder(self, name: str) -> Path:
        """The folder (or file) of traces that the page calls `name`."""
        if name.startswith("dropped-"):
            return self.drop.folder(name)
        if self.traces is None:
            raise DataError("drop a folder of traces, or start the page with it: meshwise web --traces DIR")
        root = self.traces.resolve()
        found = (root / name).resolve()
        if not found.is_relative_to(root) or not os.path.exists(found):  # noqa: PTH110 (no error of a long name)
            raise DataError(f"{name!r} is not below {root}; name a folder or a file there")
        return found


def answer(view: str, state: State, server: Server) -> dict[str, Any]:
    """What the view `view` shows of `state`, as JSON values.

    Raises:
        MeshwiseError: There is no such view or field, or as the verb of the command line.
    """
    if view not in _VIEWS:
        raise DataError(f"there is no view {view!r}; there are {', '.join(_VIEWS)}")
    if any("\0" in value for value in state.values()):
        raise DataError("a field holds a null byte; leave it out")
    for ask in asks(home(view)):
        if ask.kind == "select" and state.get(ask.name, "") not in ("", *ask.values):
            known = ", ".join(filter(None, ask.values))
            raise DataError(f"{ask.name}={state[ask.name]} must be one of {known}")
    if unknown := sorted({name.removeprefix("a.") for name in state} - names(home(view))):
        raise DataError(f"{view} has no field {unknown[0]!r}; it has {', '.join(sorted(names(home(view))))}")
    return _VIEWS[view](state, server)


def home(view: str) -> str:
    """The view whose form holds the state of `view`."""
    return "explore" if view in ("ops", "options", "launch", "machine") else view


# --- explore ------------------------------------------------------------------------------------


def _explore(state: State, _: Server) -> dict[str, Any]:
    found = _estimate(state)
    page = summary_page(found)
    pinned = {name.removeprefix("a."): value for name, value in state.items() if name.startswith("a.")}
    if pinned:
        beside = compare_page(_estimate({**_without_pin(state), **pinned}), found)
        page = replace(page, sections=[*beside.sections, *page.sections])
    return _shown(page) | {"command": _command(state, found), "python": _python(state, found)}


def _ops(state: State, _: Server) -> dict[str, Any]:
    """What stands below the summary; a question of its own, for its charts take the server longer."""
    return {"sections": sections_html(op_sections(_estimate(state)))}


def _options(state: State, _: Server) -> dict[str, Any]:
    """Every value of the plan's keys that is offered, and why it is none here (empty: it is one)."""
    model, cluster = _model(state), _cluster(state)
    stated = plan_keys(state.get("plan", ""))
    work = {name: _whole(state, name) for name in ("batch", "seq", "microbatch")}
    degrees = tuple(str(n) for n in range(1, cluster.num_chips + 1) if cluster.num_chips % n == 0)
    offered = dict.fromkeys(DEGREES, degrees) | COUNTS
    offered |= {key: field.names for key, field in KEYS.items() if field.names}

    def why_not(key: str, text: str) -> str:
        return api.refusal(model, cluster, stated | {key: text}, kind=state.get("kind", "train"), **work)

    return {"options": {key: [(text, why_not(key, text)) for text in offered[key]] for key in offered}}


def _launch(state: State, _: Server) -> dict[str, Any]:
    found = _estimate(state)
    to = state.get("to", "megatron-lm")
    work = found.workload
    written = api.launch(
        found.model,
        found.cluster,
        found.plan,
        to=to,
        batch=work.batch,
        seq=work.seq,
        microbatch=work.microbatch,
    )
    return {
        "title": f"{written.framework}, checked against {written.version}",
        "not_expressed": list(written.not_expressed),
        "files": [{"path": file.path, "text": file.text} for file in written.files],
    }


def _machine(state: State, _: Server) -> dict[str, Any]:
    return {"text": cluster_text(_cluster(state))}


def _estimate(state: State) -> Estimate:
    wanted = ("model", "config", "cluster", "machine", "plan", "batch", "seq", "microbatch", "kind")
    return _priced(tuple(state.get(name, "") for name in wanted))


@lru_cache(_KEPT)
def _priced(texts: tuple[str, ...]) -> Estimate:
    names = ("model", "config", "cluster", "machine", "plan", "batch", "seq", "microbatch", "kind")
    state = {name: text for name, text in zip(names, texts, strict=True) if text}
    work: dict[str, Any] = {name: _whole(state, name) for name in ("batch", "seq", "microbatch")}
    return api.estimate(_model(state), _cluster(state), _plan(state), kind=state.get("kind", "train"), **work)


def _command(state: State, found: Estimate) -> str:
    work, text = found.workload, plan_text(found.plan)
    model = "config.json" if state.get("config") else found.model.name
    cluster = "cluster.toml" if state.get("machine") else found.cluster.name
    words = ["meshwise", "estimate", model, "--cluster", cluster, *(["--plan", text] if text else [])]
    words += ["--batch", str(work.batch), "--seq", str(work.seq), "--microbatch", str(work.microbatch)]
    return shlex.join([*words, *(["--kind", work.kind] if work.kind != "train" else [])])


def _python(state: State, found: Estimate) -> str:
    work = found.workload
    model = "config.json" if state.get("config") else found.model.name
    cluster = "cluster.toml" if state.get("machine") else found.cluster.name
    kind = f", kind={work.kind!r}" if work.kind != "train" else ""
    return (
        "import meshwise as mw\n\n"
        f"found = mw.estimate({model!r}, {cluster!r}, {plan_text(found.plan)!r}, batch={work.batch}, "
        f"seq={work.seq}, microbatch={work.microbatch}{kind})\n"
        "print(found.step_s, found.memory_bytes, found.fits)\n"
    )


# --- the other views ----------------------------------------------------------------------------


def _search(state: State, _: Server) -> dict[str, Any]:
    kept = ("model", "config", "cluster", "machine", "batch", "seq")
    job = {name: state[name] for name in kept if state.get(name)}
    found = _searched(
        tuple(job.items()),
        state.get("plan", ""),
        _number(state, "memory_frac") or 0.92,
        _whole(state, "top") or 8,
    )
    return _shown(search_page(found, color=state.get("color", "tp"), job=job))


@lru_cache(_KEPT)
def _searched(job: tuple[tuple[str, str], ...], plan: str, memory_frac: float, top: int) -> Any:
    state = dict(job)
    batch = _whole(state, "batch")
    if batch is None:
        raise WorkloadError("say how many sequences a step has: fill in batch")
    return api.search(
        _model(state), _cluster(state), _no_path(plan), batch=batch, seq=_whole(state, "seq"),
        memory_frac=memory_frac, top=top,
    )  # fmt: skip


def _serve(state: State, _: Server) -> dict[str, Any]:
    model, cluster, plan = _model(state), _cluster(state), _no_path(state.get("plan", ""))
    tokens: dict[str, Any] = {name: _whole(state, name) for name in ("prompt", "output")}
    limits: dict[str, Any] = {
        name: limit and limit / 1e3 for name, limit in
        (("token_s", _number(state, "token_ms")), ("ttft_s", _number(state, "ttft_ms")))
    }  # fmt: skip
    load: dict[str, Any] = {"rate": _number(state, "rate"), "concurrency": _whole(state, "concurrency")}
    found = api.serve(model, cluster, plan, price=state.get("price", ""), **tokens, **limits, **load)
    formats = ",".join(item for item in plan.split(",") if item.partition("=")[0].endswith("dtype"))
    sizing = found.sizing or api.serve(model, cluster, formats, pareto=True, **tokens).sizing
    return _shown(serve_page(found, sizing))


def _frontier(state: State, _: Server) -> dict[str, Any]:
    settings: dict[str, Any] = {
        name: value for name, value in state.items()
        if name not in ("chip", "beside", "months", "utilization", "mtbf_hours") and value
    }  # fmt: skip
    hours = _number(state, "mtbf_hours")
    if hours is not None:
        settings["device_s_between_interruptions"] = 3.6e6 * hours
    months, utilization = _number(state, "months"), _number(state, "utilization")
    chips = [chip for chip in (state.get("chip", "h100-80g-sxm"), state.get("beside", "")) if chip]
    first, *others = (
        api.frontier(chip, months=months, utilization=0.7 if utilization is None else utilization, **settings)
        for chip in map(_no_path, chips)
    )
    return _shown(frontier_page(first, others))


def _traces(state: State, server: Server) -> dict[str, Any]:
    folder = server.folder(state.get("path", ""))
    from meshwise.trace.summary import summarize_paths

    steps = state.get("steps", "")
    summary = summarize_paths([folder], steps=steps)
    summary.check_readable()
    page = trace_page(summary)
    job = {name: state.get(name, "") for name in ("model", "cluster", "plan")}
    if state.get("batch") and job["model"] and job["cluster"]:
        work = {name: _whole(state, name) for name in ("batch", "seq", "microbatch")}
        joined = explain_page(
            api.explain(folder, _model(job), _cluster(job), _plan(job), steps=steps, timeline=None, **work)
        )
        page = replace(page, sections=[Text("", [joined.headline]), *joined.sections, *page.sections])
    return _shown(page)


def _accuracy(state: State, _: Server) -> dict[str, Any]:
    found = _validated()
    text, least = state.get("text", "").lower(), (_number(state, "worse") or 0.0) / 100
    rows = [
        row for row in found.rows
        if text in f"{row.id} {row.source} {row.chip}".lower()
        and state.get("quantity", "") in ("", row.quantity)
        and abs(row.error_frac or 0.0) >= least
    ]  # fmt: skip
    return _shown(accuracy_page(replace(found, rows=rows)))


@lru_cache(1)
def _validated() -> Any:
    return api.validate()


# --- reading a state ----------------------------------------------------------------------------


def _shown(page: Page) -> dict[str, Any]:
    sections = sections_html(page.sections)
    return {"title": page.title, "headline": page.headline, "ok": page.ok, "sections": sections}


def _without_pin(state: State) -> dict[str, str]:
    return {name: value for name, value in state.items() if not name.startswith("a.")}


def _model(state: State) -> Model:
    if config := state.get("config"):
        raw = parse_text(config, "config.json", "JSON", msgspec.json.decode, ModelError)
        return model_from_config(raw, name="config", where="config.json")
    if not state.get("model"):
        raise ModelError("name a model: a preset, or paste its config.json")
    return find_model(_no_path(state["model"]))


def _cluster(state: State) -> Cluster:
    if text := state.get("machine"):
        return parse_cluster(text)
    if not state.get("cluster"):
        raise ClusterError("name a cluster: a preset, or chip:count")
    return find_cluster(_no_path(state["cluster"]))


def _plan(state: State) -> Plan:
    return parse_plan(_no_path(state.get("plan", "")))


def _no_path(text: str) -> str:
    """`text`, which the page takes as a name only: what it shows is never read from a file that it names."""
    if "/" in text or text.endswith((".toml", ".json")) or os.path.lexists(text):
        raise DataError(f"{text!r} is a path; the page takes names: paste the file, or use the command line")
    return text


def _number(state: State, name: str) -> float | None:
    try:
        return float(state[name]) if state.get(name) else None
    except ValueError:
        raise WorkloadError(f"{name}={state[name]} must be a number") from None


def _whole(state: State, name: str) -> int | None:
    value = _number(state, name)
    if value is not None and not value.is_integer():
        raise WorkloadError(f"{name}={state[name]} must be a whole number")
    return None if value is None else int(value)


_VIEWS: dict[str, Callable[[State, Server], dict[str, Any]]] = {
    "explore": _explore, "ops": _ops, "options": _options, "launch": _launch, "machine": _machine,
    "search": _search, "serve": _serve, "frontier": _frontier, "traces": _traces, "accuracy": _accuracy,
}  # fmt: skip
QUICK = ("explore", "ops", "options", "launch", "machine")
"""Views that take a few milliseconds; the others leave the server's loop."""

"""What each view answers: from the state of its form (texts by name, as on the command line) to a page.

The options of a view are those of the verbs that it takes and its own; its form is made from them.

A folder of traces that a browser drops is kept in a temporary folder of the server until the next one. A
browser hides where a folder lies, and sends its files. They lie below the server's own folder, which is
bounded in size and is gone when the server ends.
"""

import os
import re
import secrets
import shlex
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Literal, get_args

import msgspec

from meshwise import api
from meshwise.core.each import HEARS, telling
from meshwise.core.errors import DataError, MeshwiseError, ModelError, WorkloadError
from meshwise.core.files import parse_text
from meshwise.core.options import REQUIRED, Option, all_options, options_in, options_of, stated_in, takes
from meshwise.core.refusals import refuse
from meshwise.estimate.one_plan import Estimate
from meshwise.launch.settings import SERVING
from meshwise.machine.hardware import cluster_text, find_cluster, parse_cluster
from meshwise.model.find import find_preset
from meshwise.model.huggingface import model_from_config
from meshwise.plan.plan import KEYS, plan_keys, plan_text
from meshwise.published.frontier import OPTIONS
from meshwise.report import frontier as frontiers, search as searched, serve as served
from meshwise.report.answer import Page, Text
from meshwise.report.estimate import compare_page, op_sections, summary_page
from meshwise.report.html import html_page, sections_html
from meshwise.report.pages import page_of
from meshwise.report.programs import as_written_text
from meshwise.search.space import divisors
from meshwise.web.forms import COUNTS, DEGREES, MODELS

MOST_BYTES = 2**33
"""A dropped folder is no larger, nor than half of the room that the disk has."""
MOST_FILES = 10_000
_TOO_LARGE = "the folder is too large to send; start the page with it: meshwise web --traces DIR"
_DROPPED = "meshwise-traces-"
ENDINGS = (".json", ".json.gz")


class Drop:
    """The folder that was dropped last; `name` is that by which the page asks for it (empty: none yet)."""

    def __init__(self) -> None:
        self.name = ""
        self._home: TemporaryDirectory[str] | None = None
        self._bytes_left = 0
        self._files_left = 0

    def start(self) -> str:
        """Forget the folder of before; the name of the new one."""
        self.close()
        self._home = TemporaryDirectory(prefix=_DROPPED)
        self._bytes_left = min(MOST_BYTES, shutil.disk_usage(self._home.name).free // 2)
        self._files_left = MOST_FILES
        self.name = f"dropped-{secrets.token_hex(8)}"
        return self.name

    def folder(self, name: str) -> Path:
        """Where the files of the folder `name` lie. DataError where another was dropped after it."""
        if self._home is None or name != self.name:
            raise DataError(f"the folder {name} is no longer here; drop it again")
        return Path(self._home.name)

    async def receive(self, name: str, file: str, pieces: AsyncIterator[bytes]) -> None:
        """Write a file of the folder, `file` below it, as its bytes arrive."""
        parts = PurePosixPath(file).parts
        if not file.endswith(ENDINGS) or ".." in parts or "\0" in file or PurePosixPath(file).is_absolute():
            raise DataError(f"{file!r} is no trace; drop files that end in {' or '.join(ENDINGS)}")
        path = self.folder(name).joinpath(*parts)
        self._files_left -= 1
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("wb") as written:
                async for piece in pieces:
                    self._bytes_left -= len(piece)
                    if min(self._bytes_left, self._files_left) < 0:
                        self.close()
                        raise DataError(_TOO_LARGE)
                    written.write(piece)
        except BaseException:  # the client may go away at any piece
            path.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Delete what was dropped."""
        if self._home is not None:
            self._home.cleanup()
        self.name, self._home = "", None


State = Mapping[str, str]
Hear = Callable[[str], None]
"""Hears now and then how far a search is."""
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


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, in the texts of the form, and the server that is asked."""

    state: State
    server: Server


def answer(view: str, state: State, server: Server, hear: Hear = lambda so_far: None) -> dict[str, Any]:
    """What the view `view` shows of `state`, as JSON values; `hear` is told how far a search is.

    Raises:
        MeshwiseError: There is no such view or field, or as the verb of the command line.
    """
    known = sorted(option.typed for option in options(home(view)).values())
    unknown = sorted({one.removeprefix("a." * (home(view) == "explore")) for one in state}.difference(known))
    names = {"views": ", ".join(_ANSWERS), "unknown": unknown, "known": ", ".join(known)}
    refuse("page", DataError, view=view, is_view=view in _ANSWERS, texts="".join(state.values()), **names)
    try:
        with telling(lambda done, total: hear(""), hear):
            found = _ANSWERS[view](Question(state, server), **_asked(home(view), state))
    except MeshwiseError as error:
        raise type(error)(_on_page(str(error), view)) from None
    return found | {"sections": [_on_page(html, view) for html in found.get("sections", ())]}


def _on_page(text: str, view: str) -> str:
    """`text` with fields in place of flags, but in commands, and without the folder of what was dropped."""
    text = re.sub(rf"{re.escape(gettempdir())}/{_DROPPED}\w+/", "", text)
    fields = {option.typed.replace("_", "-"): option.typed for option in options(home(view)).values()}

    def field(flag: re.Match[str]) -> str:
        sign = f"=no{flag[3]}" if flag[1] else "=" * len(flag[3])
        return fields[flag[2]] + sign if flag[2] in fields else flag[0]

    return text if "meshwise " in text else re.sub("--(no-)?([a-z-]+)((?: (?=[A-Z]))?)", field, text)


def home(view: str) -> str:
    """The view whose form holds the state of `view`."""
    return view if view in VIEWS else "explore"


@cache
def options(view: str) -> dict[str, Option]:
    """The options of a view by name. The page takes names and texts, so those that are paths are none."""
    found = all_options(VIEWS[view])
    if view == "frontier":
        found |= {name: Option(name, Literal[known], known[0], "") for name, known in OPTIONS.items()}
    is_path = {name for name, of in found.items() if Path in (of.kind, *get_args(of.kind))}
    return {
        name: replace(option, help=_FILES.sub("", option.help))
        for name, option in found.items() if name not in is_path
    }  # fmt: skip


_FILES = re.compile(r",? or (the path of a config\.json|a TOML file( with lists)?)")
"""Words of an option's meaning that only the command line takes."""


def _asked(view: str, state: State) -> dict[str, Any]:
    """The values of a view's options; what is pasted takes the place of a name."""
    pasted: dict[str, Any] = {}
    if config := state.get("config"):
        raw = parse_text(config, "config.json", "JSON", msgspec.json.decode, ModelError)
        pasted["model"] = model_from_config(raw, name="config", where="config.json")
    if machine := state.get("machine"):
        pasted["cluster"] = parse_cluster(machine, "machine")
    found = {}
    for name, option in options(view).items():
        text = state.get(option.typed, "")
        if name not in pasted and not text and option.default is REQUIRED:
            raise WorkloadError(f"{view} needs {name}: {option.help}")
        preset = find_preset(text) if name in MODELS else None
        if preset is None and option.kind not in (int, float) and name not in _FREE:
            _check_name(text, name in MODELS)
        found[name] = preset or (option.value(text) if text else option.default)
    return found | pasted


_FREE = ("config", "machine", "path", "text")
"""Texts that name nothing that a verb would look up."""


def _check_name(text: str, is_model: bool) -> None:
    """What the page shows is never read from a file that a field names, nor a model from a folder."""
    is_folder = is_model and os.path.lexists(text.partition(",")[0])
    if is_folder or re.search(r"/|\.(toml|json)\b", text):
        raise DataError(f"{text!r} is a path; the page takes names: paste the file, or use the command line")


def _result(verb: Callable[..., Any], view: str, state: State) -> Any:
    """What a verb answers; the parts of a view, and pinned plans, ask for the same more than once."""
    taken = {*options_of(verb), "config", "machine"}
    return _kept(verb, view, tuple(sorted((name, text) for name, text in state.items() if name in taken)))


@lru_cache(_KEPT)
def _kept(verb: Callable[..., Any], view: str, texts: tuple[tuple[str, str], ...]) -> Any:
    asked = options_in(_asked(view, dict(texts)), verb)
    if verb is api.search:
        asked["on_plans"] = lambda kept: HEARS.get()(kept.so_far)
    return verb(**asked)


def _own(*, config: str = "", machine: str = "") -> None:
    """Your own model or machine.

    Args:
        config: Paste or drop a config.json here; it replaces the preset.
        machine: An edited cluster as TOML; it replaces the preset.
    """


# --- explore ------------------------------------------------------------------------------------


@takes(api.estimate, api.budget, _own, without=("ideal", "mtbf", "storage", "restart"))
def explore(context: Question, *, to: str = "megatron-lm", **asked: Any) -> dict[str, Any]:
    """One plan, and a pinned one beside it.

    Args:
        to: The framework of the launch settings.
    """
    state = context.state
    found = _estimate(state)
    run = api.budget(**options_in(asked, api.budget)).run(found)
    return _shown(_beside_pinned(summary_page(found, run), state)) | _words(state, found)


def _beside_pinned(page: Page, state: State) -> Page:
    """`page` below its comparison with the pinned plan, of which the state says all: `a.model`, ..."""
    pinned = {name.removeprefix("a."): value for name, value in state.items() if name.startswith("a.")}
    beside = compare_page(_estimate(pinned), _estimate(state)).sections if pinned else []
    return replace(page, sections=[*beside, *page.sections])


def _ops(context: Question, **_: Any) -> dict[str, Any]:
    """What stands below the summary; a question of its own, for its charts take the server longer."""
    return {"sections": sections_html(op_sections(_estimate(context.state)))}


def _options(context: Question, **asked: Any) -> dict[str, Any]:
    """Every value of the plan's keys that is offered, and why it is none here (empty: it is one)."""
    asked["cluster"] = cluster = _cluster(asked)
    stated = plan_keys(asked.pop("plan"))
    job = options_in(asked, api.refusal)
    degrees: Sequence[str] = [*map(str, divisors(cluster.num_chips)[:40])]
    offered = dict.fromkeys(DEGREES, degrees) | COUNTS
    offered |= {key: field.names for key, field in KEYS.items() if field.names}
    found = {
        key: [(text, api.refusal(plan=stated | {key: text}, **job)) for text in texts]
        for key, texts in offered.items()
    }
    return {"options": found}


def _launch(context: Question, to: str, **_: Any) -> dict[str, Any]:
    found = _estimate(context.state)
    refuse("launch of an estimate", WorkloadError, to=to, kind=found.workload.kind, serves=to in SERVING)
    size = {name: getattr(found.workload, name) for name in ("batch", "seq", "microbatch")}
    written = api.launch(found.model, found.cluster, found.plan, to=to, **size)
    return {
        "title": f"{written.framework}, checked against {written.version}",
        "lines": [*as_written_text(written), *written.not_expressed, *written.elsewhere],
        "files": [{"path": file.path, "text": file.text} for file in written.files],
    }


def _save(context: Question, **asked: Any) -> dict[str, Any]:
    """The page of the plan as one file that needs no network, with the plan in its name."""
    found = _estimate(context.state)
    run = api.budget(**options_in(asked, api.budget)).run(found)
    names = found.model.name, found.cluster.name, plan_text(found.plan)
    name = re.sub("[^a-z0-9.]+", "-", "-".join(filter(None, names)).lower())
    return {
        "name": f"{name[:80]}.html",
        "text": html_page(_beside_pinned(page_of(found, run=run), context.state)),
    }


def _machine(context: Question, **asked: Any) -> dict[str, Any]:
    return {"text": cluster_text(_cluster(asked))}


def _cluster(asked: dict[str, Any]) -> Any:
    return find_cluster(asked["cluster"]) if isinstance(asked["cluster"], str) else asked["cluster"]


def _estimate(state: State) -> Estimate:
    return _result(api.estimate, "explore", state)


def _words(state: State, found: Estimate) -> dict[str, str]:
    """The same question on the command line and in Python, and what is to be saved for them."""
    files = (("model", "config", "config.json"), ("cluster", "machine", "cluster.toml"))
    saved = {name: file for name, pasted, file in files if state.get(pasted)}
    texts = {**state, **saved, "plan": plan_text(found.plan)}
    values = {name: of.value(texts[name]) for name, of in options("explore").items() if texts.get(name)}
    stated = {name: values[name] for name in stated_in(values, explore)}
    asked, of_run = options_in(stated, api.estimate), options_in(stated, api.budget)
    words = ["meshwise", "estimate", texts["model"]]
    for name, value in (asked | of_run).items():
        if name != "model":
            flag = f"--{'no-' * (value is False)}{name.replace('_', '-')}"
            words += [flag] if isinstance(value, bool) else [flag, texts[name]]
    lines = ["import meshwise as mw", "", f"found = mw.estimate({_arguments(asked)})"]
    lines += ["print(found.step_s, found.memory_bytes, found.fits)"]
    lines += [f"print(mw.budget({_arguments(of_run)}).run(found))"] if of_run else []
    needs = f"; save what you pasted as {' and '.join(saved.values())}" * bool(saved)
    return {"command": shlex.join(words), "python": "\n".join([*lines, ""]), "needs": needs}


def _arguments(asked: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in asked.items())


# --- the other views ----------------------------------------------------------------------------


@takes(api.search, _own, without=("on_plans",))
def search(
    context: Question,
    *,
    top: int = 8,
    color: Literal["tp", "pp", "cp", "ep", "vpp", "zero", "recompute", "schedule", "microbatch"] = "tp",
    **_: Any,
) -> dict[str, Any]:
    """The space of plans, and the best of each family.

    Args:
        color: The key by which plans are colored.
    """
    taken = {*options_of(api.estimate), *options_of(_own)}
    job = {name: text for name, text in context.state.items() if name in taken}
    return _shown(searched.page(_result(api.search, "search", context.state), color=color, job=job))


@takes(api.serve, _own, without=("pareto",))
def serve(context: Question, **asked: Any) -> dict[str, Any]:
    """What a server gives, beside the layouts that there are."""
    asked = options_in(asked, api.serve)
    found = api.serve(**asked)
    formats = ",".join(item for item in asked["plan"].split(",") if item.partition("=")[0].endswith("dtype"))
    same = ("model", "cluster", "prompt", "output", "token_s", "ttft_s")
    layouts = {name: asked[name] for name in same}
    return _shown(served.page(found, found.sizing or api.serve(**layouts, plan=formats, pareto=True).sizing))


@takes(api.rl, _own, without=("lengths",))
def rl(context: Question, **asked: Any) -> dict[str, Any]:
    """A step of post-training, phase by phase, and the best split where it is left open."""
    return _shown(page_of(api.rl(**options_in(asked, api.rl))))


@takes(api.frontier)
def frontier(
    context: Question, *, chip: str = "h100-80g-sxm", beside: str = "", elem_bytes: float = 2,
    num_experts: float = 1, mtbf_thousand_hours: float = 50.7, **asked: Any,
) -> dict[str, Any]:  # fmt: skip
    """The largest efficient run of a chip.

    Args:
        beside: Another one, for comparison.
        elem_bytes: Bytes of a word.
        num_experts: Experts of a layer.
        mtbf_thousand_hours: Mean time of a device between failures.
    """
    settings = asked | {"elem_bytes": elem_bytes, "num_experts": num_experts}
    settings["device_s_between_interruptions"] = 3.6e6 * mtbf_thousand_hours
    first, *others = (api.frontier(name, **settings) for name in filter(None, (chip, beside)))
    return _shown(frontiers.page(first, others))


@takes(api.explain, _own, without=("traces",))
def traces(context: Question, *, path: str = "", **asked: Any) -> dict[str, Any]:
    """All ranks over time; with a model and a cluster, the predicted step beside the measured one.

    Args:
        path: Drop or choose a folder, or name one below --traces.
    """
    folder = context.server.folder(path)
    from meshwise.trace.summary import summarize_paths

    summary = summarize_paths([folder], steps=asked["steps"])
    summary.check_readable()
    page = page_of(summary)
    job = options_in(asked, api.explain)
    if any(value for name, value in job.items() if name not in ("steps", "kind")):
        joined = page_of(api.explain(folder, **job))
        page = replace(page, sections=[Text("", [joined.headline]), *joined.sections, *page.sections])
    return _shown(page)


def accuracy(
    context: Question,
    *,
    text: str = "",
    quantity: Literal["", "step_s", "memory_bytes"] = "",
    worse: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Predicted against measured.

    Args:
        text: Part of the name of a run, its source or its chip.
        quantity: Of which quantity.
        worse: Errors of at least so many percent.
    """
    found = _validated()
    rows = [
        row for row in found.rows
        if text.lower() in f"{row.id} {row.source} {row.chip}".lower()
        and quantity in ("", row.quantity)
        and abs(row.error_frac or 0.0) >= worse / 100
    ]  # fmt: skip
    return _shown(page_of(replace(found, rows=rows)))


_validated = cache(api.validate)


def _shown(page: Page) -> dict[str, Any]:
    sections = sections_html(page.sections)
    return {"title": page.title, "headline": page.headline, "ok": page.ok, "sections": sections}


VIEWS: dict[str, Callable[..., dict[str, Any]]] = {
    view.__name__: view for view in (explore, search, serve, rl, frontier, traces, accuracy)
}
_ANSWERS = VIEWS | {"ops": _ops, "options": _options, "launch": _launch, "machine": _machine, "save": _save}
QUICK = ("explore", "ops", "options", "launch", "machine", "save")
"""Views that take a few milliseconds; the others leave the server's loop."""

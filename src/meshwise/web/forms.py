"""What the page asks for: the fields of each view, stated once for the form, the address and the checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from meshwise.launch.write import FRAMEWORKS
from meshwise.machine.hardware import chips, cluster_names
from meshwise.model.find import model_names
from meshwise.plan.plan import DEFAULTS, KEYS
from meshwise.published.frontier import OPTIONS
from meshwise.report.html import escape

DEGREES = ("tp", "pp", "cp", "ep", "dp", "etp", "ulysses", "zero_group")
"""Keys whose values divide the number of chips."""
COUNTS = {
    "vpp": tuple(map(str, (1, 2, 3, 4, 6, 8, 12, 16))),
    "zero": ("0", "1", "2", "3"),
    "panels": ("1", "2", "4", "8"),
    "lora_rank": ("0", "8", "16", "32", "64", "128"),
}
"""Other keys that are chosen from a list, and its values."""
FIRST_KEYS = ("tp", "pp", "vpp", "schedule", "cp", "ep", "zero", "recompute", "dtype")


@dataclass(frozen=True, slots=True)
class Ask:
    """A field of a form. `kind`: text, number, range, select, lines, folder, or key (of the plan).

    `values`: those of a select, of a list of suggestions, or the ends and the step of a range.
    """

    name: str
    label: str
    kind: str = "text"
    value: str = ""
    values: Sequence[str] = ()
    help: str = ""


Group = tuple[str, Sequence[Ask], bool]
"""A title, its fields, and whether it is shown from the start."""


def _job(plan: bool, batch: str = "256") -> list[Ask]:
    """What runs where, and how much of it."""
    where = [*cluster_names(), *(f"{name}:8" for name in chips())]
    asks = [
        Ask("model", "Model", "text", "llama3-8b", model_names(), "A preset; your own goes below."),
        Ask("cluster", "Cluster", "text", "h100-80g-sxm:64", where, "A preset, or chip:count."),
    ]
    asks += [Ask("plan", "Plan", help="tp=8,pp=4,...")] if plan else []
    if batch:
        asks += [
            Ask("batch", "Batch [sequences]", "number", batch),
            Ask("seq", "Sequence [tokens]", "number", "4096"),
            Ask("microbatch", "Microbatch", "number", help="Sequences."),
        ]
    return asks


def _keys(names: Sequence[str]) -> list[Ask]:
    return [Ask(name, name, "key", help=KEYS[name].doc) for name in names]


@cache
def forms() -> dict[str, list[Group]]:
    """The groups of fields of each view."""
    return {
        "explore": [
            ("Job", [*_job(plan=False), Ask("kind", "Kind", "select", KINDS[0], KINDS)], True),
            _OWN,
            ("Plan", _keys(FIRST_KEYS), True),
            ("More of the plan", _keys([key for key in KEYS if key not in FIRST_KEYS]), False),
            ("Launch", [Ask("to", "Framework", "select", FRAMEWORKS[0], FRAMEWORKS)], True),
        ],
        "search": [
            ("Job", [ask for ask in _job(plan=True) if ask.name != "microbatch"], True),
            _OWN,
            ("Picture", _PICTURE, True),
        ],
        "serve": [("Job", _job(plan=True, batch=""), True), _OWN, ("Traffic", _TRAFFIC, True)],
        "frontier": [("Run", [*_chips(), *_RUN], True), ("Choices", _choices(), True)],
        "traces": [("Traces", _TRACES, True), ("Prediction", _job(plan=True), False)],
        "accuracy": [("Filter", _FILTER, True)],
    }


_OWN: Group = (
    "Your own model or machine",
    [
        Ask("config", "config.json", "lines", help="Paste or drop a file here; it replaces the preset."),
        Ask("machine", "Cluster (TOML)", "lines", help="An edited cluster; it replaces the preset."),
    ],
    False,
)
KINDS = ("train", "evaluate", "prefill", "decode")
_COLORS = ("tp", "pp", "cp", "ep", "vpp", "zero", "recompute", "schedule", "microbatch")
_PICTURE = [
    Ask("color", "Color by", "select", "tp", _COLORS),
    Ask("memory_frac", "Memory a plan may need", "range", "0.92", ("0.1", "1", "0.02")),
    Ask("top", "Families shown", "number", "8"),
]
_TRAFFIC = [
    Ask("prompt", "Prompt [tokens]", "number", "2048"),
    Ask("output", "Output [tokens]", "number", "256"),
    Ask("rate", "Requests a second", "number"),
    Ask("concurrency", "Clients at once", "number", help="Instead of a rate."),
    Ask("token_ms", "Target per token [ms]", "number"),
    Ask("ttft_ms", "First token [ms]", "number", help="With a rate and no tp: the fewest GPUs."),
    Ask("price", "Price of a GPU-hour", "number"),
]
_RUN = [
    Ask("months", "Longest run [months]", "range", "3", ("1", "24", "1")),
    Ask("utilization", "Share of the peaks", "range", "0.7", ("0.3", "1", "0.05")),
    Ask("elem_bytes", "Bytes of a word", "range", "2", ("0.5", "4", "0.5")),
    Ask("num_experts", "Experts", "range", "1", ("1", "64", "1")),
    Ask("mtbf_hours", "Between failures", "range", "51", ("5", "1000", "1"), "Thousand hours of a device."),
]
_TRACES = [
    Ask(
        "path",
        "Folder",
        "folder",
        help="Drop or choose one, or name one below --traces.",
    ),
    Ask("steps", "Steps", help="3-7, or complete"),
]
_FILTER = [
    Ask("text", "Contains", help="In the run, its source or its chip."),
    Ask("quantity", "Quantity", "select", "", ("", "step_s", "memory_bytes")),
    Ask("worse", "Errors of at least [%]", "number"),
]


def _chips() -> list[Ask]:
    known = tuple(chips())
    other = Ask("beside", "Beside it", "select", "", ("", *known))
    return [Ask("chip", "Chip", "select", "h100-80g-sxm", known), other]


def _choices() -> list[Ask]:
    return [Ask(name, name, "select", values[0], values) for name, values in OPTIONS.items()]


def asks(view: str) -> list[Ask]:
    """All fields of a view."""
    return [ask for _, group, _ in forms()[view] for ask in group]


@cache
def names(view: str) -> set[str]:
    """The names of all fields of a view, those of the plan's keys as one."""
    return {"plan" if ask.kind == "key" else ask.name for ask in asks(view)}


def form_html(view: str, groups: Sequence[Group]) -> str:
    """The form of a view."""
    parts = []
    for title, asks, is_open in groups:
        fields = "".join(_field(f"{view}-{ask.name}", ask) for ask in asks)
        opened = " open" if is_open else ""
        parts.append(
            f"<details{opened}><summary>{escape(title)}</summary><div class=fields>{fields}</div></details>"
        )
    return f'<form id="form-{view}" data-view="{view}" hidden aria-label="{view}">{"".join(parts)}</form>'


def _field(place: str, ask: Ask) -> str:
    hint = f'<small id="{place}-hint">{escape(ask.help)}</small>' if ask.help else ""
    common = f'id="{place}" name="{ask.name}" data-default="{escape(ask.value)}"'
    common += f' aria-describedby="{place}-hint"' if ask.help else ""
    label = f'<label for="{place}">{escape(ask.label)}</label>'
    return f'<div class="field">{label}{_control(place, ask, common)}{hint}</div>'


def _control(place: str, ask: Ask, common: str) -> str:
    value = f'value="{escape(ask.value)}"'
    if ask.kind == "lines":
        return f'<textarea {common} rows="2" spellcheck="false"></textarea>'
    if ask.kind == "range":
        low, high, step = ask.values
        return (
            f'<input type="range" {common} {value} min="{low}" max="{high}" step="{step}">'
            f'<output for="{place}">{escape(ask.value)}</output>'
        )
    if ask.kind == "number":
        return f'<input type="text" inputmode="decimal" autocomplete="off" {common} {value}>'
    if ask.kind == "select":
        return f"<select {common}>{_options(ask.values, ask.value)}</select>"
    if ask.kind == "key":
        default = DEFAULTS[ask.name]
        shown = "default" if default in (None, ()) else f"default: {KEYS[ask.name].show(default)}"
        if ask.name not in (*DEGREES, *COUNTS) and not KEYS[ask.name].names:
            return f'<input type="text" data-key {common} placeholder="{escape(shown)}">'
        values = COUNTS.get(ask.name) or KEYS[ask.name].names
        return (
            f'<select data-key {common}><option value="">{escape(shown)}</option>{_options(values)}</select>'
        )
    if ask.kind == "folder":
        return (
            f'<input type="text" spellcheck="false" autocomplete="off" {common} {value}>'
            f'<input type="file" webkitdirectory multiple data-folder="{place}" aria-label="Choose a folder">'
        )
    suggested = "".join(f"<option>{escape(name)}</option>" for name in ask.values)
    listed = f'<datalist id="{place}-list">{suggested}</datalist>' if ask.values else ""
    listing = f' list="{place}-list"' if ask.values else ""
    return f'<input type="text" spellcheck="false" autocomplete="off" {common} {value}{listing}>{listed}'


def _options(values: Sequence[str], chosen: str | None = None) -> str:
    chosen_is = {chosen: " selected"}
    return "".join(
        f'<option value="{escape(name)}"{chosen_is.get(name, "")}>{escape(name or "none")}</option>'
        for name in values
    )

"""The forms of the page: a field for each option of a view, as the verbs state them."""

from collections.abc import Sequence
from typing import Literal, get_args, get_origin

from meshwise.core.files import read_catalog
from meshwise.core.options import REQUIRED, Option
from meshwise.launch.settings import FRAMEWORKS, SEARCHED
from meshwise.machine.hardware import chips, cluster_names
from meshwise.model.find import model_names
from meshwise.plan.plan import DEFAULTS, KEYS
from meshwise.plan.workload import KINDS
from meshwise.report.html import escape

_FORMS = read_catalog("forms.toml")
DEGREES: list[str] = _FORMS["degrees"]
COUNTS: dict[str, Sequence[str]] = _FORMS["counts"]
PASTED = ("config", "machine")
MODELS = ("model", "draft_model", "reward_model", "teacher")
"""Options that name a model."""
_FOLDER = '<input type="file" webkitdirectory multiple data-folder="PLACE" aria-label="Choose a folder">'


def view_name(view: str) -> str:
    """What a view is called on the page."""
    return "RL" if view == "rl" else view.capitalize()


def form_html(view: str, options: dict[str, Option]) -> str:
    """The form of a view."""
    groups: dict[str, list[str]] = {}
    first, example = view_name(view), _FORMS["example"] | _FORMS["other"].get(view, {})
    for option in sorted(options.values(), key=lambda option: option.name != "path"):
        if view == "explore" and option.name == "plan":
            for key in KEYS:
                title = "Plan" if key in _FORMS["first_keys"] else "More of the plan"
                field = _field(f"{view}-{key}", key, KEYS[key].doc, _key_control(key))
                groups.setdefault(title, []).append(field)
            continue
        is_first = option.name in _FORMS["first"].get(view, (option.name,))
        title = "Your own model or machine" if option.name in PASTED else first if is_first else "More"
        field = _field(f"{view}-{option.typed}", option.typed, option.help, _control(option, example))
        groups.setdefault(title, []).append(field)
    parts = (
        f"<details{' open' * (title in ('Plan', first))}><summary>{title}</summary>"
        f"<div class=fields>{''.join(fields)}</div></details>"
        for title, fields in sorted(groups.items(), key=lambda item: (item[0] != first, item[0] == "More"))
    )
    return f'<form id="form-{view}" data-view="{view}" hidden aria-label="{view}">{"".join(parts)}</form>'


def _field(place: str, name: str, help: str, control: str) -> str:
    """A label, a control whose first words tell its element, and what it means."""
    hint = f'<small id="{place}-hint">{escape(help)}</small>' if help else ""
    common = f'id="{place}" name="{name}"' + (f' aria-describedby="{place}-hint"' if help else "")
    element, _, rest = control.partition(" ")
    control = f"{element} {common} {rest}".replace("PLACE", place)
    return f'<div class="field"><label for="{place}">{escape(_label(name))}</label>{control}{hint}</div>'


def _label(name: str) -> str:
    """`ttft_ms` as `ttft [ms]`."""
    words, _, unit = name.rpartition("_")
    return f"{words} [{unit}]".replace("_", " ") if unit == "ms" else name.replace("_", " ")


def _control(option: Option, example: dict[str, str]) -> str:
    default = "" if option.default in (REQUIRED, None, ()) else f"{option.default}"
    shown = example.get(option.name, default if option.name in _FORMS["ranges"] else "")
    value = f'data-default="{escape(shown)}" value="{escape(shown)}"'
    hint = f'placeholder="{escape(default)}" autocomplete="off"'
    if option.name in PASTED:
        return '<textarea rows="2" spellcheck="false"></textarea>'
    if ends := _FORMS["ranges"].get(option.name):
        low, high, step = ends
        ends_html = f'min="{low}" max="{high}" step="{step}"'
        return f'<input type="range" {value} {ends_html}><output for="PLACE">{escape(shown)}</output>'
    if choices := _choices(option):
        chosen = next(one for one in (shown, default, choices[0]) if one in choices)
        return f'<select data-default="{escape(chosen)}">{_options(choices, chosen)}</select>'
    look = 'inputmode="decimal"' if option.kind in (int, float) else 'spellcheck="false"'
    beside = _FOLDER if option.name == "path" else ""
    if suggested := _suggested(option.name):
        look += ' list="PLACE-list"'
        beside = f'<datalist id="PLACE-list">{_options(suggested)}</datalist>'
    return f'<input type="text" {look} {value} {hint}>{beside}'


def _choices(option: Option) -> Sequence[str]:
    """The values of an option that is chosen from a list."""
    if option.kind is bool:
        return {True: ("yes", "no"), None: ("", "no", "yes")}.get(option.default, ("no", "yes"))
    if get_origin(option.kind) is Literal:
        return get_args(option.kind)
    frameworks = ("", *SEARCHED) if option.default == "" else FRAMEWORKS
    others = ("", *chips()) if option.default == "" else ()  # else a plan
    known = {"kind": KINDS, "to": frameworks, "chip": tuple(chips()), "beside": others}
    return known.get(option.name, ())


def _suggested(name: str) -> Sequence[str]:
    if name in MODELS:
        return model_names()
    return [*cluster_names(), *(f"{chip}:8" for chip in chips())] if name.endswith("cluster") else ()


def _key_control(key: str) -> str:
    """The control of a key of the plan."""
    default = DEFAULTS[key]
    shown = escape("default" if default in (None, ()) else f"default: {KEYS[key].show(default)}")
    values = COUNTS.get(key) or KEYS[key].names
    if not values and key not in DEGREES:
        return f'<input type="text" data-key data-default="" placeholder="{shown}">'
    listed = _options(values or ())
    return f'<select data-key data-default=""><option value="">{shown}</option>{listed}</select>'


def _options(values: Sequence[str], chosen: str | None = None) -> str:
    texts = ((escape(name), " selected" * (name == chosen), escape(name or "not stated")) for name in values)
    return "".join('<option value="{}"{}>{}</option>'.format(*of_one) for of_one in texts)

"""An option is stated once, and nothing that is stated is ignored.

Command line, Python and reference have the same options; every option of `estimate`, `search` and `serve`
changes what comes out, or is refused in one sentence; JSON is one document; an interrupt is one line.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main

import meshwise as mw
from data_tables import DATA, table
from meshwise import api
from meshwise.cli import app
from meshwise.cli.command import flags
from meshwise.cli.defaults import verbs_of
from meshwise.core.errors import WorkloadError
from meshwise.core.options import REQUIRED, options_of

BASES = {
    "estimate": ("gpt3-175b", "--cluster", "a100-80g-sxm:64", "--plan", "tp=8,pp=8", "--batch", "64"),
    "search": ("llama3-8b", "--cluster", "h100-80g-sxm:4", "--batch", "8", "--seq", "2048"),
    "serve": ("llama3-8b", "--cluster", "h100-80g-sxm:1", "--rate", "5", "--num-requests", "200"),
}
OTHERS = table("other_options")
"""By verb and option: words that state something else than the base; where there are several, each."""
CASES = [(verb, option, words) for verb in OTHERS for option, each in OTHERS[verb].items() for words in each]
BEFORE: dict[tuple[str, ...], Any] = {}
"""What comes out of a base, which is run once."""
TIMES = ("elapsed_s", "plans_per_s")


def what_comes_out(done: Any, folder: Path) -> Any:
    """The document without what differs from run to run, and the files that were written."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    if not done.out.startswith("{"):
        return done.out, files
    return {key: value for key, value in done.document.items() if key not in TIMES}, files


LIBRARY = (
    *("collective", "compare", "dryrun", "estimate", "explain", "launch"),
    *("profile", "run", "search", "serve", "validate"),
)
"""Verbs of the command line that have all options of those of the library, but for what they fill in."""
ALSO = {"estimate": api.budget, "search": api.study}
FILLED_IN = {"ideal", "quiet", "stdout", "on_plans", "on_point", "explain command"}


@pytest.mark.parametrize("verb", LIBRARY)
def test_command_line_and_python_have_the_same_options(verb: str) -> None:
    """By name, help and default; a time that Python takes in seconds may be typed in milliseconds."""
    command: Any = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    typed = {param.name: param for param in command.params}
    own = getattr(api, verb.replace("dryrun", "dry_run"))
    for option in (*options_of(own).values(), *options_of(ALSO.get(verb, own)).values()):
        if FILLED_IN & {option.name, f"{verb} {option.name}"}:
            assert option.name not in typed
            continue
        param = typed[option.name]
        assert option.help and param.help == option.help
        scale = 1e3 if flags(option)[0].endswith("-ms") else 1
        if option.default not in (REQUIRED, None, ()):
            assert param.default == option.default * scale or str(param.default) == str(option.default)


def test_every_verb_and_option_says_what_it_means() -> None:
    """In words of its own: what another verb says of an option stands there, not its name."""
    for words, _ in verbs_of(typer.main.get_command(app)):
        command: Any = typer.main.get_command(app)
        for word in words.split():
            command = command.commands[word]
        assert command.help and "Args:" not in command.help
        assert not [param.name for param in command.params if not param.help or "As in `" in param.help]


def test_a_name_of_several_verbs_means_one_thing() -> None:
    """One type and one default; what is written goes to --out, and --output is tokens."""
    stated: dict[str, set[tuple[str, str]]] = {}
    for _, options in verbs_of(typer.main.get_command(app)):
        for name, option in options.items():
            stated.setdefault(name, set()).add((str(option.kind), str(option.default)))
    names = "memory-frac output price plot html csv json config ray tokens all"
    assert {name: stated[name] for name in names.split() if len(stated.get(name, {1})) > 1} == {}
    assert {kind for kind, _ in stated["out"]} == {str(Path)}


@pytest.mark.parametrize("verb", BASES)
def test_every_option_is_walked(verb: str) -> None:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    options = {param.opts[0] for param in command.params if param.param_type_name == "option"}
    assert options == set(OTHERS[verb])


@pytest.mark.parametrize(("verb", "option", "words"), CASES, ids=[case[2] for case in CASES])
def test_an_option_changes_what_comes_out_or_is_refused(
    meshwise: Any, tmp_path: Path, verb: str, option: str, words: str
) -> None:
    if option == "--plot":
        pytest.importorskip("matplotlib")
    base, stated = BASES[verb], words.replace("FOLDER", str(tmp_path)).split()
    as_json = () if option == "--json" else ("--json",)
    whole = (verb, *base, *as_json)
    if whole not in BEFORE:
        BEFORE[whole] = what_comes_out(meshwise(*whole), tmp_path)
    if option in base:
        at = base.index(option)
        base = base[:at] + base[at + 2 :]
    done = meshwise(verb, *base, *stated, *as_json)
    if done.code == 2:
        assert len(done.err.strip().splitlines()) == 1
        assert done.err.startswith("meshwise: ")
        assert done.out == ""
    else:
        assert done.code == 0
        assert what_comes_out(done, tmp_path) != BEFORE[whole]


def test_the_library_takes_what_the_command_line_reads() -> None:
    """Numbers as texts, one in place of several, a plan as a mapping; what cannot be is one sentence."""
    (one,), _ = mw.collective("all_reduce", "h100:8", "64MiB")[:2]
    assert one.payload_bytes == 2.0**26
    assert mw.estimate("llama3-8b", "h100:8", {"tp": 8, "zero": 1}, batch=8).plan.tp == 8
    sizes = {"batch": 16, "seq": 4096}
    plans: tuple[Any, ...] = ("tp=2,cp_kind=ring,zero=1|3", {"tp": 2, "cp_kind": "ring", "zero": ["1", 3]})
    ways = zip(plans, ("2", 2), strict=True)
    texts, values = (mw.search("llama3-8b", "h100:8", plan, microbatch=some, **sizes) for plan, some in ways)
    assert texts.records() == values.records() != []
    found = mw.study("llama3-8b", "h100:8", "gpus=8|16", batch=16)
    assert "front" in str(found) and found.to_json(mw.budget(tokens="1G"))["points"][0]["tokens"] == 1e9
    price: Any = mw.estimate
    broken = replace(mw.find_model("llama3-8b"), num_layers=-1)
    refused = {
        "rank 8 must be from 0 to 7": lambda: price("llama3-8b", "h100:8").rank_ledger(8),
        "cannot read 'x.csv'": lambda: price("llama3-8b", "h100:8", collectives="x.csv"),
        "num_layers is -1": lambda: price(broken, "h100:8"),
        "plan item 'None' is not key=value": lambda: price("llama3-8b", "h100:8", None),
        "no model is called 'None'": lambda: price(None, "h100:8"),
        "no cluster or chip is called '8'": lambda: price("llama3-8b", 8),
    }
    for why, call in refused.items():
        with pytest.raises(mw.MeshwiseError, match=why):
            call()


@pytest.mark.parametrize("verb", [mw.estimate, mw.search, mw.serve, mw.rl, mw.fit_card, mw.frontier])
def test_a_value_of_another_type_is_refused_by_its_name(verb: Any) -> None:
    options = options_of(verb)
    required = {name: 8 if of.kind is int else "x" for name, of in options.items() if of.default is REQUIRED}
    for option in options.values():
        if option.types:
            with pytest.raises(WorkloadError, match=rf"^{option.name}=.* must be "):
                verb(**{**required, option.name: object()})


def test_what_stands_for_a_value_is_taken() -> None:
    """Whole floats, what is left out, and iterators, which are read once."""
    stated = {"batch": 16.0, "seq": np.float64(2048.0), "collectives": iter(())}
    assert mw.estimate("llama3-8b", "h100:8", "zero=3", **stated).workload.batch == 16
    folder = DATA / "validate"
    found = mw.validate(folder.glob("published_runs_excerpt.csv"))
    assert len(found.rows) == len(mw.validate([folder / "published_runs_excerpt.csv"]).rows)

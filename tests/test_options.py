"""An option is stated once, and nothing that is stated is ignored.

Command line, Python and reference have the same options; every option of `estimate`, `search` and `serve`
changes what comes out, or is refused in one sentence; JSON is one document; an interrupt is one line.
"""

import signal
from pathlib import Path
from typing import Any

import pytest
import typer.main

from meshwise import api
from meshwise.cli import app
from meshwise.cli.command import flags
from meshwise.cli.defaults import verbs_of
from meshwise.core.options import REQUIRED, options_of, summary_of

BASES = {
    "estimate": ("gpt3-175b", "--cluster", "a100-80g-sxm:64", "--plan", "tp=8,pp=8", "--batch", "64"),
    "search": ("llama3-8b", "--cluster", "h100-80g-sxm:4", "--batch", "8", "--seq", "2048"),
    "serve": ("llama3-8b", "--cluster", "h100-80g-sxm:1", "--rate", "5", "--num-requests", "200"),
}
OTHERS = {  # option: words that state something else than the base; where there are several, each
    "estimate": {
        "--plan": [("--plan", "tp=4")],
        "--batch": [("--batch", "128"), ("--batch", "-1")],
        "--seq": [("--seq", "1024"), ("--seq", "4096")],
        "--microbatch": [("--microbatch", "2"), ("--microbatch", "3")],
        "--kind": [("--kind", "evaluate"), ("--kind", "training")],
        "--convention": [("--convention", "ideal"), ("--convention", "nersc-2024-10"), ("--convention", "x")],
        "--capacity-factor": [("--capacity-factor", "1.25")],
        "--per-layer": [("--per-layer",), ("--per-layer", "--convention", "nersc-2024-10")],
        "--tokens": [("--tokens", "1e9"), ("--tokens", "1e9", "--kind", "evaluate"), ("--tokens", "-1")],
        "--price": [("--tokens", "1e9", "--price", "2"), ("--price", "2")],
        "--watts": [("--tokens", "1e9", "--watts", "500"), ("--watts", "500")],
        "--mtbf": [("--tokens", "1e9", "--mtbf", "5e3"), ("--mtbf", "5e3")],
        "--storage": [("--tokens", "1e9", "--storage", "2GB"), ("--storage", "2GB"), ("--storage", "x")],
        "--restart": [("--tokens", "1e9", "--restart", "60"), ("--tokens", "1e9", "--restart", "1e9")],
        "--csv": [("--csv", "FOLDER/rows.csv"), ("--csv", "/nowhere/rows.csv")],
        "--plot": [("--plot", "FOLDER/step.png"), ("--plot", "FOLDER/step.gif")],
        "--trace": [("--trace", "FOLDER/step.json"), ("--trace", "FOLDER/step.json", "--kind", "evaluate")],
        "--html": [("--html", "FOLDER/step.html"), ("--html", "/nowhere/step.html")],
        "--json": [("--json",)],
        "--from": [("--from", "/nowhere/train.sh")],
        "--cluster": [("--cluster", "a100-80g-sxm:128"), ("--cluster", "a100")],
    },
    "search": {
        "--plan": [("--plan", "dtype=fp8"), ("--plan", "schedule=gpipe|1f1b,pp=2"), ("--plan", "dtype=x")],
        "--batch": [("--batch", "16"), ("--batch", "0")],
        "--seq": [("--seq", "1024")],
        "--microbatch": [("--microbatch", "1|2"), ("--microbatch", "3"), ("--microbatch", "x")],
        "--memory-frac": [("--memory-frac", "0.5"), ("--memory-frac", "0")],
        "--beside": [("--beside", "tp=2"), ("--beside", "tp=3")],
        "--to": [("--to", "torchtitan"), ("--to", "x")],
        "--top": [("--top", "2"), ("--top", "0")],
        "--assumptions": [("--assumptions",)],
        "--vary": [("--vary", "gpus=4|8"), ("--vary", "gpus=x"), ("--vary", "speed=2")],
        "--weak": [("--vary", "gpus=4|8", "--weak"), ("--weak",)],
        "--tokens": [("--tokens", "1e9"), ("--tokens", "-1")],
        "--price": [("--tokens", "1e9", "--price", "2"), ("--price", "2")],
        "--watts": [("--tokens", "1e9", "--watts", "500"), ("--watts", "500")],
        "--csv": [("--csv", "FOLDER/plans.csv"), ("--csv", "/nowhere/plans.csv")],
        "--plot": [("--plot", "FOLDER/plans.png"), ("--plot", "FOLDER/plans.gif")],
        "--html": [("--html", "FOLDER/plans.html"), ("--html", "/nowhere/plans.html")],
        "--json": [("--json",)],
        "--from": [("--from", "/nowhere/train.sh")],
        "--cluster": [("--cluster", "h100-80g-sxm:8")],
    },
    "serve": {
        "--cluster": [("--cluster", "h200-sxm:1")],
        "--plan": [("--plan", "dtype=fp8"), ("--plan", "pp=2")],
        "--prompt": [("--prompt", "300"), ("--prompt", "0")],
        "--output": [("--output", "30"), ("--output", "0")],
        "--rate": [("--rate", "6"), ("--rate", "0")],
        "--concurrency": [("--concurrency", "4")],
        "--requests": [("--requests", "/nowhere.csv")],
        "--num-requests": [("--num-requests", "300")],
        "--burstiness": [("--burstiness", "0.5"), ("--burstiness", "-1")],
        "--length-ratio": [("--length-ratio", "0.5"), ("--length-ratio", "2")],
        "--engine": [("--engine", name) for name in ("sglang", "trtllm", "vllm,max_tokens=512", "x")],
        "--sequences": [("--sequences", "3")],
        "--token-ms": [("--token-ms", "10"), ("--token-ms", "0")],
        "--ttft-ms": [("--ttft-ms", "200"), ("--ttft-ms", "0")],
        "--memory-frac": [("--memory-frac", "0.5"), ("--memory-frac", "2")],
        "--engine-ms": [("--engine-ms", "2"), ("--engine-ms", "-1")],
        "--workers": [("--workers", "2"), ("--workers", "0")],
        "--prefill-plan": [("--prefill-plan", "dtype=fp8"), ("--prefill-plan", "pp=2")],
        "--prefill-cluster": [("--prefill-cluster", "h200-sxm:1"), ("--prefill-cluster", "x")],
        "--prefill-workers": [
            ("--prefill-plan", "tp=1", "--prefill-workers", "2"),
            ("--prefill-workers", "2"),
        ],
        "--length-sigma": [("--length-sigma", "0.5"), ("--length-sigma", "-1")],
        "--shared-prefix": [("--shared-prefix", "1024"), ("--shared-prefix", "4096")],
        "--speculate": [("--speculate", "drafts=3,accept=0.8,"), ("--speculate", "x")],
        "--draft-model": [("--draft-model", "llama3-8b")],
        "--expert-skew": [("--expert-skew", "0.5"), ("--expert-skew", "-1")],
        "--expert-loads": [("--expert-loads", "/nowhere.txt")],
        "--redundant-experts": [("--redundant-experts", "8"), ("--redundant-experts", "-1")],
        "--capacity-factor": [("--capacity-factor", "1.25")],
        "--pareto": [("--pareto",)],
        "--price": [("--price", "2"), ("--price", "x")],
        "--csv": [("--csv", "FOLDER/layouts.csv"), ("--csv", "/nowhere/layouts.csv")],
        "--plot": [("--plot", "FOLDER/layouts.png"), ("--plot", "FOLDER/layouts.gif")],
        "--html": [("--html", "FOLDER/load.html"), ("--html", "/nowhere/load.html")],
        "--json": [("--json",)],
    },
}
CASES = [(verb, option, words) for verb in OTHERS for option, each in OTHERS[verb].items() for words in each]
TIMES = ("elapsed_s", "plans_per_s")


def what_comes_out(done: Any, folder: Path) -> Any:
    """The document without what differs from run to run, and the files that were written."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    if not done.out.startswith("{"):
        return done.out, files
    return {key: value for key, value in done.document.items() if key not in TIMES}, files


LIBRARY = {  # verb of the command line: verbs of the library, and which of their options it fills in itself
    "collective": ((api.collective,), ()),
    "compare": ((api.compare,), ()),
    "dryrun": ((api.dry_run,), ("quiet",)),
    "estimate": ((api.estimate, api.budget), ("ideal",)),
    "explain": ((api.explain,), ()),
    "launch": ((api.launch,), ()),
    "profile": ((api.profile,), ("stdout",)),
    "run": ((api.run,), ("quiet",)),
    "search": ((api.search, api.study), ("on_plans", "on_point")),
    "serve": ((api.serve,), ()),
    "validate": ((api.validate,), ()),
}


@pytest.mark.parametrize("verb", LIBRARY)
def test_command_line_and_python_have_the_same_options(verb: str) -> None:
    """By name, help and default; a time that Python takes in seconds may be typed in milliseconds."""
    command: Any = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    typed = {param.name: param for param in command.params}
    functions, filled_in = LIBRARY[verb]
    for option in (each for one in functions for each in options_of(one).values()):
        if option.name in filled_in:
            assert option.name not in typed
            continue
        param = typed[option.name]
        assert option.help and param.help == option.help
        scale = 1e3 if flags(option)[0].endswith("-ms") else 1
        if option.default not in (REQUIRED, None, ()):
            assert param.default == option.default * scale or str(param.default) == str(option.default)


def test_every_option_of_every_verb_says_what_it_means() -> None:
    silent = []
    for words, _ in verbs_of(typer.main.get_command(app)):
        command: Any = typer.main.get_command(app)
        for word in words.split():
            command = command.commands[word]
        silent += [f"{words} {param.name}" for param in command.params if not param.help]
        assert command.help and "Args:" not in command.help
    assert silent == []


def test_a_docstring_may_refer_to_another_verb() -> None:
    told = {name: option.help for name, option in options_of(api.study).items()}
    assert told["seq"] == options_of(api.estimate)["seq"].help
    assert (
        summary_of(api.budget) == "The length of a whole run, and what it takes beside the pace of its steps."
    )


@pytest.mark.parametrize("verb", BASES)
def test_every_option_is_walked(verb: str) -> None:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    options = {param.opts[0] for param in command.params if param.param_type_name == "option"}
    assert options == set(OTHERS[verb])


@pytest.mark.parametrize(("verb", "option", "words"), CASES, ids=[" ".join(case[2]) for case in CASES])
def test_an_option_changes_what_comes_out_or_is_refused(
    meshwise: Any, tmp_path: Path, verb: str, option: str, words: tuple[str, ...]
) -> None:
    if option == "--plot":
        pytest.importorskip("matplotlib")
    base, stated = BASES[verb], tuple(word.replace("FOLDER", str(tmp_path)) for word in words)
    as_json = () if option == "--json" else ("--json",)
    before = what_comes_out(meshwise(verb, *base, *as_json), tmp_path)
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
        assert what_comes_out(done, tmp_path) != before


def test_an_interrupt_is_one_line_and_code_130(meshwise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "estimate", lambda *args, **options: signal.raise_signal(signal.SIGINT))
    done = meshwise("estimate", *BASES["estimate"])
    assert (done.code, done.out, done.err) == (130, "", "meshwise: interrupted\n")


def test_best_plans_go_into_estimate_as_they_are(meshwise: Any) -> None:
    for found in meshwise("search", *BASES["search"], "--json").document["best"]:
        words = ("--plan", found["plan_text"], "--microbatch", str(found["microbatch"]), "--json")
        priced = meshwise("estimate", *BASES["search"], *words).document
        assert {key: priced[key] for key in ("step_s", "mfu", "memory_bytes")} == {
            key: found[key] for key in ("step_s", "mfu", "memory_bytes")
        }

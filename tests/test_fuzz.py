"""The command line is hard to break: strange options, and configs, clusters, plans, sweeps, tables and
checkpoints with strange fields or damaged bytes. `make fuzz CASES=20000` runs more of the same.
"""

import csv
import gzip
import io
import json
import os
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import typer.main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz import changed, check_contract, damaged, strange, strange_text, toml_text
from meshwise import api
from meshwise.cli import app
from meshwise.cli.worker import run
from meshwise.core.errors import MeshwiseError
from meshwise.plan.plan import KEYS
from meshwise.sweep.sweep import read_sweep

H100 = ("--cluster", "h100-80g-sxm:8")
MODEL = ("--model", "llama3-8b", *H100)
CASES = int(os.environ.get("CASES", "0"))
"""Cases of each test; 0: a few, the same every time."""
DATA = Path(__file__).parent / "data"
TRACES = DATA / "traces"
CATALOG = resources.files("meshwise") / "catalog"
CONFIGS = sorted((DATA / "configs").rglob("*.json"))
CHIP = tomllib.loads((CATALOG / "chips.toml").read_text())["h100-80g-sxm"]
CLUSTER = {"num_chips": 64, "chip": {key: value for key, value in CHIP.items() if key != "checked"}}
RUNS = (CATALOG / "published_runs.csv").read_text().splitlines()
SWEEP = {
    "verb": "estimate",
    "arguments": ["gpt3-175b"],
    "options": {"cluster": "h100-80g-sxm:512", "plan": "tp={tp},pp={pp}", "batch": 512},
    "grid": {"tp": [1, 2], "pp": [4, 8]},
    "results": {"step_s": "step_s"},
}
GPT = {
    **{"decoder_layers": 4, "decoder_embed_dim": 64, "decoder_ffn_embed_dim": 128, "moe_freq": 2},
    **{"decoder_attention_heads": 4, "moe_expert_count": 8, "vocab_size": 1000, "tokens_per_sample": 128},
}
BASES: dict[tuple[str, ...], list[str]] = {
    ("estimate",): ["gpt3-175b", "--cluster", "a100-80g-sxm:64", "--plan", "tp=8,pp=8", "--batch", "64"],
    ("search",): ["llama3-8b", "--cluster", "h100-80g-sxm:4", "--batch", "8", "--seq", "2048"],
    ("serve",): ["llama3-8b", "--cluster", "h100-80g-sxm:4", "--plan", "tp=4"],
    ("frontier", "layer"): ["--d-in", "64", "--d-out", "64", "--batch", "64", "--chip", "h100-80g-sxm"],
    ("frontier", "run"): ["--chip", "h100-80g-sxm"],
    ("collective",): ["all_reduce", "--cluster", "h100-80g-sxm:64"],
    ("launch",): [
        "llama3-8b",
        *H100,
        *["--plan", "zero=3", "--batch", "8", "--seq", "128", "--to", "megatron-lm"],
    ],
    ("trace", "summary"): [str(TRACES / "gloo4")],
    ("explain",): [str(TRACES / "gloo4"), *MODEL, "--batch", "8", "--seq", "128"],
    ("eval-lm",): ["--max-tokens", "2", "--ranks", "4"],
    ("validate",): [],
    ("list",): ["chips"],
}


def some(few: int) -> Any:
    """Run `few` cases that are the same every time, or `CASES` others."""
    return settings(
        max_examples=CASES or few,
        derandomize=not CASES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def command(verb: tuple[str, ...]) -> Any:
    """The command of that name."""
    found: Any = typer.main.get_command(app)
    for word in verb:
        found = found.commands[word]
    return found


@st.composite
def words(draw: st.DrawFn) -> list[str]:
    """A command line with strange values for some of its options."""
    verb = draw(st.sampled_from(sorted(BASES)))
    stated = list(BASES[verb])
    options = [param for param in command(verb).params if param.param_type_name == "option"]
    for option in draw(st.lists(st.sampled_from(options), max_size=3, unique_by=lambda one: one.name)):
        if option.name in ("json", "as_json"):
            continue
        if option.opts[0] in stated:
            at = stated.index(option.opts[0])
            del stated[at : at + 2]
        value = draw(st.one_of(strange_text, st.integers(1, 1024).map(str)))
        stated += [option.opts[0]] if option.is_flag else [option.opts[0], value]
    if stated and not stated[0].startswith("-") and draw(st.integers(0, 9)) == 0:
        stated[0] = draw(strange_text)
    return [*verb, *stated]


@some(80)
@given(words())
def test_strange_options(tmp_path_factory: pytest.TempPathFactory, stated: list[str]) -> None:
    os.chdir(tmp_path_factory.getbasetemp())  # for what an option makes it write
    check_contract(stated)


def file_with(folder: pytest.TempPathFactory, name: str, content: bytes) -> str:
    """The path of a file of that content, the same for every case."""
    path = folder.getbasetemp() / name
    path.write_bytes(content)
    return str(path)


def as_file(document: dict[str, Any], text: Any) -> st.SearchStrategy[bytes]:
    """The document with strange fields, or its text with damaged bytes."""
    fields = changed(document).map(lambda found: text(found).encode(errors="surrogatepass"))
    return st.one_of(fields, damaged(text(document).encode()))


@some(60)
@given(st.data())
def test_strange_configs(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    config = json.loads(data.draw(st.sampled_from(CONFIGS)).read_bytes())
    path = file_with(tmp_path_factory, "config.json", data.draw(as_file(config, json.dumps)))
    check_contract(["estimate", path, "--cluster", "h100-80g-sxm:8", "--batch", "8", "--seq", "128"])


@some(60)
@given(as_file(CLUSTER, toml_text))
def test_strange_clusters(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = file_with(tmp_path_factory, "cluster.toml", content)
    check_contract(["estimate", "llama3-8b", "--cluster", path, "--plan", "tp=8", "--batch", "64"])
    check_contract(["frontier", "layer", *["--d-in", "64", "--d-out", "64", "--batch", "64"], "--chip", path])


@some(80)
@given(as_file({"tp": 2, "pp": 2, "recompute": "full"}, toml_text))
def test_damaged_plans(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = file_with(tmp_path_factory, "plan.toml", content)
    check_contract(["estimate", "gpt3-175b", "--cluster", "a100-80g-sxm:64", "--batch", "64", "--plan", path])


@some(120)
@given(st.dictionaries(st.sampled_from(sorted(KEYS)), strange | strange_text, min_size=1, max_size=4))
def test_strange_plans(keys: dict[str, Any]) -> None:
    plan = ",".join(f"{key}={value}" for key, value in keys.items())
    check_contract(
        ["estimate", "mixtral-8x7b", "--cluster", "h100-80g-sxm:16", "--batch", "64", "--plan", plan]
    )


JOBS = {
    "megatron-lm": "megatron_args.txt",
    "torchtitan": "job.sbatch",
    "deepspeed": "ds_config.json",
    "accelerate": "accelerate.yaml",
}


@pytest.mark.parametrize("framework", JOBS)
@some(25)
@given(st.data())
def test_damaged_jobs(tmp_path_factory: pytest.TempPathFactory, framework: str, data: st.DataObject) -> None:
    plan = "zero=3" if framework == "accelerate" else "zero=2"
    job = api.launch("llama3-8b", "h100-80g-sxm:8", plan, to=framework, batch=8, seq=128)
    whole = next(file.text for file in job.files if file.path == JOBS[framework])
    path = file_with(tmp_path_factory, JOBS[framework], data.draw(damaged(whole.encode())))
    check_contract(["estimate", "llama3-8b", "--from", path, *H100, "--batch", "8", "--seq", "128"])


@some(25)
@given(st.data())
def test_damaged_traces(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """One bad rank does not end the analysis of the others."""
    folder = tmp_path_factory.getbasetemp() / "traces"
    folder.mkdir(exist_ok=True)
    for number, path in enumerate(sorted((TRACES / "gloo4").glob("*.json*"))):
        whole = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        content = data.draw(damaged(whole)) if number == 0 else whole
        packed = data.draw(st.booleans())
        for name in (f"rank-{number}.json", f"rank-{number}.json.gz"):
            (folder / name).unlink(missing_ok=True)
        name = f"rank-{number}.json" + packed * ".gz"
        if packed:
            content = gzip.compress(content, 1)
            content = data.draw(st.one_of(st.just(content), damaged(content))) if number == 0 else content
        (folder / name).write_bytes(content)
    check_contract(["trace", "summary", str(folder)])
    check_contract(["explain", str(folder), *MODEL, "--batch", "8", "--seq", "128"])


REQUESTS = "arrival,prompt,output\n0.0,100,10\n0.5,200,20\n0.7,50,5\n"
POINT = {
    **{"id": "a", "system": "h100_sxm", "backend": "vllm", "backend_version": "0.19.0"},
    **{"model": "meta-llama/Meta-Llama-3.1-8B", "mode": "agg", "precision": "fp8", "gemm_quant": "fp8"},
    **{
        "moe_quant": "fp8",
        "input_tokens": "1024",
        "output_tokens": "128",
        "concurrency": "8",
        "workers": "1",
    },
    **{"max_batch": "8", "tp": "1", "pp": "1", "attention_dp": "1", "moe_tp": "1", "moe_ep": "1"},
    **{"ttft_s": "0.1", "tpot_s": "0.01", "measured": "2026-01-01", "source": "mine"},
}


@some(40)
@given(st.data())
def test_damaged_requests(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = file_with(tmp_path_factory, "requests.csv", data.draw(damaged(REQUESTS.encode())))
    check_contract(["serve", "llama3-8b", "--cluster", "h100-80g-sxm:1", "--requests", path])


@some(40)
@given(st.dictionaries(st.sampled_from(sorted(POINT)), strange_text, max_size=3), st.data())
def test_strange_serving_points(
    tmp_path_factory: pytest.TempPathFactory, cells: dict[str, str], data: st.DataObject
) -> None:
    out = io.StringIO()
    csv.writer(out).writerows([POINT.keys(), (POINT | cells).values()])
    table = out.getvalue().encode(errors="replace")
    table = data.draw(damaged(table)) if data.draw(st.booleans()) else table
    check_contract(["validate", "--serving", file_with(tmp_path_factory, "points.csv", table)])


@some(40)
@given(as_file({"cluster": "h100-80g-sxm:8", "estimate": {"seq": 128, "plan": "tp=2"}}, toml_text))
def test_strange_defaults(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = file_with(tmp_path_factory, "defaults.toml", content)
    code, _, err = run(["--config", path, "estimate", "llama3-8b", "--batch", "8", "--json"])
    assert code in (0, 2) and "Traceback" not in err


@some(60)
@given(st.data())
def test_strange_tables_of_runs(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(RUNS[1:])).split(",")
    for _ in range(data.draw(st.integers(1, 2))):
        row[data.draw(st.integers(0, len(row) - 1))] = data.draw(strange_text)
    table = "\n".join([RUNS[0], ",".join(row)]).encode(errors="replace")
    if data.draw(st.booleans()):
        table = data.draw(damaged(table))
    check_contract(["validate", "--runs", file_with(tmp_path_factory, "runs.csv", table)])


@some(60)
@given(as_file(GPT, json.dumps))
def test_strange_configs_of_a_mixture(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = file_with(tmp_path_factory, "gpt.json", content)
    check_contract(["eval-lm", path, "--max-tokens", "2", "--prompt-tokens", "8", "--ranks", "2"])


@some(100)
@given(as_file(SWEEP, toml_text))
def test_strange_sweeps(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    try:
        assert read_sweep(Path(file_with(tmp_path_factory, "sweep.toml", content))).points
    except MeshwiseError as error:
        assert len(str(error).splitlines()) == 1


@some(60)
@given(as_file({"config": GPT, "tensors": {"embed": "shared.safetensors"}}, json.dumps))
def test_strange_checkpoints(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    from meshwise.runtime.programs.checkpoint_index import INDEX, read_index

    folder = Path(file_with(tmp_path_factory, INDEX, content)).parent
    try:
        files = read_index(folder)["tensors"].values()
    except MeshwiseError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert all((folder / file).parent == folder for file in files)

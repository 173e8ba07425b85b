"""The command line is hard to break: strange options, and configs, clusters, plans, sweeps and tables
with strange fields or damaged bytes. `make fuzz CASES=20000` runs more of the same.
"""

import csv
import gzip
import io
import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from importlib import resources
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import typer.main
from hypothesis import HealthCheck, example, given, settings, strategies as st

import fuzz
from data_tables import DATA, GLOO4, TRACES, table
from fuzz import check_contract, damaged, document, plausible_text, strange, strange_text, toml_text
from meshwise import api
from meshwise.cli import app
from meshwise.core.errors import MeshwiseError
from meshwise.plan.plan import KEYS
from meshwise.sweep.sweep import read_sweep

pytestmark = pytest.mark.slow

H100 = ("--cluster", "h100-80g-sxm:8")
CASES = int(os.environ.get("CASES", "0"))
"""Cases of each test; 0: a few, the same every time."""
CATALOG = resources.files("meshwise") / "catalog"
CONFIGS = sorted((DATA / "configs").rglob("*.json"))
CHIP = tomllib.loads((CATALOG / "chips.toml").read_text())["h100-80g-sxm"]
CLUSTER = {"num_chips": 64, "chip": {key: value for key, value in CHIP.items() if key != "checked"}}
RUNS = (CATALOG / "published_runs.csv").read_text().splitlines()
GLOO, GPU = str(GLOO4), str(TRACES / "hta" / "sampled")
FUZZ = table("fuzz")
PLACES = {"GLOO": GLOO, "GPU": GPU, "RUNS": str(DATA / "validate" / "published_runs_excerpt.csv")}
BASES = {
    tuple(verb.split()): [PLACES.get(word, word) for word in shlex.split(words)]
    for verb, words in FUZZ["bases"].items()
}
SLOW = (("frontier", "run"), ("eval-lm",), ("rl",))
"""Verbs that take 0.1 to 6 s: drawn less often."""
LONG_NAME = "a" * 3000
ELSEWHERE = ("run", "dryrun", "compare", "profile", "sweep", "web", "fit")
"""Verbs that start programs, read a file of their own, or would write the catalog; some are fuzzed below."""


def some(few: int, share: float = 1.0) -> Any:
    """Run `few` cases that are the same every time, or `CASES` others (a share where each is slow)."""
    return settings(
        max_examples=ceil(share * CASES) or few,
        derandomize=not CASES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def verbs(inside: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb by its words, and its command."""
    for name, found in inside.commands.items():
        yield from verbs(found, *words, name) if hasattr(found, "commands") else [((*words, name), found)]


@pytest.fixture(autouse=True, scope="module")
def in_a_folder_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For what an option makes a command write."""
    with chdir(tmp_path_factory.mktemp("written")), fuzz.bounded_memory():
        yield


VERBS = dict(verbs(typer.main.get_command(app)))


def test_every_verb_is_fuzzed() -> None:
    assert VERBS.keys() - {(name,) for name in ELSEWHERE} == BASES.keys()


@st.composite
def words(draw: st.DrawFn) -> list[str]:
    """A command line with strange values for some of its options."""
    verb = draw(st.sampled_from([*sorted(BASES.keys() - SLOW) * 20, *SLOW]))
    stated = list(BASES[verb])
    params = (param for param in VERBS[verb].params if param.name != "json")
    options = [param for param in params if param.param_type_name == "option"]
    option_of = st.sampled_from(options) if options else st.nothing()  # `list` has --json alone
    for option in draw(st.lists(option_of, max_size=3 * bool(options), unique_by=lambda one: one.name)):
        if option.opts[0] in stated:
            at = stated.index(option.opts[0])
            del stated[at : at + 2]
        value = draw(st.one_of(strange_text, plausible_text, st.integers(1, 1024).map(str)))
        stated += [option.opts[0]] if option.is_flag else [option.opts[0], value]
    if stated and not stated[0].startswith("-") and draw(st.integers(0, 9)) == 0:
        stated[0] = draw(strange_text)
    return [*verb, *stated]


@some(100)
@given(words())
@example(["collective", "0", "--cluster", "h100-80g-sxm:64", "--stride", "65", "--data", "0"])
@example(["frontier", "layer", *BASES["frontier", "layer"], "--tp-in", "1e-09"])
@example(["frontier", "layer", *BASES["frontier", "layer"][2:], "--d-in", "1e-320"])
@example(["frontier", "layer", *BASES["frontier", "layer"], "--bytes", "1e308"])
@example(["trace", "bandwidth", LONG_NAME])
@example(["fit-card", *BASES[("fit-card",)], "--batch", "-1"])
@example(["trace", "report", GLOO, "-o", "x.html", "--ranks", "0"])
@example(["serve", "llama3-8b", *H100, "--plan", "tp=4", "--images", str(10**400)])
@example(["estimate", "bad\x0bname", *H100])
@example(["serve", "llama3-8b", *H100, "--plan", "tp=8", "--concurrency", str(10**12)])
@example(["serve", "llama3-8b", *H100, "--plan", "tp=8", "--requests", "/dev/full"])
@example(["serve", "mixtral-8x7b", *H100, "--plan", "tp=8", "--expert-loads", "/dev/full"])
@example(["validate", "--runs", "/dev/full"])
@example(["estimate", "llama3-8b", *H100, "--from", "/dev/full"])
def test_strange_options(stated: list[str]) -> None:
    check_contract(stated, may_warn=stated[0] == "trace")


def file_with(folder: pytest.TempPathFactory, name: str, content: bytes) -> str:
    """The path of a file of that content, the same for every case."""
    path = folder.getbasetemp() / name
    path.write_bytes(content)
    return str(path)


def as_file(document: dict[str, Any], text: Any) -> st.SearchStrategy[bytes]:
    """The document with strange fields, or its text with damaged bytes."""
    fields = fuzz.changed(document).map(lambda found: text(found).encode(errors="surrogatepass"))
    return st.one_of(fields, damaged(text(document).encode()))


@some(80)
@given(st.dictionaries(st.sampled_from(sorted(KEYS)), strange | strange_text, min_size=1, max_size=4))
def test_strange_plans(keys: dict[str, Any]) -> None:
    plan = ",".join(f"{key}={value}" for key, value in keys.items())
    check_contract(["estimate", "mixtral-8x7b", *H100, "--batch", "64", "--plan", plan])


JOBS = {"megatron-lm": "megatron_args.txt", "torchtitan": "job.sbatch", "deepspeed": "ds_config.json"}
JOBS |= {"accelerate": "accelerate.yaml"}


@cache
def job_file(framework: str) -> bytes:
    """The file of a job that `launch` writes for a framework."""
    plan = "zero=3" if framework == "accelerate" else "zero=2"
    job = api.launch("llama3-8b", "h100-80g-sxm:8", plan, to=framework, batch=8, seq=128)
    return next(file.text for file in job.files if file.path == JOBS[framework]).encode()


@pytest.mark.parametrize("framework", JOBS)
@some(25)
@given(st.data())
def test_damaged_jobs(tmp_path_factory: pytest.TempPathFactory, framework: str, data: st.DataObject) -> None:
    path = file_with(tmp_path_factory, JOBS[framework], data.draw(damaged(job_file(framework))))
    check_contract(["estimate", "llama3-8b", "--from", path, *H100, "--batch", "8", "--seq", "128"])


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        (b'"Input Dims": [[', b'"Input Dims": [[' + b"9" * 5000 + b", "),
        (b'"Input Dims": [[', b'"Input Dims": [[' + b"9" * 300 + b", "),
        (b'"1": [0, 1]', b'"1": [2147483648, 1]'),
        (b'"input_sizes": [[', b'"input_sizes": [[' + b"9" * 400 + b", "),
        (b'"schemaVersion": 1,', b'"schemaVersion": x, "rank": ' + b"9" * 5000 + b","),
    ],
)
@pytest.mark.parametrize("verb", ["explain", "trace summary"])
def test_traces_of_impossible_counts(tmp_path: Path, verb: str, said: bytes, instead: bytes) -> None:
    for number, path in enumerate(sorted((GLOO4).glob("*.json.gz"))):
        whole = gzip.decompress(path.read_bytes())
        assert said in whole or number
        (tmp_path / f"rank-{number}.json").write_bytes(whole.replace(said, instead) if not number else whole)
    words = BASES[tuple(verb.split())]
    check_contract([*verb.split(), *(word.replace(GLOO, str(tmp_path)) for word in words)], may_warn=True)


@some(25, share=0.5)
@given(st.data())
def test_damaged_traces(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """One bad rank does not end the analysis of the others."""
    folder = tmp_path_factory.getbasetemp() / "traces"
    folder.mkdir(exist_ok=True)
    for number, path in enumerate(sorted((GLOO4).glob("*.json*"))):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        content = data.draw(damaged(content)) if number == 0 else content
        packed = data.draw(st.booleans())
        if packed:
            content = gzip.compress(content, 1)
            content = data.draw(st.one_of(st.just(content), damaged(content))) if number == 0 else content
        (folder / f"rank-{number}.json{'.gz' * packed}").write_bytes(content)
        (folder / f"rank-{number}.json{'.gz' * (not packed)}").unlink(missing_ok=True)
    of_traces = [verb for verb in BASES if verb[0] in ("trace", "explain", "calibrate")]
    verb = data.draw(st.sampled_from(of_traces))
    words = [word.replace(GLOO, str(folder)).replace(GPU, str(folder)) for word in BASES[verb]]
    check_contract([*verb, *words], may_warn=True)


POINT = FUZZ["point"]


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


@some(40, share=0.5)
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
@given(as_file(FUZZ["sweep"], toml_text))
def test_strange_sweeps(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    try:
        assert read_sweep(Path(file_with(tmp_path_factory, "sweep.toml", content))).points
    except MeshwiseError as error:
        assert len(str(error).splitlines()) == 1


# --- tables of measurements ---------------------------------------------------------------------

REQUESTS, OPS, COLLECTIVES = (FUZZ["csv"][name] for name in ("requests", "ops", "collectives"))
CASES_TABLE = json.loads((DATA / "nersc_final_cases.json").read_text())
CASES_TABLE |= {"cases": CASES_TABLE["cases"][:2], "collectives": CASES_TABLE["collectives"][:3]}
MEASURED = ["collective", "all_reduce", "--cluster", "h100-80g-sxm:64", "--data"]
ONE_GPU = ["serve", "llama3-8b", "--cluster", "h100-80g-sxm:1", "--requests"]
TRACE = b'{"timestamp": 0, "input_length": 100, "output_length": ' + b"9" * 2000 + b"}"
configs = st.sampled_from(CONFIGS).flatmap(lambda path: as_file(json.loads(path.read_bytes()), json.dumps))
FILES: dict[str, tuple[Any, str, list[str]]] = {
    "config": (configs, "config.json", ["estimate", *H100, "--batch", "8", "--seq", "128"]),
    "cluster": (
        as_file(CLUSTER, toml_text), "x.toml", ["estimate", "llama3-8b", "--batch", "64", "--cluster"],
    ),
    "device": (
        as_file(CLUSTER, toml_text), "x.toml",
        ["frontier", "layer", *BASES["frontier", "layer"][:6], "--chip"],
    ),
    "plan": (
        as_file({"tp": 2, "pp": 2, "recompute": "full"}, toml_text), "x.toml",
        ["estimate", "gpt3-175b", "--cluster", "a100-80g-sxm:64", "--batch", "64", "--plan"],
    ),
    "requests": (damaged(REQUESTS.encode()), "x.csv", ONE_GPU),
    "long count": (st.just(REQUESTS.encode() + b"1.0,100," + b"9" * 2000), "x.csv", ONE_GPU),
    "long cell": (st.just(REQUESTS.encode() + b'"' + b"1" * 200_000), "x.csv", ONE_GPU),
    "long length": (st.just(TRACE), "x.jsonl", ONE_GPU),
    "mixture": (
        as_file(FUZZ["gpt"], json.dumps), "x.json",
        ["eval-lm", "--max-tokens", "2", "--prompt-tokens", "8", "--ranks", "2"],
    ),
    "ops": (damaged(OPS.encode()), "x.csv", ["validate", "--runs"]),
    "large ops": (st.just(OPS.encode().replace(b"m=16", b"m=1e+308")), "x.csv", ["validate", "--runs"]),
    "collectives": (damaged(COLLECTIVES.encode()), "x.csv", MEASURED),
    "cases": (as_file(CASES_TABLE, json.dumps), "x.json", ["validate", "--cases"]),
}  # fmt: skip
"""Contents, the file's name, and the words of the command that reads it."""


@pytest.mark.parametrize("kind", FILES)
@some(25, share=0.3)
@given(data=st.data())
def test_damaged_files(tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject) -> None:
    contents, name, words = FILES[kind]
    check_contract([*words, file_with(tmp_path_factory, name, data.draw(contents))])


ROW = "H100-SXM-80GB,gemm,bfloat16,1,m={} n=4096 k=4096,{},x,mine"
POINTS = [(POINT | {"concurrency": str(num)}).values() for num in (1, 4, 16)]
FITS = {  # enough rows of each for one set of constants
    "ops": ("measured_ops.csv", OPS + "".join(f"{ROW.format(64 * m, 9 + m)}\n" for m in range(1, 40))),
    "serving": ("measured_serving.csv", "\n".join(map(",".join, (POINT, *POINTS)))),
    "steps": ("measured_iterations_a100.csv", "\n".join(RUNS[:4])),
}


@some(6, share=0.1)
@given(st.data(), st.sampled_from(sorted(FITS)))
def test_damaged_fits(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, only: str) -> None:
    name, text = FITS[only]
    content = data.draw(damaged(text.encode()))
    folder = Path(file_with(tmp_path_factory, name, content)).parent
    (folder / "published_micro.csv").write_text(COLLECTIVES)
    few = Path(file_with(tmp_path_factory, "few.csv", "\n".join(RUNS[:6]).encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwise.calibrate.runs.published_runs", lambda: few)
        check_contract(["fit", "--only", only, "--data", str(folder), "--no-write"])


# --- programs -----------------------------------------------------------------------------------

SMALL = FUZZ["programs"]


@st.composite
def program_words(draw: st.DrawFn) -> list[str]:
    """The words of a small program with strange values for some of its options."""
    from meshwise.runtime.programs import find_program

    name = draw(st.sampled_from(sorted(SMALL)))
    stated = SMALL[name].split()
    options = ["--ranks", "--rank", "--device"]
    options += [f"--{option.replace('_', '-')}" for option in find_program(name).options.rows]
    few = st.integers(1, 9).map(str)
    for flag in draw(st.lists(st.sampled_from(options), max_size=3, unique=True)):
        if flag in stated:
            del stated[stated.index(flag) :][:2]
        stated += [flag, draw(st.one_of(strange_text, few))]
    return [name, *stated]


@some(20, share=0.1)
@given(program_words(), st.sampled_from((*[["dryrun"], ["compare", "--no-run"]] * 5, ["run"])))
@example(["model-2d", "--seq", "\udcff"], ["dryrun"])
def test_strange_programs(stated: list[str], verb: list[str]) -> None:
    pytest.importorskip("torch")
    check_contract([verb[0], stated[0], *verb[1:], *stated[1:]])


# --- the page -----------------------------------------------------------------------------------

STATE = FUZZ["states"]


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """Asks the page's server; an error that it did not expect fails the test."""
    pytest.importorskip("plotly")
    testclient = pytest.importorskip("starlette.testclient")
    from meshwise.web.app import make_app
    from meshwise.web.views import Server

    with testclient.TestClient(make_app(Server(TRACES)), base_url="http://127.0.0.1") as client:
        yield client


@st.composite
def states(draw: st.DrawFn) -> tuple[str, dict[str, str]]:
    """A view, and the state of its form with strange values for some of its fields."""
    from meshwise.web.views import home, options

    view = draw(st.sampled_from(("explore", "ops", "options", "launch", "machine", *STATE)))
    names = st.sampled_from(sorted(options(home(view))))
    values = st.one_of(strange_text, plausible_text, st.integers(1, 1024).map(str))
    return view, STATE[home(view)] | draw(st.dictionaries(names, values, max_size=3))


@some(40, share=0.5)
@given(states())
@example(("serve", STATE["serve"] | {"concurrency": "1e+18"}))
@example(("serve", STATE["serve"] | {"concurrency": "1", "output": "1"}))
@example(("traces", {"path": LONG_NAME}))
@example(("serve", STATE["serve"] | {"concurrency": "1", "price": "1e+308"}))
def test_strange_states(page: Any, asked: tuple[str, dict[str, str]]) -> None:
    view, state = asked
    reply = page.post(f"/api/{view}", content=json.dumps(state))
    shown = f"{view} {state}: {reply.text[:3000]}"
    found = document(reply.text)
    assert reply.status_code == 200 or "\udcff" in state.values(), shown
    if "error" in found:
        assert found["error"] and len(found["error"].splitlines()) == 1 and "Traceback" not in shown, shown
        return
    text = "".join(found.get("sections", ()))
    assert fuzz.SCRIPT not in text and ">nan" not in text and ">inf" not in text, shown
    for figure in re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL):
        document(figure)

"""The public surface: what `import meshwise` offers, that it is light, and that order does not matter."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import meshwise
import typed_script
from data_tables import ROOT
from meshwise.runtime.programs import PROGRAMS, find_program

NAMES = {
    *("Cluster", "Estimate", "Ledger", "MeshwiseError", "Model", "Plan", "Workload", "__version__"),
    *("compare", "dry_run", "estimate", "frontier", "profile", "reproduce", "run", "search", "serve"),
    *("collective", "compare_script", "dry_run_script", "explain", "launch", "read_job", "rl", "study"),
    *("find_cluster", "find_model", "parse_plan", "plan_text", "validate", "fit_card", "on_ray", "budget"),
}


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_surface_is_what_all_says() -> None:
    assert set(meshwise.__all__) == NAMES == set(dir(meshwise))
    for name in NAMES:
        assert getattr(meshwise, name) is not None


def test_import_is_light() -> None:
    heavy = "{'numpy', 'msgspec', 'typer', 'rich', 'torch', 'pandas', 'matplotlib'}"
    assert python(f"import sys, meshwise; print({heavy} & set(sys.modules))") == "set()"


PRICE = "print(mw.estimate('llama3-8b', 'h100-80g-sxm:8', 'tp=8', batch=8, seq=4096).step_s > 0)"


@pytest.mark.parametrize(
    "before",
    [
        "import meshwise as mw",
        "import meshwise.estimate.grid, meshwise.plan.workload, meshwise as mw",
        "from meshwise.estimate import one_plan; import meshwise as mw",
    ],
)
def test_verbs_can_be_called_whatever_was_imported_before(before: str) -> None:
    assert python(f"{before}; {PRICE}") == "True"


def test_an_unknown_name_is_one_sentence() -> None:
    with pytest.raises(AttributeError, match="meshwise has no 'price'"):
        _ = meshwise.price


def test_a_script_that_uses_all_of_it_is_typed() -> None:
    words = ("--strict", "--follow-imports=silent", f"--cache-dir={ROOT / '.mypy_cache' / 'strict'}")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words, typed_script.__file__],
        env=os.environ | {"MYPYPATH": str(ROOT / "src")}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    used = set(re.findall(r"\bmw\.(\w+)", Path(typed_script.__file__).read_text()))
    assert used == NAMES - {"__version__"}


def test_the_script_runs(tmp_path: Path) -> None:
    typed_script.main(tmp_path)


@pytest.mark.parametrize("verb", ["dry_run", "run", "compare"])
def test_verbs_that_need_torch_say_so(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else find_spec(name))
    with pytest.raises(meshwise.MeshwiseError, match="torch is not installed") as error:
        getattr(meshwise, verb)("ulysses")
    assert error.value.exit_code == 3  # type: ignore[attr-defined]
    monkeypatch.undo()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.12.1+cu130")
    with pytest.raises(
        meshwise.MeshwiseError, match=r"need torch 2\.13 or newer, and this is 2\.12\.1\+cu130"
    ):
        getattr(meshwise, verb)("ulysses")


def test_options_of_programs_have_names_of_their_own() -> None:
    for name in PROGRAMS:
        options = {field.name for field in fields(find_program(name).options)}
        for verb in (meshwise.run, meshwise.dry_run, meshwise.compare):
            assert not options & set(inspect.signature(verb).parameters)

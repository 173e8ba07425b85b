"""The public surface: what `import meshwise` offers, that it is light, and that order does not matter."""

import subprocess
import sys

import pytest

import meshwise

NAMES = {
    *("Cluster", "Ledger", "Model", "Plan", "Workload", "__version__"),
    *("estimate", "find_cluster", "find_model", "parse_plan", "workload"),
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


PRICE = (
    "print(mw.estimate(mw.find_model('llama3-8b'), mw.find_cluster('h100-80g-sxm:8'), mw.parse_plan('tp=8'), "
    "mw.workload(batch=8, seq=4096)).step_s > 0)"
)


@pytest.mark.parametrize(
    "before",
    [
        "import meshwise as mw",
        "import meshwise.estimate.grid, meshwise.workload, meshwise as mw",
        "from meshwise.workload import Workload; import meshwise as mw",
        "import meshwise as mw; mw.estimate; import meshwise.estimate.grid as grid; grid.Choices()",
    ],
)
def test_verbs_can_be_called_whatever_was_imported_before(before: str) -> None:
    assert python(f"{before}; {PRICE}") == "True"


def test_the_verb_is_the_one_function() -> None:
    from meshwise import find_cluster, find_model, parse_plan
    from meshwise.estimate.single import estimate

    words = find_model("llama3-8b"), find_cluster("h100-80g-sxm:8"), parse_plan("tp=8")
    load = meshwise.workload(8, 4096)
    assert meshwise.estimate(*words, load).to_json() == estimate(*words, load).to_json()
    assert meshwise.estimate.estimate is estimate


def test_an_unknown_name_is_one_sentence() -> None:
    with pytest.raises(AttributeError, match="meshwise has no 'price'"):
        _ = meshwise.price

"""The public surface: what `import meshwise` offers, that it is light, and that order does not matter."""

import subprocess
import sys

import pytest

import meshwise

NAMES = {
    *("Cluster", "Estimate", "Ledger", "MeshwiseError", "Model", "Plan", "Workload", "__version__"),
    *("compare", "dry_run", "estimate", "frontier", "profile", "reproduce", "run", "search", "validate"),
    *("find_cluster", "find_model", "parse_plan", "plan_text"),
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
        "from meshwise.estimate import single; import meshwise as mw",
    ],
)
def test_verbs_can_be_called_whatever_was_imported_before(before: str) -> None:
    assert python(f"{before}; {PRICE}") == "True"


def test_an_unknown_name_is_one_sentence() -> None:
    with pytest.raises(AttributeError, match="meshwise has no 'price'"):
        _ = meshwise.price

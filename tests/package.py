"""Builds the sdist, the wheel from it, and tries the wheel in an empty environment: `make package`.

The core must work as anybody installs it: without torch, without the files of this repository. `make oldest`
runs tests with the oldest version of each dependency that pyproject.toml allows; the newest are those of
requirements.lock, with which everything is tested. `make pythons` runs the same tests with the newest
dependencies in each newer Python that is installed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
ESTIMATE = "estimate llama3-8b --cluster h100-80g-sxm:8 --plan zero=3 --batch 8 --json"
NEWEST_MINOR = 14
EXTRAS = ("plot", "web", "frames")
CORE_TESTS = (
    *("test_hardware", "test_collective", "test_cli", "test_cli_estimate", "test_cli_width", "test_ledger"),
    *("test_huggingface", "test_web", "test_html", "test_charts"),
)
"""Tests that need neither torch nor mypy, and together use every dependency of the core and of `EXTRAS`."""


def run(*words: str | Path, code: int = 0, cwd: Path = ROOT) -> str:
    """What a command prints; it must end with `code`."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in words], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def try_package(package: Path, folder: Path) -> None:
    """Install `package` into an empty environment and use it."""
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", package)
    meshwise = folder / "bin" / "meshwise"
    document = json.loads(run(meshwise, *ESTIMATE.split(), cwd=folder))
    assert document["step_s"] > 0 and document["ledger"]
    assert json.loads(run(meshwise, "validate", "--json", cwd=folder))["rows"]
    run(meshwise, "run", "ulysses", code=3, cwd=folder)
    print(f"{package.name}: prices a plan, validates, says that torch is missing")


def oldest_versions() -> list[str]:
    """The lower bounds of the dependencies of the core and of `EXTRAS`, each as its one version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [
        *project["dependencies"],
        *(one for extra in EXTRAS for one in project["optional-dependencies"][extra]),
    ]
    bounds = [re.fullmatch(r"([\w-]+)>=([\d.]+)", one) for one in ranges]
    return sorted({f"{bound[1]}=={bound[2]}" for bound in bounds if bound})


def try_core(interpreter: str, packages: Sequence[str | Path]) -> None:
    """Run the tests of the core with `packages`, in its own environment; others' warnings are theirs."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "bin" / "python"
        run(interpreter, "-m", "venv", folder)
        packages = (*packages, "pytest>=8", "pytest-xdist", "hypothesis", "httpx")
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
        tests = (ROOT / "tests" / f"{name}.py" for name in CORE_TESTS)
        print(run(python, "-m", "pytest", "-n", "2", "-W", "ignore::DeprecationWarning", *tests))


def newer_pythons() -> list[str]:
    """Interpreters of the versions that pyproject.toml allows and this one is not."""
    names = (f"python3.{minor}" for minor in range(sys.version_info.minor + 1, NEWEST_MINOR + 1))
    return [
        name
        for name in names
        if shutil.which(name) and not subprocess.call([name, "-c", ""], stderr=subprocess.DEVNULL)
    ]  # a shim of pyenv is there, but runs nothing


def main() -> None:
    """Build both, and try what was built from the other."""
    if "--oldest" in sys.argv:
        try_core(sys.executable, (*oldest_versions(), ROOT))
        return
    if "--pythons" in sys.argv:
        for name in (found := newer_pythons()):
            print(f"{name}:")
            try_core(name, [f"{ROOT}[{','.join(EXTRAS)}]"])
        print(f"tried {', '.join(found)}" if found else "no newer Python runs here: nothing was tried")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT)
        wheel, source = sorted((folder / "dist").iterdir())
        assert (wheel.suffix, source.suffix) == (".whl", ".gz")
        try_package(wheel, folder / "empty")


if __name__ == "__main__":
    main()

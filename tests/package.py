"""Builds the sdist, the wheel from it, and tries the wheel in an empty environment: `make package`.

The core must work as anybody installs it: without torch, without the files of this repository.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
ESTIMATE = (
    "estimate",
    "llama3-8b",
    "--cluster",
    "h100-80g-sxm:8",
    "--plan",
    "zero=3",
    "--batch",
    "8",
    "--json",
)


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
    document = json.loads(run(meshwise, *ESTIMATE, cwd=folder))
    assert document["step_s"] > 0 and document["ledger"]
    assert json.loads(run(meshwise, "validate", "--json", cwd=folder))["rows"]
    run(meshwise, "run", "ulysses", code=3, cwd=folder)
    print(f"{package.name}: prices a plan, validates, says that torch is missing")


def main() -> None:
    """Build both, and try what was built from the other."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT)
        wheel, source = sorted((folder / "dist").iterdir())
        assert (wheel.suffix, source.suffix) == (".whl", ".gz")
        try_package(wheel, folder / "empty")


if __name__ == "__main__":
    main()

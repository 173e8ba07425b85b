"""The scripts that draw the figures of the documentation, as modules."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def figures_script(name: str) -> Any:
    """`docs/figures/NAME.py`, imported."""
    spec = importlib.util.spec_from_file_location(f"figures_{name}", DOCS / "figures" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

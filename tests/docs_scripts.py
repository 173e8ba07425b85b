"""The scripts of the documentation, those that draw its figures too, as modules."""

import importlib.util
import sys
from typing import Any

from data_tables import DOCS


def docs_script(name: str) -> Any:
    """`docs/NAME.py`, imported."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

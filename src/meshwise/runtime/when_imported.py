"""Runs something as soon as a module is imported; needs the standard library only, as the hook does."""

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


def when_imported(name: str, install: Callable[[ModuleType], None]) -> None:
    """Call `install` with the module `name` once it is imported, as everyone does; now, if it is already."""
    if name in sys.modules:
        install(sys.modules[name])
        return

    def find_spec(sought: str, path: Any = None, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(sought, path, target) if sought == name else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                install(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)

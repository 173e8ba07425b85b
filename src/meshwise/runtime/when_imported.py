"""Runs something as soon as a module is imported; needs the standard library only, as the hook does."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class _Finder:
    """Finds module `target` as everyone does, and has its loader call `install` afterwards."""

    def __init__(self, target: str, install: Callable[[ModuleType], None]) -> None:
        self.target, self.install = target, install

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec, if it is the one waited for."""
        if name != self.target:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self.install(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, install: Callable[[ModuleType], None]) -> None:
    """Call `install` with the module `name` once it is imported; now, if it is already."""
    if name in sys.modules:
        install(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, install))

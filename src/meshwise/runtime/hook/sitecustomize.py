"""Python imports this module at start-up when its folder is on the module path.

It waits until the program imports torch.distributed, and then lets `init_process_group` start a capture; or,
in a dry run of a program, until it imports torch, which then becomes that of a fake rank. Nothing else is
touched. A sitecustomize that this one hides is run too.
"""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = str(Path(__file__).parent)


class _Finder:
    """Finds module `target` as everyone does, and has its loader call `install` afterwards."""

    def __init__(self, target: str, install: Callable[[], None]) -> None:
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
                with _no_collection():
                    load(module)
                    self.install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing that an import makes is garbage, and the search for it takes a fifth of torch's."""
    was_on = gc.isenabled()
    gc.disable()
    yield
    if was_on:
        gc.enable()


def _capture() -> None:
    spec = importlib.util.spec_from_file_location("_meshwise_capture", Path(_HERE).parent / "capture.py")
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    options: dict[str, Any] = {
        "shapes": os.environ.get("MESHWISE_CAPTURE_SHAPES", "1") == "1",
        "memory": os.environ.get("MESHWISE_CAPTURE_MEMORY", "1") == "1",
        "stacks": os.environ.get("MESHWISE_CAPTURE_STACKS", "0") == "1",
    }
    module.capture_process_group(os.environ["MESHWISE_CAPTURE_DIRECTORY"], **options)


def _run_hidden() -> None:
    """Run the sitecustomize that would have been found without this one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if p != _HERE])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _dry_run() -> None:
    from meshwise.runtime.script.child import install

    install(json.loads(os.environ["MESHWISE_SCRIPT"]))


if os.environ.get("MESHWISE_CAPTURE_DIRECTORY"):
    sys.meta_path.insert(0, _Finder("torch.distributed.distributed_c10d", _capture))
if os.environ.get("MESHWISE_SCRIPT") and not os.environ.get("MESHWISE_SCRIPT_PROCESS"):
    sys.meta_path.insert(0, _Finder("torch", _dry_run))
_run_hidden()

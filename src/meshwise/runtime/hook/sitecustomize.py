"""Python imports this module at start-up when its folder is on the module path.

It waits until the program imports torch, and then lets its first module or `init_process_group` start a
capture; or, in a dry run of a program, makes torch that of a fake rank. Nothing else is touched, and what
goes wrong with a capture is said, no more. A sitecustomize that this one hides is run too. The program's
Python need not have meshwise: a capture imports only the standard library and torch, and a dry run finds
meshwise where this file lies.
"""

import gc
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_HERE = str(Path(__file__).parent)


def _beside(name: str) -> ModuleType:
    """The module `name` of the folder above, by its file, since meshwise may not be importable."""
    name, path = f"_meshwise_{name}", Path(_HERE).parent / f"{name}.py"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _when_imported(name: str, install: Callable[[ModuleType], None]) -> None:
    _beside("when_imported").when_imported(name, install)


def _capture_from(what: str) -> Callable[[ModuleType], None]:
    """What to do once the module is imported in which captures of this process may begin."""

    def install(_: ModuleType) -> None:
        try:
            settings = json.loads(os.environ["PYTHON_MESHWISE_CAPTURE"])
            try:
                _beside("torch_private").need_torch("profiles", "2.8")
            except ImportError as error:
                Path(settings["directory"], "refused").write_text(str(error))
                return
            getattr(_beside("capture"), what)(**settings)
        except Exception as error:
            print(f"meshwise: no profile of process {os.getpid()}: {error!r}", file=sys.stderr)

    return install


def _run_hidden() -> None:
    """Run the sitecustomize that would have been found without this one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [p for p in sys.path if p != _HERE])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _find_beside(name: str, *_: Any) -> Any:
    """Where meshwise lies, and what it needs, for a program whose Python has none."""
    if name in ("meshwise", "msgspec", "numpy"):
        return importlib.machinery.PathFinder.find_spec(name, json.loads(_SCRIPT)["search"])
    return None


def _dry_run(_: ModuleType) -> None:
    """Make torch that of a fake rank; where that fails, say so in a sentence and end."""
    settings = json.loads(_SCRIPT)
    if re.search(r"deepspeed\.launcher|/deepspeed( |$)", " ".join(sys.orig_argv)):
        os.environ["MESHWISE_LAUNCHED"] = "1"  # it starts each rank of a host as a process
        return
    if "MESHWISE_LAUNCHED" in os.environ and os.environ["RANK"] != str(settings["rank"]):
        os._exit(0)
    finder: Any = SimpleNamespace(find_spec=_find_beside)
    sys.meta_path.append(finder)
    gc.disable()  # nothing that is imported is garbage, and the search for it takes a fifth of the time
    try:
        _beside("torch_private").need_torch("dry runs of scripts", "2.13")
        from meshwise.runtime.script.child import install
    except ImportError as error:
        text = f"{error}; this is Python {sys.version.split()[0]} at {sys.executable}"
        Path(settings["folder"], "refused").write_text(text)
        os._exit(3)
    gc.enable()
    install(settings)


_SCRIPT = os.environ.get("MESHWISE_SCRIPT", "")
if os.environ.get("PYTHON_MESHWISE_CAPTURE"):
    _when_imported("torch.distributed.distributed_c10d", _capture_from("capture_process_group"))
    _when_imported("torch.nn.modules.module", _capture_from("capture_modules"))
if _SCRIPT and not os.environ.get("MESHWISE_SCRIPT_PROCESS"):
    _when_imported("torch", _dry_run)
_run_hidden()

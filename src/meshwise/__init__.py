"""meshwise: what a distributed transformer costs before it runs, and where prediction and run differ.

    import meshwise as mw

    priced = mw.estimate(
        mw.find_model("gpt3-175b"),
        mw.find_cluster("a100-80g-sxm:512"),
        mw.parse_plan("tp=8,pp=8"),
        mw.workload(batch=512, seq=2048),
    )
    priced.step_s, priced.mfu, priced.ledger

The public names are those of `__all__`. Each is imported when it is first used, so
`import meshwise` is light.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwise.estimate.single import estimate as estimate
    from meshwise.hardware import Cluster as Cluster
    from meshwise.hardware import find_cluster as find_cluster
    from meshwise.ledger import Ledger as Ledger
    from meshwise.model import Model as Model
    from meshwise.model import find_model as find_model
    from meshwise.plan import Plan as Plan
    from meshwise.plan import parse_plan as parse_plan
    from meshwise.workload import Workload as Workload
    from meshwise.workload import workload as workload

__version__ = "0.1.0"

_HOME = {
    "Cluster": "hardware",
    "Ledger": "ledger",
    "Model": "model",
    "Plan": "plan",
    "Workload": "workload",
    "find_cluster": "hardware",
    "find_model": "model",
    "parse_plan": "plan",
}
"""The module of each public name."""
_VERBS = ("estimate", "workload")
"""Public functions whose module has their name; that module can be called (`callable_module`)."""

__all__ = ["Cluster", "Ledger", "Model", "Plan", "Workload", "__version__"]
__all__ += ["estimate", "find_cluster", "find_model", "parse_plan", "workload"]


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return import_module(f"meshwise.{name}")
    if name in _HOME:
        return getattr(import_module(f"meshwise.{_HOME[name]}"), name)
    raise AttributeError(f"meshwise has no {name!r}; its public names are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Verb(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


def callable_module(name: str) -> None:
    """Let the module `name` be called as the function in it that has its name.

    Python binds a submodule to its package under the submodule's name, so `meshwise.workload` is the module
    from the moment that anything imports it. Called, it does what the function does.
    """
    sys.modules[name].__class__ = _Verb

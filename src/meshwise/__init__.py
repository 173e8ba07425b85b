"""meshwise: what a distributed transformer costs before it runs, and where prediction and run differ.

    import meshwise as mw

    priced = mw.estimate("gpt3-175b", "a100-80g-sxm:512", "tp=8,pp=8", batch=512, seq=2048)
    priced.step_s, priced.mfu, priced.ledger

The public names are those of `__all__`; every other module is an implementation detail.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# These folders share their name with a verb. Loaded first (they are empty), they never rebind it.
from meshwise import (
    estimate as _estimate_folder,  # noqa: F401
    launch as _launch_folder,  # noqa: F401
    rl as _rl_folder,  # noqa: F401
    search as _search_folder,  # noqa: F401
    serve as _serve_folder,  # noqa: F401
)
from meshwise.api import (
    budget,
    collective,
    compare,
    compare_script,
    dry_run,
    dry_run_script,
    estimate,
    explain,
    fit_card,
    frontier,
    launch,
    profile,
    read_job,
    reproduce,
    rl,
    run,
    search,
    serve,
    study,
    validate,
)

if TYPE_CHECKING:
    from meshwise.core.each import on_ray as on_ray
    from meshwise.core.errors import MeshwiseError as MeshwiseError
    from meshwise.core.ledger import Ledger as Ledger
    from meshwise.estimate.one_plan import Estimate as Estimate
    from meshwise.machine.hardware import Cluster as Cluster, find_cluster as find_cluster
    from meshwise.model.architecture import Model as Model
    from meshwise.model.find import find_model as find_model
    from meshwise.plan.plan import Plan as Plan, parse_plan as parse_plan, plan_text as plan_text
    from meshwise.plan.workload import Workload as Workload

__version__ = "0.3.0"

_HOME = {
    "Cluster": "machine.hardware",
    "Estimate": "estimate.one_plan",
    "Ledger": "core.ledger",
    "MeshwiseError": "core.errors",
    "Model": "model.architecture",
    "Plan": "plan.plan",
    "Workload": "plan.workload",
    "find_cluster": "machine.hardware",
    "find_model": "model.find",
    "on_ray": "core.each",
    "parse_plan": "plan.plan",
    "plan_text": "plan.plan",
}
"""The module of each public name that is imported when it is first used."""

__all__ = ["Cluster", "Estimate", "Ledger", "MeshwiseError", "Model", "Plan", "Workload", "__version__"]
__all__ += ["compare", "dry_run", "estimate", "frontier", "profile", "reproduce", "run", "search", "serve"]
__all__ += ["collective", "compare_script", "dry_run_script", "explain", "launch", "read_job", "rl", "study"]
__all__ += ["budget", "find_cluster", "find_model", "fit_card"]
__all__ += ["on_ray", "parse_plan", "plan_text", "validate"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"meshwise.{_HOME[name]}"), name)
    raise AttributeError(f"meshwise has no {name!r}; its public names are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)

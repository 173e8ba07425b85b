"""`--from FILE`: model, plan and workload out of a job of another framework."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise import api
from meshwise.cli.output import console
from meshwise.core.errors import WorkloadError

if TYPE_CHECKING:
    from meshwise.launch.read import Job


def fill_in(asked: dict[str, Any], source: Path) -> Job:
    """Take what `asked` leaves out (model, plan, batch, seq, microbatch) from the job of `source`."""
    from meshwise.plan.plan import DEFAULTS, Plan, plan_keys

    job = api.read_job(source, asked["cluster"])
    for name in asked.keys() & {"model", "batch", "seq", "microbatch"}:
        if asked[name] in (None, ()):
            asked[name] = getattr(job, name)
    if asked["model"] is None:
        raise WorkloadError(f"{source} does not name its model; name it: meshwise VERB MODEL --from ...")
    keys = {key: getattr(job.plan, key) for key in DEFAULTS if getattr(job.plan, key) != DEFAULTS[key]}
    asked["plan"] = Plan(**(keys | plan_keys(asked["plan"])))
    return job


def need_model(asked: dict[str, Any]) -> None:
    """WorkloadError where neither the command line nor a job says which model."""
    if asked["model"] is None:
        raise WorkloadError("name a MODEL, or take it from a job with --from FILE")


def job_json(job: Job) -> dict[str, Any]:
    """What a document says about the job that it was taken from."""
    return {"framework": job.framework, "num_gpus": job.num_gpus, "unread": list(job.unread)}


def print_unread(sentences: Sequence[str], of: str) -> None:
    """Print what a job says that nothing of ours holds, below the answer."""
    for sentence in sentences:
        console().print(f"not in the {of}: {sentence}")

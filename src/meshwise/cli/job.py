"""`--from FILE`: model, plan and workload out of a job of another framework."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwise import api
from meshwise.core.errors import WorkloadError

if TYPE_CHECKING:
    from meshwise.launch.read import Job

FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from", help="A job of Megatron-LM, torchtitan, DeepSpeed or Accelerate to take all from."
    ),
]


def with_job(source: Path, cluster: str, **stated: Any) -> tuple[dict[str, Any], Job]:
    """`stated` (model, plan, batch, seq, microbatch), what is left out taken from the job of `source`."""
    from meshwise.plan.plan import DEFAULTS, Plan, plan_keys

    job = api.read_job(source, cluster)
    filled = {
        name: getattr(job, name) if value in (None, "") else value
        for name, value in stated.items()
        if name != "plan"
    }
    if filled["model"] is None:
        raise WorkloadError(
            f"{source} does not say which model it trains; name it: meshwise VERB MODEL --from ..."
        )
    keys = {key: getattr(job.plan, key) for key in DEFAULTS if getattr(job.plan, key) != DEFAULTS[key]}
    return filled | {"plan": Plan(**(keys | plan_keys(stated["plan"])))}, job


def need_model(model: str | None) -> str:
    """The model, which must be named where no file says it."""
    if model is None:
        raise WorkloadError("name a MODEL, or take it from a job with --from FILE")
    return model


def job_json(job: Job) -> dict[str, Any]:
    """What a document says about the job that it was taken from."""
    return {"framework": job.framework, "num_gpus": job.num_gpus, "unread": list(job.unread)}

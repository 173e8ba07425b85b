"""What a job costs as it was written: its own files read back and priced, beside what was asked.

A framework that is told a plan whole takes as long, and as much memory, as the plan does; where something
is not expressed, the difference is what that is worth.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwise.estimate.one_plan import estimate
from meshwise.launch.read import read_job
from meshwise.launch.settings import TRAINING
from meshwise.launch.write import AsWritten, Launch
from meshwise.machine.hardware import Cluster
from meshwise.model.architecture import Model
from meshwise.plan.plan import Plan
from meshwise.plan.workload import Workload

NOISE = 1e-6


def as_written(job: Launch, model: Model, cluster: Cluster, plan: Plan, workload: Workload) -> Launch:
    """`job` with the price of what its files say, where it trains on many cards."""
    if job.framework not in TRAINING:
        return job
    with TemporaryDirectory() as folder:
        *_, script = job.write(Path(folder))
        found = read_job(script, cluster.num_chips)
    asked = estimate(model, cluster, plan, workload)
    read = replace(found.plan, imbalance=plan.imbalance)  # which the data decide
    sizes = {name: getattr(found, name) for name in ("batch", "seq", "microbatch")}
    work = replace(workload, **{name: size for name, size in sizes.items() if size})
    priced = estimate(found.model or model, cluster, read, work)
    memory_bytes, asked_bytes = (one.memory_bytes["total"] for one in (priced, asked))
    off = max(abs(priced.step_s / asked.step_s - 1.0), abs(memory_bytes / asked_bytes - 1.0))
    return replace(job, as_written=AsWritten(priced.step_s, memory_bytes, priced.fits, off <= NOISE))

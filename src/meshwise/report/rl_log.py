"""The step log of a post-training job beside the prediction, and what to change first."""

from __future__ import annotations

from collections.abc import Iterator

from meshwise.core.units import duration
from meshwise.report.answer import Section
from meshwise.report.table import Table
from meshwise.rl.step_log import RlExplanation


def parts(found: RlExplanation) -> Iterator[Section]:
    """Each phase as measured and as predicted, and findings."""
    rows = [
        (row["phase"], duration(row["measured_s"]), duration(row["predicted_s"]))
        for row in found.rows
        if row["measured_s"] or row["predicted_s"]
    ]
    whole = duration(found.log.step_s), duration(found.step.step_s if found.step else None)
    yield f"{found.log.num_steps} steps"
    yield Table("", ("phase", "measured", "predicted"), [*rows, ("step", *whole)])
    yield from found.findings

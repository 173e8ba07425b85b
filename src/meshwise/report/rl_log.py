"""The step log of a post-training job beside the prediction, and what to change first."""

from __future__ import annotations

from collections.abc import Iterator

from meshwise.report.answer import Section
from meshwise.report.table import Fields, records_table
from meshwise.rl.step_log import RlExplanation


def parts(found: RlExplanation) -> Iterator[Section]:
    """Each phase as measured and as predicted, and findings."""
    rows = [row for row in found.rows if row["measured_s"] or row["predicted_s"]]
    step_s = found.step.step_s if found.step else None
    rows.append({"phase": "step", "measured_s": found.log.step_s, "predicted_s": step_s})
    yield f"{found.log.num_steps} steps"
    columns: Fields = {"phase": "phase", "measured": "measured_s", "predicted": "predicted_s"}
    yield records_table("", rows, columns, no_wrap=False)
    yield from found.findings

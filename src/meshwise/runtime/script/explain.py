"""The measured step of anybody's script beside the seconds of its dry run, op by op."""

from collections.abc import Iterator
from dataclasses import replace

from meshwise.core.errors import ClusterError
from meshwise.machine.hardware import Cluster
from meshwise.runtime.script.start import ScriptOutcome
from meshwise.runtime.step_time import StepTime
from meshwise.trace import explain
from meshwise.trace.summary import Summary


def explain_script(summary: Summary, outcome: ScriptOutcome, cluster: Cluster) -> explain.Explanation:
    """The measured step beside that of a dry run on `cluster`; ClusterError where that has no seconds."""
    if (time := outcome.time) is None:
        raise ClusterError(outcome.untimed)
    trains = "backward" in outcome.step_ledger["phase"]
    mismatches = explain.contradictions(summary, cluster, "program", trains)
    found = explain.beside(summary, lambda _: _predicted(time), mismatches)
    return replace(found, findings=[*found.findings, *time.notes])


def _predicted(time: StepTime) -> Iterator[explain.StepWork]:
    """Seconds of each op that nothing hides; the rest is the host's, or waited for other ranks."""
    rest_s = time.step_s - time.parts_s["stragglers"]
    for row in time.ledger.rows():
        spent_s = row["count"] * row["exposed_s" if row["collective"] else "time_s"]
        rest_s -= spent_s
        place = (row["module"] or "program", f"{row['op']} {row['collective']}".strip(), row["phase"])
        part = explain.part_named(f"{row['module']}.{row['op']}")
        yield explain.StepWork(explain.looks_of_op({**row, "module": part}), place, spent_s)
    for name, spent_s in (("idle", rest_s), ("waiting", time.parts_s["stragglers"])):
        yield explain.StepWork(explain.look_of(name), ("program", name, "step"), spent_s)

"""A step of post-training by reinforcement, as text and a table of its phases."""

from __future__ import annotations

from rich.console import Console

from meshwise.core.units import duration, with_prefix
from meshwise.plan.plan import plan_text
from meshwise.report.table import Table, percent
from meshwise.rl.answer import RlAnswer
from meshwise.rl.best_split import BestSplit
from meshwise.rl.step import RlStep
from meshwise.rl.step_log import RlExplanation

_OF_PHASES = {
    "generation": "engines generate; the trainer waits",
    "scoring": "log-probabilities and other passes",
    "train": "optimizer steps on packed samples",
    "sync": "weights travel to the engines",
    "switch": "optimizer states to the host and back",
    "wait": "data, rewards, logs",
}


def print_rl(answer: RlAnswer, console: Console) -> None:
    """Print the step, its phases, memory and cost."""
    step, document = answer.step, answer.to_json()
    of = step.job
    pools = (
        f"{of.rollout_gpus} for rollout, {of.train_gpus} for training" if of.is_split else "shared in turn"
    )
    console.print(
        f"{of.model.name} on {of.cluster.num_chips} x {of.cluster.chip.name}, {of.mode}: GPUs {pools}"
    )
    console.print(
        f"training {document['train_plan'] or 'dp'}; {step.pool.num} engines of "
        f"{document['rollout_plan'] or 'tp=1'}; {document['framework']}"
    )
    if step.step_s is not None:
        low_s, high_s = document["step_s_interval"].values()
        console.print(
            f"a step takes {duration(step.step_s)} ({duration(low_s)} to {duration(high_s)}): "
            f"{document['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU"
        )
        console.print(phases_table(step))
        idle = step.idle_frac
        console.print(
            f"generation alone {duration(step.generation_s)}: half of the samples after "
            f"{duration(document['half_of_samples_s'])}, the last tenth takes {duration(document['tail_s'])}"
        )
        stale = f"; staleness {step.staleness:.2g}" if step.staleness else ""
        console.print(f"idle: rollout {percent(idle['rollout'])}, training {percent(idle['train'])}{stale}")
    if cost := answer.cost:
        words = {"usd_per_step": "${:,.2f} a step", "run_days": "{:,.3g} days", "run_usd": "${:,.0f} the run"}
        console.print("; ".join(text.format(cost[name]) for name, text in words.items() if name in cost))
    for pool, held in (("rollout", step.engine_bytes), ("training", step.trainer_bytes)):
        parts = ", ".join(f"{name} {with_prefix(part, 'B')}" for name, part in held.items() if part)
        console.print(f"{pool} GPU: {with_prefix(sum(held.values()), 'B')} ({parts})")
    for note in step.notes:
        console.print(f"note: {note}")
    if answer.split is not None:
        _print_split(answer.split, console)


def print_rl_log(found: RlExplanation, console: Console) -> None:
    """Print a step log beside the prediction, and what to change first."""
    rows = [
        (row["phase"], duration(row["measured_s"]), duration(row["predicted_s"]))
        for row in found.rows
        if row["measured_s"] or row["predicted_s"]
    ]
    whole = duration(found.log.step_s), duration(found.step.step_s if found.step else None)
    console.print(f"{found.log.num_steps} steps")
    console.print(Table("", ("phase", "measured", "predicted"), [*rows, ("step", *whole)]))
    for finding in found.findings:
        console.print(finding)


def split_table(split: BestSplit) -> Table:
    """A row for every candidate that was priced, the best first."""
    rows = [
        (
            step.job.mode,
            step.job.staleness,
            step.gpus["rollout"],
            plan_text(step.job.rollout_plan) or "tp=1",
            step.gpus["train"] if step.job.is_split else "the same",
            plan_text(step.job.train_plan),
            duration(step.step_s or 0.0) if step.fits else "too much memory",
            "*" if step in split.front else "",
        )
        for step in split.best
    ]
    columns = ("mode", "bound", "rollout", "engine", "training", "plan", "a step", "front")
    return Table("Candidates", columns, rows, left={"mode", "engine", "plan"})


def _print_split(split: BestSplit, console: Console) -> None:
    """Print every candidate, what other splits take, and what more memory gains."""
    console.print(split_table(split))
    if len(split.about_s) > 1:
        splits = ", ".join(f"{gpus}: {duration(about_s)}" for gpus, about_s in split.about_s)
        console.print(f"rollout GPUs of that mode and engine, at first look: {splits}")
    if (larger := split.larger_share) is not None and larger.step_s:
        console.print(f"with --memory-frac {larger.job.memory_frac:g} a step takes {duration(larger.step_s)}")


def phases_table(step: RlStep) -> Table:
    """A row for each phase that takes time."""
    total = step.step_s or 1.0
    rows = [
        (name, duration(seconds), percent(seconds / total), _OF_PHASES[name])
        for name, seconds in step.phases_s.items()
        if seconds
    ]
    return Table("", ("phase", "time", "share", "what"), rows, left={"phase", "what"})

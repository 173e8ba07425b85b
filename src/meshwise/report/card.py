"""What a card fine-tunes, as a table: a row a model and method that fits, the largest that do not below."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from meshwise.core.files import read_catalog
from meshwise.core.units import dollars, long_duration, with_prefix
from meshwise.report.answer import Section, Text
from meshwise.report.table import Table
from meshwise.search.fit_card import CardFit, CardRun

_WORDS = read_catalog("words.toml")
TITLES, MEANINGS = _WORDS["methods"], _WORDS["method_meanings"]


def parts(found: CardFit, *, everything: bool = False) -> Iterator[Section]:
    """How each model that fits is trained, what does not fit, and the command to go on with."""
    whole = found.card.chip.memory_bytes
    usable = f"{with_prefix(found.memory_frac * whole, 'B')} of its {with_prefix(whole, 'B')}"
    each = f"{found.batch} sequences of {found.seq:,} tokens a step"
    yield f"{found.card.chip.name}, {usable}: fine-tuning with Hugging Face's modules, {each}"
    shown = [one for one in found.runs if one.fits or everything]
    if shown:
        yield card_table(found, shown)
        for method in dict.fromkeys(one.method for one in shown):
            yield f"{TITLES[method]}: {MEANINGS[method]}"
        yield between(shown)
    yield from too_large(found)
    for name, why in found.refused.items():
        yield f"not priced: {name}: {why}"
    if fitting := [one for one in found.runs if one.fits]:
        yield Text("Next", next_commands(fitting[-1]), verbatim=True)


def card_table(found: CardFit, runs: list[CardRun]) -> Table:
    """A row a run; models and their sizes stand once."""
    rows, last = [], ""
    for one in runs:
        row, name = one.to_json(found.tokens, found.price), one.run.model.name
        model = (name, with_prefix(row["num_params"], "", 3)) if name != last else ("", "")
        rate = f"{row['tokens_per_s']:,.0f}" if one.fits else "does not fit"
        taken = long_duration(3600 * row["hours"]) if "hours" in row else None
        size = with_prefix(row["memory_bytes"], "B", 3)
        rows.append((*model, TITLES[one.method], size, rate, taken, dollars(row.get("cost"))))
        last = name
    whole = "" if found.tokens is None else f"{with_prefix(found.tokens, '')} tokens"
    columns = ("model", "size", "method", "memory", "tokens/s", whole, "cost")
    num = 5 + (found.tokens is not None) + (found.price is not None)
    return Table("", columns[:num], [row[:num] for row in rows], left=("model", "method"), no_wrap=True)


def between(runs: list[CardRun]) -> str:
    """How far off the tokens a second of each method may be."""
    parts: dict[str, dict[str, None]] = {}
    for one in runs:
        low, high = (f"{one.run.step_s / end - 1:+.0%}" for end in reversed([*one.run.step_s_interval]))
        parts.setdefault(f"{low} to {high}", {})[TITLES[one.method]] = None
    each = "; ".join(f"{', '.join(methods)} {ends}" for ends, methods in parts.items())
    return f"8 of 10 measured runs differ from the tokens/s by: {each}"


def too_large(found: CardFit) -> list[str]:
    """The models that no method fits, with what the smallest needs."""
    needs = []
    for name, runs in groupby(found.runs, key=lambda one: one.run.model.name):
        same = list(runs)
        if not any(one.fits for one in same):
            least = min(same, key=lambda one: one.run.memory_bytes["total"])
            size = with_prefix(least.run.memory_bytes["total"], "B", 3)
            needs.append(f"{name} ({size} by {TITLES[least.method]})")
    return [f"too large: {', '.join(needs)}"] if needs else []


def next_commands(one: CardRun) -> list[str]:
    """How to look into the largest model that fits, and how to start it."""
    row, run = one.to_json(None, None), one.run
    job = (
        f"{run.model.name} --cluster {run.cluster.chip.name}:1 --plan {row['plan_text']} "
        f"--batch {run.workload.batch} --microbatch {run.workload.microbatch} --seq {run.workload.seq}"
    )
    return [f"next: meshwise estimate {job}", f"      meshwise launch {job} --to peft"]

"""What programs did: a rank of ours, a dry run of a user's script, and how instruments compare, as text.

Of a script: the peak and what held it, collectives, and guesses. Of a comparison: where instruments differ,
and the seconds of a cluster beside those of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwise.core.compare import TIME, Comparison, Row
from meshwise.core.units import duration, of_capacity, with_prefix
from meshwise.launch.write import Launch
from meshwise.report.answer import Section, Text
from meshwise.report.table import TABLES, Table, records_table

if TYPE_CHECKING:
    from meshwise.runtime.script.start import ScriptOutcome
    from meshwise.runtime.start import Outcome

_ROWS = 12
_MOST_ROWS, _MOST_DIFFERENCES = 20, 50


def rank_parts(outcome: Outcome, *, says_result: bool = False) -> Iterator[Section]:
    """What a rank returned (unless the program `says_result`), and its peak."""
    if outcome.result is not None and not says_result:
        yield Text("Result", [f"result: {outcome.result}"], verbatim=True)
    steps = "" if not outcome.num_steps else f" of {outcome.num_steps} step{'s' * (outcome.num_steps > 1)}"
    yield from _peak(outcome, steps)


def _peak(outcome: Outcome | ScriptOutcome, of: str = "", reached: str = "") -> Iterator[Section]:
    """The peak, whether the chip holds it, and what the allocator reserved, or where memory ran out."""
    held = of_capacity(outcome.peak_bytes, outcome.memory_bytes, outcome.fits)
    peak = held + reached if outcome.peak_bytes else "not recorded"
    yield f"rank {outcome.rank} of {outcome.ranks} on {outcome.device}: peak memory{of} {peak}"
    if failed := outcome.out_of_memory:
        names = ("wanted_bytes", "limit_bytes", "reserved_bytes", "booked_bytes")
        wanted, limit, reserved, used = (with_prefix(failed[name], "B") for name in names)
        text = f"out of memory in {_place(failed.get('place', {}))}: {wanted} wanted, {reserved} reserved"
        yield f"{text} ({used} in use) of the {limit} that the CUDA context leaves"
    elif outcome.reserved_bytes:
        yield f"reserved by the allocator: {with_prefix(outcome.reserved_bytes, 'B')} at most"


def _place(row: Mapping[str, str]) -> str:
    return " ".join(filter(None, (row.get(name, "") for name in ("phase", "module", "op"))))


def script_parts(outcome: ScriptOutcome) -> Iterator[Section]:
    """The peak with the op that made it, then tables."""
    yield from _peak(outcome, reached=f", reached in {_place(outcome.peak_row)}")
    if not outcome.num_steps and "backward" in outcome.ledger.columns["phase"]:
        asked = [f"; {of['place']} got {of['assumed']}" for of in outcome.guesses if "value" in of["what"]]
        yield f"no optimizer step ran after a backward{asked[-1] + ' for an unknown value' if asked else ''}"
    alive = list(outcome.alive_at_peak.items())
    rest = sum(size for _, size in alive[_ROWS:])
    rows = [(what, with_prefix(size, "B")) for what, size in alive[:_ROWS]]
    rows += [(f"{len(alive) - _ROWS} more", with_prefix(rest, "B"))] if rest else []
    machine_bytes = outcome.peak_bytes - sum(outcome.alive_at_peak.values())
    rows.append(("allocator and workspace", with_prefix(machine_bytes, "B")))
    yield Table("Alive at the peak", ("what", "bytes"), rows)
    step = f"step {outcome.num_steps}" if outcome.num_steps else "the whole program"
    if exchanged := outcome.collectives():
        yield records_table(f"Collectives of {step}", exchanged, TABLES["exchanged"])
    yield f"matmuls and attention of {step}: {with_prefix(outcome.step_ledger.total('flop'), 'FLOP')}"
    yield from _time(outcome, step)
    if outcome.guesses:
        yield records_table("What a fake rank cannot know", outcome.guesses, TABLES["guesses"])


def _time(outcome: ScriptOutcome, step: str) -> Iterator[Section]:
    """How long the last step takes, and on what the time goes."""
    if (time := outcome.time) is None:
        yield from [f"no time: {outcome.untimed}"] * bool(outcome.untimed)
        return
    low, high = map(duration, time.interval)
    yield f"{step}, run op by op: {duration(time.step_s)} ({low} to {high} in 8 of 10 cases)"
    shares = [
        (name, duration(part_s), f"{part_s / time.step_s:.1%}")
        for name, part_s in time.parts_s.items()
        if part_s
    ]
    yield Table(f"Time of {step}", ("part", "time", "share"), shares)
    yield from time.notes


def difference_parts(comparison: Comparison, step_s: Mapping[str, float | None]) -> Iterator[Section]:
    """All totals of a step, and by how much a script's differ from the closed form's; how long each takes."""
    rows = []
    for row in comparison.rows:
        stated, found = row.values["estimate"] or 0.0, row.values["script"] or 0.0
        ratio = "" if row.agrees else f"x {found / stated:.4g}" if stated else "not stated"
        rows.append((row.module, row.op, row.phase, row.column, f"{stated:,.10g}", f"{found:,.10g}", ratio))
    columns = ("module", "op", "phase", "column", "estimate", "script", "differs")
    yield Table("A step of one rank", columns, rows, left=columns[:4])
    yield f"{len(comparison.differences())} of {len(rows)} numbers differ"
    times = [f"{duration(each_s)} ({name})" for name, each_s in step_s.items() if each_s]
    yield f"a step takes {', '.join(times)}; the script is run op by op"


def comparison_parts(result: Comparison) -> Iterator[Section]:
    """Whether all numbers agree, or those that do not; the seconds of a cluster where it has them."""
    differing = result.differences()
    if times := [row for row in result.rows if row.column == TIME]:
        times.sort(key=lambda row: -max(value or 0.0 for value in row.values.values()))
        longest = times[:_MOST_ROWS]
        title = f"The {len(longest)} longest ops of {len(times)}"
        yield _table(title, longest, ("module", "op", "phase", "shape"), duration)
    num_counts = len(result.rows) - len(times)
    instruments = list(result.rows[0].values) if result.rows else []
    if not differing:
        yield f"all {num_counts} numbers agree: {', '.join(instruments)}"
        return
    place = ("module", "op", "phase", "shape", "column")
    yield _table("Where they differ", differing[:_MOST_DIFFERENCES], place, lambda value: f"{value:,.10g}")
    yield f"{len(differing)} of {num_counts} numbers differ"


def _table(title: str, rows: Sequence[Row], place: Sequence[str], show: Callable[[float], str]) -> Table:
    """Where in the program each row is, and what each instrument says."""
    instruments = list(rows[0].values)
    cells = [
        [getattr(row, name) for name in place]
        + ["-" if (value := row.values.get(one)) is None else show(value) for one in instruments]
        for row in rows
    ]
    return Table(title, (*place, *instruments), cells, left=place)


# --- settings that start a plan elsewhere ---------------------------------------------------------


def as_written_text(found: Launch) -> list[str]:
    """What the files cost, as a framework reads them; nothing where that is not known."""
    if (priced := found.as_written) is None:
        return []
    line = f"as written: {duration(priced.step_s)}, {priced.memory_bytes / 1e9:.1f} GB"
    return [line + ", does not fit" * (not priced.fits) + ", not what was asked" * (not priced.is_asked)]


def launch_parts(found: Launch, written: Sequence[Path] = ()) -> Iterator[Section]:
    """What a framework cannot be told, what its files cost, and the files or where they are."""
    yield f"{found.framework}, checked against {found.version}"
    for title, sentences in (("not expressed", found.not_expressed), ("elsewhere", found.elsewhere)):
        if sentences:
            yield Text(title, [f"{title}:", *(f"  {sentence}" for sentence in sentences)])
    yield from as_written_text(found)
    yield from (f"wrote {path}" for path in written)
    for file in () if written else found.files:
        yield Text(file.path, [f"\n--- {file.path}", file.text.rstrip()], verbatim=True)

"""What a dry run of a user's script found, as text: the peak and what held it, collectives, and guesses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwise.core.units import with_prefix
from meshwise.report.answer import Section
from meshwise.report.table import Fields, Table, records_table

if TYPE_CHECKING:
    from meshwise.core.compare import Comparison
    from meshwise.runtime.script.start import ScriptOutcome

_ROWS = 12


def parts(outcome: ScriptOutcome) -> Iterator[Section]:
    """The peak with the op that made it, then tables."""
    place = " ".join(filter(None, (outcome.peak_row.get(name, "") for name in ("phase", "module", "op"))))
    peak = with_prefix(outcome.peak_bytes, "B")
    rank = f"rank {outcome.rank} of {outcome.ranks} on {outcome.device}"
    yield f"{rank}: peak memory {peak}, reached in {place}"
    alive = list(outcome.alive_at_peak.items())
    rest = sum(size for _, size in alive[_ROWS:])
    rows = [(what, with_prefix(size, "B")) for what, size in alive[:_ROWS]]
    rows += [(f"{len(alive) - _ROWS} more", with_prefix(rest, "B"))] if rest else []
    machine_bytes = outcome.peak_bytes - sum(outcome.alive_at_peak.values())
    rows.append(("allocator and workspace", with_prefix(machine_bytes, "B")))
    yield Table("Alive at the peak", ("what", "bytes"), rows)
    step = f"step {outcome.num_steps}" if outcome.num_steps else "the whole program"
    flop = with_prefix(outcome.step_ledger.total("flop"), "FLOP")
    if exchanged := outcome.collectives():
        columns: Fields = {
            **{"axis": "axis", "ranks": "group_size", "collective": "collective", "count": "count"},
            "payload": "payload_bytes",
        }
        left = ("axis", "collective", "payload")
        yield records_table(f"Collectives of {step}", exchanged, columns, left=left, no_wrap=False)
    yield f"matmuls and attention of {step}: {flop}"
    if outcome.guesses:
        asked: Fields = {"where": "place", "asked for": "what", "got": "assumed", "times": "count"}
        title, left = "What a fake rank cannot know", ("where", "asked for", "got")
        yield records_table(title, outcome.guesses, asked, left=left, no_wrap=False)


def difference_parts(comparison: Comparison) -> Iterator[Section]:
    """All totals of a step, and by how much a script's differ from the closed form's."""
    rows = []
    for row in comparison.rows:
        stated, found = row.values["estimate"] or 0.0, row.values["script"] or 0.0
        ratio = "" if row.agrees else f"x {found / stated:.4g}" if stated else "not stated"
        rows.append((row.module, row.op, row.phase, row.column, f"{stated:,.10g}", f"{found:,.10g}", ratio))
    columns = ("module", "op", "phase", "column", "estimate", "script", "differs")
    yield Table("A step of one rank", columns, rows, left=columns[:4])
    yield f"{len(comparison.differences())} of {len(rows)} numbers differ"

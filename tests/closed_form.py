"""What a program's closed form states, held against its dry run; shared by the tests of several programs."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from meshwise.runtime.dry_run import dry_run, new_tape
from meshwise.runtime.programs import find_program

COLUMNS = ("flop", "read_bytes", "write_bytes", "weight_bytes", "payload_bytes", "sent_bytes", "group_size")


def table(rows: Iterable[dict[str, Any]]) -> Counter[Any]:
    """How often each kind of op occurs, with everything that its row says but times and live bytes."""
    counts: Counter[Any] = Counter()
    for row in rows:
        names = (row["module"], row["op"], row["shape"], row["dtype"], row["axis"])
        counts[(*names, *(row[column] or 0 for column in COLUMNS))] += row["count"]
    return counts


def check_estimate_is_the_dry_run(program: str, options: Any, ranks: int) -> None:
    """Every row that the closed form states, every FLOP and collective, and the peak, to the last byte."""
    for rank in {0, ranks - 1}:
        tape = new_tape("estimate", ranks, rank, "cpu")
        find_program(program).estimate(options, tape)
        outcome = dry_run(program, options, ranks=ranks, rank=rank, device="cpu")
        stated, seen = table(tape.ledger().rows()), table(outcome.ledger.rows())
        assert stated == Counter({key: seen[key] for key in stated})
        assert tape.ledger().total("flop") == outcome.ledger.total("flop")
        in_passes = [row for row in outcome.ledger.rows() if row["collective"] and row["module"]]
        assert table(in_passes) == Counter({key: n for key, n in stated.items() if key[4]})
        assert tape.peak_bytes == outcome.peak_bytes

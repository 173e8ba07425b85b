"""One collective by size as a table."""

from collections.abc import Iterator

from meshwise.core.units import with_prefix
from meshwise.estimate.collective import CollectiveTimes
from meshwise.report.answer import Section, Text
from meshwise.report.table import TABLES, records_table


def parts(found: CollectiveTimes) -> Iterator[Section]:
    """A row a size, and the measured times where there are any."""
    times, measured_s = found
    yield records_table("", times, TABLES["sizes"], measured_s=measured_s, binary=_binary)
    if measured_s:
        yield f"measured of groups of {found.ranks:,} ranks"
    ceiling = with_prefix(times[0].ceiling_bytes_per_s, "B/s")
    yield f"ceiling of the bus bandwidth: {ceiling} (a ring or direct copies at the links' full rate)"
    yield Text("Notes", found.notes, "note: ")


def _binary(size: float) -> str:
    """`1048576` as `1 MiB`; a size that is no whole number of them in SI units."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power and (size / 1024**power).is_integer():
            return f"{size / 1024**power:g} {unit}"
    return with_prefix(size, "B")

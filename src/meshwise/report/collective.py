"""One collective by size as a table."""

from collections.abc import Iterator

from meshwise.core.units import duration, with_prefix
from meshwise.estimate.collective import CollectiveTime, CollectiveTimes
from meshwise.report.answer import Section, Text
from meshwise.report.table import Fields, percent, records_table


def parts(found: CollectiveTimes) -> Iterator[Section]:
    """A row a size, and the measured times where there are any."""
    times, measured_s = found

    def error(one: CollectiveTime) -> str:
        seconds = measured_s.get(one.payload_bytes)
        return percent(one.time_s / seconds - 1, sign=True) if seconds else ""

    columns: Fields = {
        "size": lambda one: _binary(one.payload_bytes),
        **{"time": "time_s", "algorithm": "algorithm", "bus bandwidth": "bus_bytes_per_s"},
        "of ceiling": lambda one: percent(one.bus_bytes_per_s / one.ceiling_bytes_per_s),
        "measured": lambda one: duration(measured_s.get(one.payload_bytes)),
        "error": error,
    }
    yield records_table("", times, columns, left=("algorithm",), no_wrap=False)
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

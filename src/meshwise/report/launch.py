"""What starts a plan under a framework, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwise.core.units import duration
from meshwise.launch.write import Launch
from meshwise.report.answer import Section, Text


def parts(found: Launch, written: Sequence[Path] = ()) -> Iterator[Section]:
    """What a framework cannot be told, what its files cost, and the files or where they are."""
    yield f"{found.framework}, checked against {found.version}"
    for title, sentences in (("not expressed", found.not_expressed), ("elsewhere", found.elsewhere)):
        if sentences:
            yield Text(title, [f"{title}:", *(f"  {sentence}" for sentence in sentences)])
    if (priced := found.as_written) is not None:
        line = f"as written: {duration(priced.step_s)}, {priced.memory_bytes / 1e9:.1f} GB"
        line += "" if priced.fits else ", does not fit"
        yield line + ("" if priced.is_asked else ", not what was asked")
    yield from (f"wrote {path}" for path in written)
    for file in () if written else found.files:
        yield Text(file.path, [f"\n--- {file.path}", file.text.rstrip()], verbatim=True)

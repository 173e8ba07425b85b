"""What is alive in a program follows from its ops: against brute force, on a tape, and in a grid."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwise.program.lifetime import Script, peak_bytes, play
from meshwise.program.op import Op
from meshwise.program.tape import Tape
from meshwise.program.tensor import Tensor

SIZES = st.lists(st.integers(0, 100), min_size=1, max_size=12)


@st.composite
def programs(draw: st.DrawFn) -> list[Op]:
    """Kernels that each read some tensors made before; some read views."""
    script = Script(module="m", dtype="fp32")
    made: list[Tensor] = []
    for i, size in enumerate(draw(SIZES)):
        reads = draw(st.lists(st.sampled_from(made), max_size=3, unique=True)) if made else []
        reads = [each.view("view", 1) if draw(st.booleans()) else each for each in reads]
        made.append(script.kernel(f"op {i}", (size,), reads))
    return script.events


def alive_at(events: list[Op], place: int) -> float:
    """Bytes of all tensors that are made up to this event and read at it or later, or made at it."""
    total = 0.0
    for i, event in enumerate(events[: place + 1]):
        for tensor in event.makes:
            is_read = any(each.memory is tensor for later in events[place:] for each in later.reads)
            total += float(tensor.bytes) if i == place or is_read else 0.0
    return total


@given(programs())
def test_alive_is_made_before_and_read_later(events: list[Op]) -> None:
    tape = Tape("estimate")
    play(events, tape)
    expected = [alive_at(events, i) for i in range(len(events))]
    assert [row["live_bytes"] for row in tape._rows] == expected
    assert tape.peak_bytes == peak_bytes(events) == max(expected)

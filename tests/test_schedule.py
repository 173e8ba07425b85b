"""Pipeline schedules in closed form: what the papers print, and what must hold for every size."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from data_tables import table
from docs_scripts import docs_script
from meshwise.cost.schedule import SCHEDULES, bubble_s, in_flight_microbatches

PRINTED = table("tables")["schedule"]
times = st.floats(0.1, 10.0)
fields = {name: index for index, name in enumerate(SCHEDULES)}
published_bubble_s = docs_script("figures/pipeline").published_bubble_s


def bubble(name: str, pp: int, m: int, v: int = 1, f: float = 1.0, b: float = 1.0, w: float = 1.0) -> float:
    return float(bubble_s(fields[name], pp, m, v, f, b, w))


@pytest.mark.parametrize(("name", "pp", "m", "v", "idle", "work", "source"), PRINTED["bubbles"])
def test_published_bubble(name: str, pp: int, m: int, v: int, idle: float, work: float, source: str) -> None:
    assert bubble(name, pp, m, v) / (3 * m) == pytest.approx(idle / work, rel=1e-15)


@pytest.mark.parametrize(("name", "pp", "m", "v", "peaks", "source"), PRINTED["in_flight"])
def test_published_in_flight(name: str, pp: int, m: int, v: int, peaks: list[float], source: str) -> None:
    assert in_flight_microbatches(fields[name], pp, m, v, np.arange(pp)).tolist() == peaks


@given(pp=st.integers(2, 64), k=st.integers(2, 8), f=times)
def test_published_form_is_exact_where_its_assumption_holds(pp: int, k: int, f: float) -> None:
    """F = B = W. ZB-V apart: its zero does not count the wait of the last rank for its first input."""
    pp += pp % 2
    for name in SCHEDULES:
        v = {"interleaved": k, "zb-v": 2, "dualpipe-v": 2}.get(name, 1)
        start_s = (pp - 1) * f / 2 if name == "zb-v" else 0.0
        assert bubble(name, pp, k * pp, v, f, f, f) == pytest.approx(
            published_bubble_s(name, pp, v, f) + start_s, rel=1e-12
        )

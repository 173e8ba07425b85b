"""Pipeline schedules in closed form: what the papers print, and what must hold for every size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from figures import figures_script
from meshwise.cost.schedule import (
    SCHEDULES,
    bubble_s,
    in_flight_microbatches,
)

times = st.floats(0.1, 10.0)
fields = {name: index for index, name in enumerate(SCHEDULES)}
published_bubble_s = figures_script("pipeline").published_bubble_s


def bubble(name: str, pp: int, m: int, v: int = 1, f: float = 1.0, b: float = 1.0, w: float = 1.0) -> float:
    return float(bubble_s(fields[name], pp, m, v, f, b, w))


# Bubble over work, (time of the phase / m (F + B + W)) - 1, as printed, for F, B, W = 1, 1, 1.
FRACTIONS = [
    pytest.param("gpipe", 8, 32, 1, 7 / 32, id="arXiv 2104.04473 sec. 2.2.1: (p-1)/m"),
    pytest.param("1f1b", 8, 32, 1, 7 / 32, id="arXiv 2104.04473 sec. 2.2.1: (p-1)/m, same as GPipe"),
    pytest.param("interleaved", 8, 32, 2, 7 / 64, id="arXiv 2104.04473 sec. 2.2.2: (p-1)/(v m), v=2"),
    pytest.param("interleaved", 4, 8, 4, 3 / 32, id="arXiv 2104.04473 sec. 2.2.2: (p-1)/(v m), v=4"),
    pytest.param("zb-h1", 8, 32, 1, 7 / 96, id="arXiv 2401.10241 sec. 2.1: a third of 1F1B"),
    pytest.param("dualpipe", 8, 20, 1, 3 * (3 + 2 - 3) / 60, id="DualPipe README: (PP/2-1)(F&B+B-3W)"),
]


@pytest.mark.parametrize(("name", "pp", "m", "v", "frac"), FRACTIONS)
def test_published_bubble_fraction(name: str, pp: int, m: int, v: int, frac: float) -> None:
    assert bubble(name, pp, m, v) / (3 * m) == pytest.approx(frac, rel=1e-15)


PEAKS = [
    pytest.param("gpipe", 4, 16, 1, [16, 16, 16, 16], id="arXiv 2104.04473 sec. 2.2.1: GPipe keeps m"),
    pytest.param("1f1b", 4, 16, 1, [4, 3, 2, 1], id="arXiv 2104.04473 sec. 2.2.1: 1F1B keeps p at most"),
    pytest.param("1f1b", 4, 2, 1, [2, 2, 2, 1], id="arXiv 2104.04473 sec. 2.2.1: never more than m"),
    pytest.param("interleaved", 4, 8, 2, [5.5, 4.5, 3.5, 2.5], id="arXiv 2205.05198 sec. 4.2.3"),
    pytest.param("zb-h1", 4, 16, 1, [4, 4, 4, 4], id="arXiv 2401.10241 sec. 2.1: all as the first of 1F1B"),
    pytest.param("zb-v", 4, 16, 2, [4, 4, 4, 4], id="arXiv 2401.10241 sec. 6: as 1F1B, balanced"),
    pytest.param("dualpipe", 4, 16, 1, [5, 5, 5, 5], id="DualPipe README: PP+1"),
]


@pytest.mark.parametrize(("name", "pp", "m", "v", "peaks"), PEAKS)
def test_published_activations_in_flight(name: str, pp: int, m: int, v: int, peaks: list[float]) -> None:
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

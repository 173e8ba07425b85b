"""The programs compute what one process computes: outputs and every gradient, in float64."""

from typing import Any

import pytest

pytest.importorskip("torch")

from meshwise.runtime.programs import find_program, make_options
from ranks import Ranks, differences

pytestmark = pytest.mark.slow
NUM_RANKS = 4

ULYSSES = {"seq": 48, "hidden": 24, "heads": 4, "backward": True}
MODEL_2D = {"seq": 32, "hidden": 16, "ffn_hidden": 24, "layers": 3, "backward": True}


def differences_of(pool: Ranks, name: str, **values: Any) -> dict[str, float]:
    program = find_program(name)
    options = make_options(program, {"dtype": "fp64"} | values)
    program.check(options, 4)
    found: dict[str, float] = pool.call(differences, name, options)[0]
    return found


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("attention", ["scores", "flash"])
def test_ulysses_equals_one_process(attention: str, causal: bool, pool: Ranks) -> None:
    found = differences_of(pool, "ulysses", **ULYSSES, attention=attention, causal=causal)
    assert set(found) == {"output", "d input", "d Q", "d K", "d V", "d O"}
    assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("after_ulysses", [False, True])
def test_model_2d_equals_one_process(tp: int, after_ulysses: bool, pool: Ranks) -> None:
    found = differences_of(pool, "model-2d", **MODEL_2D, tp=tp, after_ulysses=after_ulysses)
    assert set(found) == {"output", "d input", "d W1", "d W2"}
    assert max(found.values()) < 1e-12, found


def test_a_wrong_result_would_be_seen(pool: Ranks) -> None:
    """In bf16 the same check reports differences far above the tolerance."""
    found = differences_of(pool, "ulysses", **ULYSSES, dtype="bf16")
    assert min(found.values()) > 1e-4

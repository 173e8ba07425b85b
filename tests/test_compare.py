"""Estimate, dry run and run agree to the last digit."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from meshwise.core.compare import TIME, compare
from meshwise.core.ledger import Ledger
from meshwise.machine.hardware import find_cluster

pytest.importorskip("torch")

from meshwise.runtime.dry_run import dry_run, new_tape
from meshwise.runtime.programs import find_program, make_options
from meshwise.runtime.start import run_rank
from ranks import Ranks, compared

pytestmark = pytest.mark.slow

DTYPES = ("bf16", "fp16", "fp32", "fp64")


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], Ranks]]:
    """Pools of ranks, each started when first asked for."""
    running: dict[int, Ranks] = {}
    yield lambda ranks: running.setdefault(ranks, Ranks(ranks)) if ranks not in running else running[ranks]
    for pool in running.values():
        pool.close()


World = tuple[str, int, int, dict[str, Any]]
"""A program, how many ranks it has and which is looked at, and its options."""


@st.composite
def ulysses_worlds(draw: st.DrawFn, worlds: tuple[int, ...]) -> World:
    """A ulysses that passes its check; degenerate sizes among them."""
    ranks = draw(st.sampled_from(worlds))
    rank = draw(st.integers(0, ranks - 1))
    heads = ranks * draw(st.integers(1, 3))
    return "ulysses", ranks, rank, {
        "seq": ranks * draw(st.integers(1, 9)),
        "hidden": heads * draw(st.integers(2, 8)),
        "heads": heads,
        "attention": draw(st.sampled_from(["flash", "scores"])),
        "causal": draw(st.booleans()),
        "backward": draw(st.booleans()),
        "dtype": draw(st.sampled_from(DTYPES)),
    }  # fmt: skip


@st.composite
def model_2d_worlds(draw: st.DrawFn, worlds: tuple[int, ...]) -> World:
    """A model-2d that passes its check."""
    ranks = draw(st.sampled_from(worlds))
    tp = draw(st.sampled_from([t for t in (1, 2, 4) if ranks % t == 0]))
    return "model-2d", ranks, draw(st.integers(0, ranks - 1)), {
        "seq": ranks * draw(st.integers(1, 9)),
        "hidden": ranks * draw(st.integers(2, 4)),
        "ffn_hidden": tp * draw(st.integers(1, 8)),
        "layers": draw(st.integers(1, 3)),
        "tp": tp,
        "after_ulysses": draw(st.booleans()),
        "backward": draw(st.booleans()),
        "dtype": draw(st.sampled_from(DTYPES)),
    }  # fmt: skip


def programs(worlds: tuple[int, ...]) -> st.SearchStrategy[World]:
    """Both, in worlds of these numbers of ranks."""
    return ulysses_worlds(worlds) | model_2d_worlds(worlds)


def assert_estimate_is_dry_run(name: str, ranks: int, rank: int, values: dict[str, Any], device: str) -> None:
    """Every row, and the bytes that the device's allocator books."""
    program = find_program(name)
    options = make_options(program, values)
    outcome = dry_run(name, options, ranks=ranks, rank=rank, device=device)
    tape = new_tape("estimate", ranks, rank, device)
    program.estimate(options, tape)
    found = compare({"estimate": tape.ledger(), "dry_run": outcome.ledger})
    assert found.agree, found.differences()[:3]
    assert tape.peak_booked_bytes == outcome.peak_bytes


@given(world=programs((1, 2, 4, 6, 64)), device=st.sampled_from(["cpu", "h100-80g-sxm", "a100"]))
@settings(max_examples=40)
def test_estimate_is_dry_run(world: World, device: str) -> None:
    assert_estimate_is_dry_run(*world, device)


@pytest.mark.parametrize("backward", [False, True])
def test_log_sizes_estimate_is_dry_run(backward: bool) -> None:
    values = {"seq": 60000, "hidden": 16384, "heads": 128, "backward": backward}
    assert_estimate_is_dry_run("ulysses", 16, 7, values, "h100-80g-sxm")


@given(world=programs((2, 4)))
@settings(max_examples=16, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_run_agrees(world: World, pools: Callable[[int], Ranks]) -> None:
    name, ranks, rank, values = world
    program = find_program(name)
    found = compared(pools(ranks), program, make_options(program, values), ranks=ranks, rank=rank)
    assert found.rows and set(found.rows[0].values) == {"estimate", "dry_run", "run"}
    assert found.agree, found.differences()[:3]


def test_lifetimes_do_not_depend_on_gloos_threads(pools: Callable[[int], Ranks]) -> None:
    """What is alive at each op is the same on every rank of every run, with the machine busy or not."""
    values = {"seq": 64, "hidden": 64, "heads": 8, "backward": True, "dtype": "fp32"}
    options = make_options(find_program("ulysses"), values)
    expected = dry_run("ulysses", options, ranks=4, device="cpu").ledger
    for _ in range(3):
        for outcome in pools(4).call(run_rank, "ulysses", options, 0, True):
            assert not compare({"dry_run": expected, "run": outcome.ledger}).differences()


# --- the join alone -----------------------------------------------------------------------------


def rows(**changed: Any) -> list[dict[str, Any]]:
    row = {"module": "m", "op": "q", "phase": "forward", "shape": (2, 3), "flop": 12.0, "write_bytes": 6.0}
    return [row | changed, row | {"op": "k"}]


def test_a_changed_number_is_found() -> None:
    found = compare({"estimate": Ledger.from_rows(rows()), "run": Ledger.from_rows(rows(flop=13.0))})
    (row,) = found.differences()
    assert (row.op, row.column, row.values) == ("q", "flop", {"estimate": 12.0, "run": 13.0})
    assert not found.agree


def test_a_missing_row_is_found() -> None:
    found = compare({"estimate": Ledger.from_rows(rows()), "run": Ledger.from_rows(rows()[1:])})
    assert {row.op for row in found.differences()} == {"q"}
    assert all(row.values["run"] is None for row in found.differences())


def test_command_says_no_with_exit_code_1(meshwise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["compare", "ulysses", "--ranks", "4", "--no-run", "--seq", "16", "--hidden", "8", "--heads", "4"]
    agreed = meshwise(*words, "--json")
    assert agreed.code == 0 and agreed.document["agree"] is True
    assert {"module", "op", "phase", "column", "estimate", "dry_run"} <= set(agreed.document["rows"][0])
    monkeypatch.setattr("meshwise.runtime.programs.ulysses.attended_pairs", lambda *sizes, causal: 1.0)
    monkeypatch.setattr("meshwise.program.lifetime.matmul_flop", lambda *sizes, batch: 1.0)
    differed = meshwise(*words, "--json")
    assert differed.code == 1 and differed.document["agree"] is False


def test_seconds_stand_beside_each_other_and_are_no_difference(pools: Callable[[int], Ranks]) -> None:
    """As the cluster would take, not less than by its data sheet; as the run took."""
    program, cluster = find_program("model-2d"), find_cluster("h100-80g-sxm:2")
    options = make_options(program, {"seq": 128, "hidden": 64, "ffn_hidden": 64, "layers": 1, "tp": 2})
    found = compared(pools(2), program, options, ranks=2, cluster=cluster)
    bare = compared(pools(2), program, options, ranks=2)
    times = [row for row in found.rows if row.column == TIME]
    assert found.agree and [row for row in found.rows if row not in times] == list(bare.rows)
    assert {row.op for row in times} >= {row.op for row in bare.rows if row.column == "flop"}
    for row in times:
        assert row.values["estimate"] == row.values["dry_run"] and row.values["run"] > 0
    product = next(row for row in times if row.shape == "1x128x64x32")
    moved_bytes = 2 * (128 * 32 + 32 * 64 + 128 * 64)
    roofline_s = moved_bytes / cluster.chip.memory_bytes_per_s
    assert roofline_s < product.values["estimate"] < roofline_s + 5e-6  # its launch

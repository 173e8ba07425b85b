"""The time of ops: the bare roofline, arrays against loops, and what a real machine adds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.estimate.timing import Machine, machine, op_times
from meshwise.hardware import find_cluster, rates, stack_rates
from meshwise.layout.block import block
from meshwise.layout.cut import Cut
from meshwise.model import find_model

CHIPS = ("a100-80g-sxm:64", "h100-80g-sxm:64", "b200-sxm:64", "mi300x:64")
GPT3 = find_model("gpt3-175b")


def ideal(cluster: str) -> Machine:
    return machine(find_cluster(cluster), "bf16", ideal=True)


def test_an_ideal_op_takes_its_roofline() -> None:
    on = ideal("a100-80g-sxm:8")
    ops = block(GPT3, Cut(microbatch=1.0, seq=2048.0, tp=8.0, sequence_parallel=True, flash=False))
    for op, time in zip(ops, op_times(ops, on), strict=True):
        if op.kind == "collective":
            continue
        peak = on.base.matrix_flop_per_s if op.kind == "matmul" else on.base.vector_flop_per_s
        moved = op.cost.read_bytes + op.cost.write_bytes
        assert time.compute_s == pytest.approx(op.cost.flop / peak)
        assert time.memory_s == pytest.approx(moved / on.base.memory_bytes_per_s)
        assert time.busy_s == pytest.approx(max(time.compute_s, time.memory_s))


def test_an_ideal_all_gather_takes_its_ring() -> None:
    on = ideal("a100-80g-sxm:8")
    seconds = on.collective_s("all_gather", 50e6, 8.0, 1.0)
    assert seconds == pytest.approx(50e6 * 7 / 8 / 300e9, rel=0.05)


@given(
    micro=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    seq=st.sampled_from([512, 2048, 8192]),
    tp=st.sampled_from([1, 4, 8, 16]),
)
def test_chips_are_an_axis(micro: list[int], seq: int, tp: int) -> None:
    """One call over an axis of chips equals a call per chip."""
    each = [rates(find_cluster(name), "bf16") for name in CHIPS]
    stacked = stack_rates(each)
    many = Machine(base=stacked, by_dtype={"bf16": stacked})
    cut = Cut(
        microbatch=np.array(micro, float)[:, None], seq=float(seq), tp=float(tp), sequence_parallel=True
    )
    whole = op_times(block(GPT3, cut), many)
    for c, base in enumerate(each):
        for i, size in enumerate(micro):
            one = op_times(
                block(GPT3, replace(cut, microbatch=float(size))), Machine(base=base, by_dtype={"bf16": base})
            )
            for grid, scalar in zip(whole, one, strict=True):
                for name in ("compute_s", "memory_s", "busy_s", "comm_s"):
                    cells = np.broadcast_to(getattr(grid, name), (len(micro), len(CHIPS)))
                    assert cells[i, c] == pytest.approx(getattr(scalar, name), rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("chip", ["a100-80g-sxm:64", "h100-80g-sxm:64", "h200-sxm:64", "b200-sxm:64"])
def test_a_real_machine_never_beats_its_data_sheet(chip: str) -> None:
    ops = block(GPT3, Cut(microbatch=1.0, seq=2048.0, tp=8.0, sequence_parallel=True))
    real = op_times(ops, machine(find_cluster(chip), "bf16"))
    for op, ours, best in zip(ops, real, op_times(ops, ideal(chip)), strict=True):
        assert ours.busy_s >= best.compute_s, op.name
        assert ours.comm_s >= 0.95 * best.comm_s, op.name

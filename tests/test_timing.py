"""The time of ops: the bare roofline, arrays against loops, and what a real machine adds."""

from dataclasses import replace

import pytest

from meshwise.estimate.priced_part import Wait, price_parts
from meshwise.estimate.timing import Machine, machine, op_times
from meshwise.machine.hardware import find_cluster
from meshwise.machine.overheads import FULL_WATTS, NONE, Overheads
from meshwise.model.find import find_model
from meshwise.program.block import block
from meshwise.program.cut import Cut
from meshwise.program.vocabulary import head

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
        roofline_s = on.roofline_s(op)
        assert roofline_s == pytest.approx((op.cost.flop / peak, moved / on.base.memory_bytes_per_s))
        assert time == pytest.approx(max(roofline_s))


@pytest.mark.parametrize("chip", ["a100-80g-sxm:64", "h100-80g-sxm:64", "h200-sxm:64", "b200-sxm:64"])
def test_a_real_machine_never_beats_its_data_sheet(chip: str) -> None:
    ops = block(GPT3, Cut(microbatch=1.0, seq=2048.0, tp=8.0, sequence_parallel=True))
    real = op_times(ops, machine(find_cluster(chip), "bf16"))
    for op, ours, best in zip(ops, real, op_times(ops, ideal(chip)), strict=True):
        assert ours >= 0.95 * best if op.kind == "collective" else ours >= ideal(chip).roofline_s(op)[0], (
            op.name
        )


@pytest.mark.parametrize("vocab, halvings", [(50304, 0), (50260, 1), (50258, 2), (50257, 3)])
def test_a_vocabulary_off_16_bytes_takes_its_halvings_longer(vocab: int, halvings: int) -> None:
    on = machine(find_cluster("a100-80g-sxm:8"), "fp16", overheads=NONE)
    pays = replace(on, overheads=Overheads(unaligned_frac=0.5))
    ops = [
        op for op in head(replace(GPT3, vocab=vocab), Cut(microbatch=1.0, seq=2048.0)) if op.kind == "matmul"
    ]
    assert len(ops) == 3
    for fast, slow in zip(op_times(ops, on), op_times(ops, pays), strict=True):
        assert slow == pytest.approx(fast * (1.0 + 0.5 * halvings))


def test_launches_that_block_add_up_with_the_kernels() -> None:
    on = machine(find_cluster("a100-80g-sxm:8"), "bf16", overheads=NONE)
    ops = block(GPT3, Cut(microbatch=1.0, seq=2048.0))

    def host_s(blocks: bool) -> float:
        pays = replace(on, overheads=Overheads(host_s=1e-5, launches_block=blocks))
        rows = price_parts({"layer": ops}, pays)["layer"].rows
        return sum(row.spent_s for row in rows if isinstance(row, Wait) and row.phase == "forward")

    launches = sum(op.phase == "forward" and op.kind != "collective" for op in ops)
    assert host_s(False) == 0.0  # the kernels of GPT-3 are longer than their launches
    assert host_s(True) == pytest.approx(1e-5 * launches)


def test_the_clock_follows_the_cube_root_of_the_power() -> None:
    pays = Overheads(joule_per_flop={"bf16": 1e-12}, full_watts=FULL_WATTS["hopper"])
    assert pays.sustained_flop_per_s("bf16", 700.0) == pytest.approx(700e12)
    assert pays.sustained_flop_per_s("bf16", 87.5) == pytest.approx(350e12)
    assert pays.sustained_flop_per_s("bf16", 0.0) == float("inf")

"""Tensor layouts in closed form: asymptotics, who holds which block, and plans that use them."""

from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from data_tables import table
from docs_scripts import docs_script
from meshwise.core.units import Num
from meshwise.cost.collective import sent_bytes
from meshwise.estimate.one_plan import estimate
from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.plan.layouts import default_grid
from meshwise.plan.plan import parse_plan
from meshwise.plan.workload import Workload
from meshwise.program.block import block
from meshwise.program.cut import Cut
from meshwise.program.walk import with_saved_bytes

FIGURES = docs_script("figures/tensor")
Block = tuple[tuple[Fraction, Fraction], tuple[Fraction, Fraction]]
GPT3 = find_model("gpt3-175b")
# No limit of heads: so many that any grid divides them.
WIDE = replace(GPT3, num_heads=2**30, num_kv_heads=2**30, head_dim=1)


def cut(layout: str, grid: tuple[Num, ...], **options: Any) -> Cut:
    tp = np.prod(np.broadcast_arrays(*grid), axis=0) if grid else 1.0
    return Cut(microbatch=1.0, seq=2048.0, tp=tp, layout=layout, grid=grid, sequence_parallel=True, **options)


# --- asymptotics -------------------------------------------------------------------------------

SIDE = 2.0 ** np.arange(6, 13)


@pytest.mark.parametrize(
    ("layout", "grid", "exponent"),
    [
        pytest.param("2d", (SIDE,) * 2, -1 / 2, id="SUMMA, van de Geijn and Watts 1997"),
        pytest.param("3d", (SIDE,) * 3, -2 / 3, id="3D, Agarwal et al. 1995"),
    ],
)
def test_volume_per_rank_falls_as_published(layout: str, grid: tuple[Num, ...], exponent: float) -> None:
    num_ranks = np.prod(grid, axis=0)
    sent = [op for op in block(WIDE, cut(layout, grid)) if op.collective]
    volume = sum(sent_bytes(op.collective, op.payload_bytes, op.group_size) * op.count for op in sent)
    slopes = np.diff(np.log(volume)) / np.diff(np.log(num_ranks))
    assert slopes[0] == pytest.approx(exponent, abs=0.02)  # (q - 1) / q of a gather, at 64 ranks
    assert slopes[-1] == pytest.approx(exponent, abs=0.001)


# --- who holds which block ---------------------------------------------------------------------

GRIDS = {"1d": (4,), "2d": (4, 2), "2d-cp": (2, 4), "2.5d": (2, 2, 4), "3d": (2, 2, 2)}


@pytest.mark.parametrize("layout", GRIDS)
def test_blocks_cover_each_matrix_and_are_those_of_the_closed_form(layout: str) -> None:
    """Blocks are equal or apart; their shares are the weights and kept activations that a layout states."""
    grid = GRIDS[layout]
    num = int(np.prod(grid))
    held = [FIGURES.held_blocks(layout, grid, rank) for rank in range(num)]
    on = cut(layout, () if layout == "1d" else tuple(map(float, grid)))
    ops = {
        op.name: op
        for op in with_saved_bytes(block(GPT3, replace(on, tp=float(num), flash=False)))
        if op.phase == "forward" and op.kind == "matmul" and op.saved_bytes
    }
    for name, op, whole in (
        ("x", ops["fc1"], 2.0 * on.seq * GPT3.hidden),
        ("inside", ops["fc2"], 2.0 * on.seq * GPT3.ffn_hidden),
    ):
        assert op.saved_bytes == float(_area(held[0][name])) * whole
    for name, op in (("W first", ops["fc1"]), ("W second", ops["fc2"])):
        matrix = float(_area(held[0][name])) * GPT3.hidden * GPT3.ffn_hidden
        assert matrix < op.num_params < matrix * 1.001  # and a bias
    for name in FIGURES.MATRICES:
        different = {blocks[name] for blocks in held}
        assert sum(map(_area, different)) == 1
        assert len({_area(one) for one in different}) == 1
        for (rows, columns), (other_rows, other_columns) in combinations(different, 2):
            assert not (_overlap(rows, other_rows) and _overlap(columns, other_columns))


def _area(of: Block) -> Fraction:
    return (of[0][1] - of[0][0]) * (of[1][1] - of[1][0])


def _overlap(one: tuple[Fraction, Fraction], other: tuple[Fraction, Fraction]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


# --- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["2d:4x2", "2d-cp:2x4", "2.5d:2x2x2", "3d:2x2x2"])
def test_a_plan_reaches_the_block(layout: str) -> None:
    """The estimate of a plan holds the ops of its layout, with all of the model's matrix work."""
    cluster, job = find_cluster("h100-80g-sxm:64"), Workload(batch=16, seq=2048)
    found = estimate(GPT3, cluster, parse_plan(f"pp=8,layout={layout}"), job)
    plain = estimate(GPT3, cluster, parse_plan("pp=8,tp=8"), job)
    assert found.flop_per_step == plain.flop_per_step
    assert found.time_s["comm_tp"] > 0
    if not layout.startswith("2d-cp"):
        assert any(axis.startswith("tp_") for axis in found.ledger["axis"])
    blocks, expected = (each.ledger.where(phase=("forward", "backward")) for each in (found, plain))
    assert blocks.total("flop") == pytest.approx(expected.total("flop"), 0.05)


@pytest.mark.parametrize(("layout", "ranks", "grid"), table("tables")["default_grids"])
def test_the_default_grid_is_the_squarest(layout: str, ranks: int, grid: list[int]) -> None:
    assert default_grid(layout, ranks) == tuple(grid)

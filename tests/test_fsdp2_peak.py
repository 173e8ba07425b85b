"""The peak that `estimate` states under implementation=fsdp2 is that of the dry run of `train`."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import meshwise as mw
from data_tables import table
from meshwise.cost.schedule import SCHEDULES, valid
from meshwise.model.architecture import layer_kinds
from meshwise.model.find import find_model
from meshwise.program.block import block
from meshwise.program.cut import Cut
from meshwise.program.order import Moments, all_moments, moments
from meshwise.runtime.programs.train import Options, the_plan

pytestmark = pytest.mark.slow
LESS_IN_TORCH_2026 = (
    "pp=4,zero=1,schedule=gpipe",
    "pp=2,zero=3,schedule=interleaved,vpp=2,recompute=selective",
)
"""From PyTorch 2.15 on a gradient is added to those of microbatches before as it comes, not with its unit."""
PEAKS = table("train_plans")["peaks"]


@pytest.mark.parametrize("words", PEAKS)
def test_the_peak_is_the_dry_runs(words: str, request: pytest.FixtureRequest) -> None:
    """Overhead apart, -2 to +6 % of two steps of some layers of a real model."""
    if the_plan(Options()).software == "torch-2026" and any(one in words for one in LESS_IN_TORCH_2026):
        request.applymarker(pytest.mark.xfail(strict=True, reason="7 to 8 % less is held than is stated"))
    model, *numbers, plan = words.split()
    ranks, rank, layers, seq, microbatch, batch = map(int, numbers)
    sizes = {"layers": layers, "seq": seq, "microbatch": microbatch, "batch": batch}
    peak_bytes = mw.dry_run("train", ranks=ranks, rank=rank, model=model, plan=plan, **sizes).peak_bytes
    cut = replace(mw.find_model(model), num_layers=layers, dropout_frac=0.0)
    del sizes["layers"]
    estimate = mw.estimate(cut, f"b200-sxm:{ranks}", f"{plan},implementation=fsdp2", **sizes)
    memory = estimate.rank_step(rank).stages[-1].memory
    assert -0.02 < (memory.total - memory.overhead) / peak_bytes - 1.0 < 0.06


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_moments_of_many_microbatches_are_those_of_a_few(schedule: str) -> None:
    index, num_told = SCHEDULES.index(schedule), 0
    for pp, vpp, num_microbatches in itertools.product((2, 3, 4), (1, 2, 5), range(1, 33, 3)):
        if not valid(index, pp, num_microbatches, vpp):
            continue
        for rank in range(pp):
            job = index, pp, vpp, num_microbatches, rank
            num_told += moments(*job) is not (told := all_moments(*job))
            for name in Moments.__slots__:
                assert np.array_equal(getattr(moments(*job), name), getattr(told, name)), (job, name)
    assert num_told > 5 or schedule == "gpipe"


@pytest.mark.parametrize("name", ["glm-5.2", "nemotron-3-nano", "deepseek-v4-flash"])
def test_matmuls_of_activations_alone_are_those_of_the_layout(name: str) -> None:
    """Scores of an indexer and chunks of a recurrence: PyTorch computes as many FLOP as Megatron-LM."""
    flop = {}
    for implementation in ("megatron", "fsdp2"):
        cut = Cut(microbatch=1.0, seq=8192.0, implementation=implementation)
        model = find_model(name)
        ops = (op for layer in layer_kinds(model) for op in block(model, cut, layer))
        inner = [op for op in ops if op.name in ("index_scores", "chunk")]
        flop[implementation] = sum(op.cost.flop for op in inner)
        assert all(min(op.shape) > 0 for op in inner)
    assert flop["fsdp2"] == flop["megatron"] > 0

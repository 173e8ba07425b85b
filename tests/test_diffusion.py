"""Diffusion transformers: parameters and FLOP and times against published ones."""

from statistics import median
from typing import Any

import pytest

import meshwise as mw
from data_tables import csv_rows, table
from meshwise.estimate.one_plan import model_flop
from meshwise.model.find import find_model
from meshwise.model.inputs import with_latent
from meshwise.model.weights import num_params

PARAMS = table("printed_parameters")["diffusion"]
TIMES = csv_rows("diffusion_times.csv")
SMALL: dict[str, Any] = {"frames": 9, "image_size": "640x384"}


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert num_params(find_model(name)) == PARAMS[name]


def test_flop_are_the_published_ones() -> None:
    """DiT-XL/2: 118.64 G multiply-adds at 256 x 256, 524.60 at 512 x 512 (arXiv 2212.09748)."""
    small = find_model("dit-xl/2")
    large = with_latent(small, None, (512, 512))
    for model, published in ((small, 118.64e9), (large, 524.60e9)):
        assert model_flop(model, model.max_seq) / 2 == pytest.approx(published, rel=1e-3)


def test_tokens_follow_from_frames_and_resolution() -> None:
    """Wan2.1: 81 frames of 1280 x 720 are 21 x 45 x 80 tokens; HunyuanVideo has text too."""
    assert with_latent(find_model("wan2.1-1.3b"), 81, (1280, 720)).max_seq == 75_600
    assert find_model("hunyuanvideo").max_seq == 33 * 45 * 80 + 256
    assert with_latent(find_model("flux"), None, (512, 1024)).max_seq == 32 * 64 + 512


def sample(model: str, cluster: str, plan: str, **more: Any) -> mw.Estimate:
    return mw.estimate(model, cluster, plan, kind="sampling", **more)


def test_a_sampling_is_as_many_forwards_as_it_has_steps() -> None:
    once = mw.estimate("wan2.1-1.3b", "h100-80g-sxm:1", batch=1, kind="evaluate", **SMALL)
    steps = sample("wan2.1-1.3b", "h100-80g-sxm:1", "", batch=1, steps=20, guidance=True, **SMALL)
    assert steps.flop_per_step == pytest.approx(40 * once.flop_per_step)
    assert steps.step_s == pytest.approx(40 * once.step_s)
    assert sum(steps.time_s.values()) == pytest.approx(steps.step_s)
    assert steps.memory_bytes == once.memory_bytes


@pytest.mark.parametrize(("plan", "weights_gb"), [("dtype=fp8", 11.9), ("weight_dtype=int4", 6.64)])
def test_a_sampling_keeps_weights_in_the_bits_of_the_plan(plan: str, weights_gb: float) -> None:
    """FLUX.1 has 11.9 G weights; SVDQuant's INT4 of it 6.64 GB (model card), with its branch of 16 bits."""
    narrow, wide = (sample("flux", "4090:1", one, batch=1, image_size="1024x1024") for one in (plan, ""))
    assert narrow.memory_bytes["weights"] / 1e9 == pytest.approx(weights_gb, rel=0.06)
    assert narrow.fits and not wide.fits and narrow.step_s < wide.step_s


@pytest.mark.parametrize(
    ("model", "plan"),
    [("wan2.1-14b", "cp=8,cp_kind=ulysses"), ("hunyuanvideo", "cp=8"), ("flux", "cp=2,cp_kind=ulysses,tp=4")],
)
def test_ranks_divide_the_work_of_a_sampling(model: str, plan: str) -> None:
    one, many = (sample(model, f"h200-sxm:{n}", p, batch=1, steps=4) for n, p in ((1, ""), (8, plan)))
    assert many.flop_per_step == one.flop_per_step
    assert many.hardware_flop == pytest.approx(one.hardware_flop, rel=0.01)  # text and time on every rank
    assert one.step_s / 8 < many.step_s < one.step_s / 2.5


def predicted_s(row: dict[str, str]) -> float:
    gpus, frames = int(row["gpus"]), row["frames"]
    plan = f"cp={gpus},cp_kind=ulysses" if gpus > 1 else ""
    return sample(
        row["model"], f"{row['chip']}:{gpus}", plan, batch=1, steps=int(row["steps"]),
        frames=int(frames) if frames else None, image_size=row["image_size"],
        guidance=row["guidance"] == "1",
    ).step_s  # fmt: skip


def test_published_times_are_met_where_kernels_are_those_of_the_chip() -> None:
    """The transformer alone is priced: a published time has text encoder and VAE on top, and slower kernels.

    FlashAttention 2 on a Hopper chip, and PyTorch without compilation, take up to twice as long and more.
    """
    errors = [(row, predicted_s(row) / float(row["seconds"]) - 1) for row in TIMES]
    slow = [
        row["kernels"] == "eager" or (row["kernels"] == "flash2" and "h100" in row["chip"])
        for row, _ in errors
    ]
    usual = [error for (_, error), is_slow in zip(errors, slow, strict=True) if not is_slow]
    assert len(errors) == 47 and len(usual) == 35
    assert median(map(abs, usual)) < 0.16
    assert max(usual) < 0.25 and min(usual) > -0.5

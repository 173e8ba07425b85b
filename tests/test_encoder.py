"""Encoders before a decoder (T5, BART, Whisper), DeBERTa and Gemma 4: their work, and what is refused.

The FLOP are those that torch's FlopCounterMode counts over one forward of the classes of transformers 5.23
with their default configs on the meta device, in eager attention, which computes masked pairs too: as many
tokens of source (Whisper: 3000 frames, 1500 tokens) as of target. Gemma 4 has 12 layers of shared keys,
Gemma 3n 20 layers, half of them with shared keys.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import meshwise as mw
from meshwise.core.errors import MeshwiseError
from meshwise.estimate.one_plan import model_flop
from meshwise.model.huggingface import model_from_config

RECORDS = (Path(__file__).parent / "data" / "transformers_5.23.jsonl").read_text().splitlines()
CONFIGS = {record["model_type"]: record["config"] for record in map(json.loads, RECORDS)}
CONFIGS["gemma3n_short"] = CONFIGS["gemma3n_text"] | {
    **{"num_hidden_layers": 20, "num_kv_shared_layers": 10, "layer_types": None, "intermediate_size": 16384}
}
MODELS = {name: model_from_config(CONFIGS[name], name=name) for name in ("t5", "bart", "whisper")}


@pytest.mark.parametrize(
    ("name", "seq", "flop"),
    [
        ("t5", 256, 33_386_659_840),
        ("bart", 256, 216_405_639_168),
        ("whisper", 256, 57_663_553_536),
        ("marian", 64, 53_316_550_656),
        ("m2m_100", 64, 62_493_032_448),
        ("gemma4_text", 64, 482_697_281_536),
        ("gemma3n_short", 64, 359_359_782_912),
    ],
)
def test_flop_flop_counter_mode(name: str, seq: int, flop: int) -> None:
    """Relative positions are added to scores, which the counter does not count."""
    model = replace(model_from_config(CONFIGS[name], name=name), causal=False)
    if model.relative_buckets:
        model = replace(model, positions="none", relative_buckets=0)
    assert model_flop(model, seq) == flop


def test_flop_of_scores_of_distances() -> None:
    """DeBERTa V3 base with two layers and its masked-token head, 256 tokens: the same counter."""
    short = {"num_hidden_layers": 2, "architectures": ["DebertaV2ForMaskedLM"]}
    model = model_from_config(CONFIGS["deberta-v2"] | short, name="deberta-v3-base")
    assert model_flop(model, 256) == 61_544_595_456


@pytest.mark.parametrize("name", MODELS)
def test_a_step_adds_up(name: str) -> None:
    step = mw.estimate(MODELS[name], "h100-80g-sxm:4", "tp=2,zero=1", batch=16, seq=256)
    rows = step.ledger.to_json()
    assert sum(row["count"] * row["time_s"] for row in rows if row["time_s"]) == pytest.approx(step.step_s)
    modules = {row["module"] for row in rows}
    assert any("cross_attention" in module for module in modules)


def test_sound_is_as_long_as_it_is() -> None:
    """Whisper reads 1500 tokens whatever it writes: a longer target adds only the decoder's work."""
    model = MODELS["whisper"]
    assert model_flop(model, 2) < 1.01 * model_flop(model, 1)
    assert model_flop(MODELS["bart"], 2) == pytest.approx(2.0 * model_flop(MODELS["bart"], 1), rel=1e-3)


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("pp=2", "train"),
        ("cp=2", "train"),
        ("tp=2", "decode"),
        ("implementation=fsdp2", "train"),
        ("layout=2d:2x2", "train"),
    ],
)
def test_what_is_not_priced_is_refused(plan: str, kind: str) -> None:
    with pytest.raises(MeshwiseError, match=r"encoder|cross-attention"):
        mw.estimate(MODELS["t5"], "h100-80g-sxm:4", plan, batch=8, seq=256, kind=kind)

"""Encoders before a decoder (T5, BART, Whisper), DeBERTa and Gemma 4: their work, and what is refused.

The FLOP are those that torch's FlopCounterMode counts over one forward of the classes of transformers 5.23
with their default configs on the meta device, in eager attention, which computes masked pairs too: as many
tokens of source (Whisper: 3000 frames, 1500 tokens) as of target. Gemma 4 has 12 layers of shared keys,
Gemma 3n 20 layers, half of them with shared keys.
"""

from dataclasses import replace

import pytest

import meshwise as mw
from data_tables import lines, table
from meshwise.core.errors import MeshwiseError
from meshwise.estimate.one_plan import model_flop
from meshwise.model.huggingface import model_from_config
from meshwise.model.weights import num_params

CONFIGS = {record["model_type"]: record["config"] for record in lines("transformers_5.23")}
CONFIGS["gemma3n_short"] = CONFIGS["gemma3n_text"] | {
    **{"num_hidden_layers": 20, "num_kv_shared_layers": 10, "layer_types": None, "intermediate_size": 16384}
}
MODELS = {name: model_from_config(CONFIGS[name], name=name) for name in ("t5", "bart", "whisper")}


@pytest.mark.parametrize(("name", "seq", "flop"), table("tables")["encoder"]["flop"])
def test_flop_flop_counter_mode(name: str, seq: int, flop: int) -> None:
    """Relative positions are added to scores, which the counter does not count."""
    model = replace(model_from_config(CONFIGS[name], name=name), causal=False)
    if model.relative_buckets:
        model = replace(model, positions="none", relative_buckets=0)
    assert model_flop(model, seq) == flop


def test_an_engine_reads_the_source_once() -> None:
    """Whisper large v3: 1,543,490,560 parameters; 32 layers keep 1500 tokens of source in bf16."""
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 32)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 20)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 5120)
    raw = CONFIGS["whisper"] | sizes | {"d_model": 1280, "vocab_size": 51866, "num_mel_bins": 128}
    model = model_from_config(raw, name="whisper-large-v3")
    assert num_params(model) == 1_543_490_560
    found = mw.serve(model, "h100-80g-sxm:1", prompt=4, output=200, sequences=(1, 64)).to_json()
    assert found["weight_bytes"] == 2 * num_params(model)
    assert found["cache_bytes_per_sequence"] == 2 * 2 * 1280 * 32 * (1500 + 4 + 200 - 1 + 1)
    encoder_flop = 2 * 32 * 12 * 1280**2 * 1500 + 4 * 32 * 1500**2 * 1280
    keys_flop = 2 * 32 * 2 * 1280**2 * 1500  # of the source, in each layer of the decoder
    assert model_flop(model, 4, kind="prefill") == pytest.approx(encoder_flop + keys_flop, rel=0.02)
    assert model_flop(model, 4, kind="decode") < 0.001 * encoder_flop
    decoder = found["weight_bytes"] - 2 * 32 * 12 * 1280**2  # which a pass reads, and the encoder it does not
    token_s = found["passes"][0]["token_s"]
    assert decoder / 3.35e12 < token_s < found["first_token_s"] - encoder_flop / 989e12


def test_flop_of_scores_of_distances() -> None:
    """DeBERTa V3 base with two layers and its masked-token head, 256 tokens: the same counter."""
    short = {"num_hidden_layers": 2, "architectures": ["DebertaV2ForMaskedLM"]}
    model = model_from_config(CONFIGS["deberta-v2"] | short, name="deberta-v3-base")
    assert model_flop(model, 256) == 61_544_595_456


@pytest.mark.parametrize("name", MODELS)
def test_fsdp2_cuts_an_encoder_and_a_decoder_like_other_blocks(name: str) -> None:
    """fp32 shards and two moments; the ops are those of Megatron-LM."""
    work = {"batch": 8, "seq": 256}
    megatron, fsdp2 = (
        mw.estimate(MODELS[name], "h100-80g-sxm:4", f"zero=3{own}", **work)
        for own in ("", ",implementation=fsdp2")
    )
    fp32_bytes = megatron.memory_bytes["gradients"]  # of what trains, a quarter on each rank
    for part, times in (("gradients", 1), ("optimizer", 2)):
        assert fsdp2.memory_bytes[part] == pytest.approx(times * fp32_bytes, rel=0.001), part
    assert fsdp2.memory_bytes["weights"] == pytest.approx(4 * num_params(MODELS[name]) / 4, rel=0.001)
    assert fsdp2.flop_per_step == megatron.flop_per_step


@pytest.mark.parametrize("plan", ["pp=2", "cp=2", "implementation=huggingface", "layout=2d:2x2"])
def test_what_is_not_priced_is_refused(plan: str) -> None:
    with pytest.raises(MeshwiseError, match=r"encoder|cross-attention"):
        mw.estimate(MODELS["t5"], "h100-80g-sxm:4", plan, batch=8, seq=256)

"""Encoders of images and sound beside a language model: tokens of an image, FLOP, memory and time."""

from dataclasses import replace
from typing import Any

import pytest

import meshwise as mw
from data_tables import DATA, table
from meshwise.estimate.one_plan import model_flop
from meshwise.estimate.tower import num_positions
from meshwise.model.architecture import Layer, Model, layer_counts
from meshwise.model.find import find_model
from meshwise.model.huggingface import model_from_config
from meshwise.model.inputs import Inputs, with_inputs
from meshwise.model.weights import num_params
from meshwise.program.block import block
from meshwise.program.cut import Cut

TOWERS = table("towers")
TEXT, VISION, TOKENS, SOUND = (TOWERS[name] for name in ("text", "vision", "tokens", "sound"))


def model_of(family: str, **whole: Any) -> Model:
    raw = TEXT | {"query_num": 64, "version": 4.5, "model_type": family, "text_config": TEXT} | whole
    raw["vision_config"] = VISION[family] | whole
    if family == "pixtral":  # Pixtral 12B is a LLaVA with that tower
        raw |= {"model_type": "llava", "vision_config": VISION[family] | {"model_type": family}}
    return model_from_config(raw, name=family)


def estimate(plan: str, model: Model | None = None, images: int = 4, **more: Any) -> mw.Estimate:
    shape = model or model_of("qwen3_vl")
    work: dict[str, Any] = {"batch": 16, "seq": 8192, "images": images} | more
    return mw.estimate(shape, "h100-80g-sxm:8", plan, **work)


@pytest.mark.parametrize("case", TOKENS)
def test_tokens_of_an_image(case: str) -> None:
    family, size = case.split()
    width, height = map(int, size.split("x"))
    tower, *_ = with_inputs(model_of(family), Inputs(images=3, width=width, height=height)).towers
    assert tower.num_tokens == 3 * TOKENS[case]


def test_tokens_of_a_published_config() -> None:
    """DeepSeek-VL2: 3 x 2 tiles, and the whole, a token at the end of each row."""
    model = find_model(str(DATA / "configs" / "deepseek-vl2-small.json"))
    (tower,) = with_inputs(model, Inputs(images=1, width=1024, height=768)).towers
    assert (tower.num_inputs, tower.num_tokens) == (7, 28 * 43 + 1 + 14 * 15)


@pytest.mark.parametrize(("family", "field", "value", "tokens", "counted"), TOWERS["merged"], ids=str)
def test_merged_tokens(family: str, field: str, value: float, tokens: int, counted: int) -> None:
    text = TEXT | {"num_hidden_layers": 36}
    model = model_of(family, text_config=text, tie_word_embeddings=False, **{field: value})
    read = with_inputs(model, Inputs(images=1, width=1024, height=1024))
    assert num_params(read) == counted == num_params(model) + sum(n for _, n in model.left_out)
    assert read.towers[0].num_tokens == tokens


def test_flop_of_the_tower_follow_from_its_sizes() -> None:
    """Forward: two FLOP a parameter of a matrix and position, and 4 x positions^2 x width a block."""
    flop = estimate("", kind="evaluate").flop_per_step - estimate("", kind="evaluate", images=0).flop_per_step
    positions, tokens, width = 64 * 64, 32 * 32, 1152
    block = 2 * (4 * width**2 + 2 * width * 4304) * positions + 4 * positions**2 * width
    merger = 2 * (4 * width) * (4 * width + 4096) * tokens
    patches = 2 * 2 * 3 * 16**2 * width * positions
    assert flop == pytest.approx(16 * 4 * (27 * block + 4 * merger + patches), rel=1e-9)


def test_a_trained_tower_adds_its_states_and_three_forwards() -> None:
    with_it, without = estimate("zero=0"), estimate("zero=0", images=0)
    added = sum(number for _, number in with_it.model.left_out)
    for name, each in (("weights", 2), ("gradients", 4), ("optimizer", 12)):
        assert with_it.memory_bytes[name] - without.memory_bytes[name] == pytest.approx(each * added)
    frozen, full = estimate("zero=0,tower=frozen"), estimate("zero=0,tower_recompute=full")
    assert frozen.step_s < with_it.step_s < full.step_s
    assert frozen.memory_bytes["activations"] < full.memory_bytes["activations"]
    assert full.memory_bytes["activations"] < 0.8 * with_it.memory_bytes["activations"]
    assert full.flop_per_step == with_it.flop_per_step
    assert full.hardware_flop > with_it.hardware_flop


@pytest.mark.parametrize("plan", ["zero=1", "zero=3", "implementation=fsdp2", "implementation=fsdp2,zero=3"])
def test_a_frozen_tower_is_sharded_and_gathered_and_has_no_more(plan: str) -> None:
    trained, frozen = (estimate(f"{plan},tower={what}") for what in ("trained", "frozen"))
    params = num_params(trained.model.towers[0].encoder)
    assert frozen.memory_bytes["weights"] == pytest.approx(trained.memory_bytes["weights"])
    less = {name: trained.memory_bytes[name] - frozen.memory_bytes[name] for name in trained.memory_bytes}
    assert less["optimizer"] == pytest.approx((8 if "fsdp2" in plan else 12) * params / 8, rel=1e-3)
    assert less["gradients"] == pytest.approx(4 * params / (1 if plan == "zero=1" else 8), rel=1e-3)
    assert less["activations"] > 0
    moved = [one.time_s["comm_dp"] + one.hidden_s["comm_dp"] for one in (frozen, trained)]
    assert moved[0] < moved[1]


def test_an_engine_holds_its_towers_while_it_decodes() -> None:
    kinds = (("decode", 4), ("prefill", 4), ("decode", 0))
    seeing, prompt, text = (estimate("tp=8", kind=kind, images=images) for kind, images in kinds)
    assert seeing.memory_bytes["weights"] == prompt.memory_bytes["weights"] > text.memory_bytes["weights"]
    assert seeing.step_s == text.step_s


def test_sound_is_read_in_pieces_of_thirty_seconds() -> None:
    """Qwen2-Audio-7B: 8,397,094,912 parameters; Whisper's encoder, two of whose 1500 tokens become one."""
    model = model_from_config(TOWERS["qwen2_audio"], name="qwen2-audio-7b")
    assert num_params(with_inputs(model, Inputs(audio_s=1.0))) == 8_397_094_912
    for seconds, inputs, tokens in ((30.0, 1, 750), (45.0, 2, 1125), (6.0, 1, 150)):
        (tower,) = with_inputs(model, Inputs(audio_s=seconds)).towers
        assert (tower.num_inputs, tower.num_tokens) == (inputs, tokens)
    found = mw.estimate(model, "h100-80g-sxm:8", "zero=3", batch=8, seq=1024, audio_s=30.0)
    assert sum(found.time_s.values()) == pytest.approx(found.step_s)


def hearing(family: str) -> Model:
    text = TEXT | {"num_kv_shared_layers": 0}
    raw = text | {"model_type": family, "text_config": text} | SOUND[family]["parts"]
    return model_from_config(raw, name=family)


@pytest.mark.parametrize("family", SOUND)
def test_tokens_of_sound(family: str) -> None:
    for seconds, tokens in SOUND[family]["tokens"].items():
        tower = with_inputs(hearing(family), Inputs(audio_s=float(seconds))).towers[-1]
        assert tower.num_tokens == tokens
    assert tower.num_inputs == SOUND[family]["inputs"]
    assert mw.serve(hearing(family), "h100-80g-sxm:1", "", prompt=100, audio_s=45.0, sequences=(1,))


@pytest.mark.parametrize("family", SOUND)
def test_flop_of_an_encoder_of_sound_flop_counter_mode(family: str) -> None:
    """Ends of the sound are padded by each convolution, and Gemma computes attention in blocks."""
    seconds, flop = SOUND[family]["flop"].values()
    tower = with_inputs(hearing(family), Inputs(audio_s=seconds)).towers[-1]
    encoder = replace(tower.encoder, attention_softcap=False)
    assert tower.num_inputs == 1
    assert model_flop(encoder, num_positions(encoder)) == pytest.approx(flop, rel=0.01)


def test_data_parallel_towers_do_the_same_work_without_exchanges() -> None:
    cut, apart = estimate("tp=4"), estimate("tp=4,tower_dp=1")
    assert apart.hardware_flop == pytest.approx(cut.hardware_flop)
    assert apart.memory_bytes["weights"] > cut.memory_bytes["weights"]
    exchanged = [
        sum(r["comm_s"] for r in one.ledger.rows() if r["module"].startswith("vision") and r["collective"])
        for one in (cut, apart)
    ]
    assert exchanged[0] > 0 == exchanged[1]


def serve(plan: str = "tp=4", **more: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"prompt": 500, "output": 64, "images": 4, "image_size": "1024x768"} | more
    return mw.serve(model_of("qwen3_vl"), "h100-80g-sxm:4", plan, **asked).to_json()


def test_an_engine_encodes_images_before_their_prompt() -> None:
    """Tokens of images come on top of the text; the first token waits for both."""
    text, read = serve(images=0, image_size="", prompt=500 + 4 * 768), serve()
    assert read["prompt"] == text["prompt"] == 500 + 4 * 768
    assert read["first_token_s"] - text["first_token_s"] == pytest.approx(read["encoding"]["request_s"])
    (_, tower), (_, merger) = model_of("qwen3_vl").left_out
    added = read["weight_bytes"] - text["weight_bytes"]
    assert added == pytest.approx(2 * (tower / 4 + merger), rel=0.02)  # vectors, and what joins, on each rank
    assert text["encoding"] is None and text["passes"][0]["token_s"] == read["passes"][0]["token_s"]


def test_layers_that_attend_to_images() -> None:
    """Text alone skips them: the work of Llama 3.1 8B. 10,670,220,835 parameters in all (its safetensors)."""
    model = model_from_config(TOWERS["mllama"], name="mllama")
    work: dict[str, Any] = {"kind": "evaluate", "batch": 8, "seq": 4096}
    text, llama = (mw.estimate(one, "h100-80g-sxm:8", **work) for one in (model, "llama3-8b"))
    assert text.flop_per_step == llama.flop_per_step
    read = with_inputs(model, Inputs(images=2, width=1120, height=1120))
    assert num_params(read) == 10_670_220_835
    assert read.towers[0].num_tokens == 2 * 4 * 1601
    seen = mw.estimate(model, "h100-80g-sxm:8", images=2, image_size="1120x1120", **work)
    flop = sum(r["count"] * r["flop"] for r in seen.ledger.rows() if "cross_attention" in r["module"])
    source, width = 2 * 4 * 1601, 4096
    layer = 4 * 4096 * width**2 + 4 * source * width * 1024 + 4 * 4096 * source * width  # q and o, k and v
    layer += 6 * 4096 * width * 14336
    assert flop == pytest.approx(8 * layer, rel=1e-3)  # norms
    served = (mw.serve(model, "h100-80g-sxm:1", "tp=1", images=n, prompt=500, output=64) for n in (0, 2))
    alone, both = (each.to_json() for each in served)
    kept = both["cache_bytes_per_sequence"] - alone["cache_bytes_per_sequence"]
    assert kept == pytest.approx(8 * source * 2 * 1024 * 2)
    assert both["passes"][0]["token_s"] > alone["passes"][0]["token_s"]


def test_windows_of_images_are_priced() -> None:
    """Qwen2.5-VL: 28 of 32 blocks attend inside 8 x 8 patches, the others to the whole image."""
    (tower,) = with_inputs(model_of("qwen2_5_vl"), Inputs(images=1, width=1036, height=756)).towers
    positions, width = 74 * 54, 1280
    near, far = (Layer(window=32), Layer())
    assert layer_counts(tower.encoder) == {near: 28, far: 4}
    cut = Cut(microbatch=1.0, seq=float(positions))
    flop = {
        kind: next(op.cost.flop for op in block(tower.encoder, cut, kind) if op.name == "flash")
        for kind in (near, far)
    }
    assert flop[far] == 4 * positions**2 * width
    assert flop[near] == pytest.approx(4 * positions * 64 * width, rel=0.01)

"""Each weight is named once: over all ranks of any layout, the ops hold exactly the model's parameters."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

import meshwise as mw
from data_tables import DATA, lines, table
from meshwise.model.architecture import Model, layer_kind
from meshwise.model.find import find_model, model_names
from meshwise.model.huggingface import model_from_config, read_config
from meshwise.model.weights import num_params
from meshwise.program.block import block
from meshwise.program.cut import Cut
from meshwise.program.op import Op
from meshwise.program.vocabulary import embed, head
from parameters import num_mtp_params

CONFIGS = sorted((DATA / "configs").glob("*.json"))
RECORDS = lines("transformers_5.23")
HYBRIDS = ("qwen3_next", "nemotron_h", "jamba", "lfm2_moe", "mamba", "falcon_h1", "kimi_linear")
MODELS = {
    **{
        record["model_type"]: model_from_config(record["config"], name=record["model_type"])
        for record in RECORDS
    },
    **{f"preset {name}": find_model(name) for name in model_names()},
    **{f"config {path.stem}": read_config(path) for path in CONFIGS},
}


def parts(model: Model, cut: Cut) -> Iterator[tuple[int, list[Op]]]:
    """How often each part of a model occurs, and its ops."""
    kinds = Counter(layer_kind(model, number) for number in range(model.num_layers))
    yield from ((count, block(model, cut, layer)) for layer, count in kinds.items())
    yield from ((1, embed(model, cut)), (1, head(model, cut)))


def counted_once(model: Model, cut: Cut, *, of_adapters: bool) -> float:
    """Parameters on all ranks that share a model, slices that several of them hold counted once."""
    return sum(
        count * held.num_params * held.shards
        for count, ops in parts(model, cut)
        for op in ops
        for held in op.weights
        if held.weight.is_adapter == of_adapters
    )


def test_one_rank_holds_all() -> None:
    cut = Cut(microbatch=1.0, seq=64.0)
    for name, model in MODELS.items():
        held = sum(count * sum(op.num_params for op in ops) for count, ops in parts(model, cut))
        assert held == num_params(model) + num_mtp_params(model), name


@given(
    name=st.sampled_from(list(MODELS)),
    tp=st.sampled_from([1.0, 2.0, 4.0, 8.0, 16.0]),
    ep=st.sampled_from([1.0, 2.0, 8.0]),
    etp=st.sampled_from([1.0, 2.0, 4.0]),
    flash=st.booleans(),
    sp=st.booleans(),
    lora_rank=st.sampled_from([0, 8]),
)
def test_ranks_hold_all_together(
    name: str, tp: float, ep: float, etp: float, flash: bool, sp: bool, lora_rank: int
) -> None:
    """Any degrees; what a rank multiplies has the size of the matrices that it holds; adapters are extra."""
    model = MODELS[name]
    cut = Cut(microbatch=1.0, seq=64.0, tp=tp, ep=ep, etp=etp, flash=flash, sequence_parallel=sp)
    cut = replace(cut, lora_rank=lora_rank)
    assert counted_once(model, cut, of_adapters=False) == num_params(model) + num_mtp_params(model)
    assert bool(counted_once(model, cut, of_adapters=True)) == bool(lora_rank)
    for _, ops in parts(model, cut):
        for op in ops:
            assert op.num_params == sum(held.num_params for held in op.weights)
            matrices = sum(held.num_params for held in op.weights if held.weight.is_matrix)
            if op.kind == "matmul" and matrices:
                assert matrices == pytest.approx(op.shape[0] * op.shape[2] * op.shape[3], rel=1e-12)


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_are_priced(name: str) -> None:
    """A step and a pass of serving; the state of a recurrence does not grow with the sequence."""
    model = MODELS[name]
    run = mw.estimate(model, "h100-80g-sxm:64", "tp=2,zero=3,recompute=full", batch=64, seq=2048)
    names = {row["module"] for row in run.ledger.to_json()}
    recurs = any(name.endswith(".recurrence") for name in names)
    assert recurs == (model.recurrence is not None)
    decode = [
        mw.estimate(model, "h100-80g-sxm:8", "tp=8", batch=8, seq=seq, kind="decode") for seq in (1024, 2048)
    ]
    grows = decode[1].memory_bytes["cache"] > decode[0].memory_bytes["cache"]
    assert grows == any(layer.mixer in ("attention", "beside") for layer in model.layers)


def test_multi_token_prediction_deepseek_v3_readme_weights() -> None:
    """README_WEIGHTS of DeepSeek-V3: 11.5B parameters of its own, the shared embedding and head apart."""
    assert num_mtp_params(find_model("deepseek-v3")) == pytest.approx(11.5e9, rel=0.01)


@pytest.mark.parametrize(("name", "trainable"), table("tables")["adapters"])
def test_trainable_parameters_of_adapters(name: str, trainable: int) -> None:
    model, cut = find_model(name), Cut(microbatch=1.0, seq=64.0, lora_rank=16)
    ops = [(count, op) for count, ops in parts(model, cut) for op in ops]
    assert sum(count * (op.num_params - op.num_frozen) for count, op in ops) == trainable
    assert sum(count * op.num_frozen for count, op in ops) == num_params(model)
    assert {op.name for _, op in ops if op.is_weight_grad} == {
        f"{part}_lora_{side}" for part in ("q", "k", "v", "o", "gate", "up", "down") for side in "ab"
    }

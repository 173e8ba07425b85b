"""The peak of all live tensors of a training step, by a walk through its lifetimes and by a dry run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from meshwise.runtime.compare_program import compare_program
from meshwise.runtime.programs import find_program, parse_options

pytestmark = pytest.mark.slow

DATA = Path(__file__).parent / "data"
MODELS = {
    "llama": str(DATA / "tiny_llama.json"),
    "gpt": str(DATA / "tiny_gpt2.json"),
    "moe": str(DATA / "tiny_mixtral.json"),  # four experts, two a token
    "further": str(DATA / "tiny_deepseek3.json"),  # the same, and predicts one token more
    "mla": str(DATA / "tiny_deepseek.json"),  # a dense layer, two of routed and shared experts
    "latent": str(DATA / "tiny_minicpm3.json"),  # latent attention without experts
}
TRAIN = find_program("train")


@pytest.mark.parametrize(
    ("ranks", "rank", "words"),
    [
        (4, 0, "llama --plan zero=3,dtype=bf16 --batch 8 --steps 2"),
        (5, 4, "gpt --plan zero=1,dtype=bf16 --batch 15 --layers 3"),  # weights that 5 ranks share unevenly
        (3, 1, "gpt --plan zero=2,dtype=fp32,loss_chunks=2 --batch 12 --microbatch 2"),
        (4, 2, "llama --plan zero=3,dtype=bf16,recompute=full,recompute_layers=2 --batch 4 --layers 4"),
        (8, 5, "gpt --plan tp=2,zero=3,dtype=bf16 --batch 4 --steps 2"),
        (8, 2, "llama --plan tp=2,zero=1,zero_group=2,dtype=bf16,recompute=selective --batch 16"),
        (4, 3, "llama --plan tp=2,zero=2,dtype=fp32,recompute=full --batch 8 --microbatch 2"),
        (4, 1, "gpt --plan tp=2,zero=0,dtype=bf16 --batch 4"),  # a tied table, several microbatches
        (1, 0, "llama --plan tp=1,dtype=fp32 --batch 3"),
        (4, 2, "llama --plan zero=2,zero_group=2,dtype=bf16 --batch 12"),
        (4, 2, "gpt --plan pp=2,tp=2,dtype=bf16 --batch 5 --layers 3 --steps 2"),
        (4, 1, "llama --plan pp=4,schedule=gpipe,recompute=full,dtype=fp32 --batch 4 --layers 4"),
        (4, 3, "moe --plan ep=2,zero=3,recompute=full,dtype=bf16 --batch 8"),  # experts that two ranks share
        (4, 0, "mla --plan tp=2,ep=4,etp=1,zero=2,dtype=bf16 --batch 4 --microbatch 2"),
        (4, 1, "gpt --plan cp=4,cp_kind=ring,optimizer=adam-bf16,dtype=bf16 --batch 2 --microbatch 2"),
        (6, 4, "llama --plan cp=3,pp=2,cp_kind=all_gather,dtype=fp32 --batch 2 --seq 24"),
        (4, 3, "mla --plan cp=4,cp_kind=ulysses,recompute_modules=mlp,dtype=bf16 --batch 2"),
        (2, 1, "moe --plan ep=2,zero=2,recompute_modules=layernorm+moe_act,optimizer=none --batch 4"),
        (2, 0, "mla --plan tp=2,etp=1,recompute_modules=mla_up_proj+core_attn+moe,optimizer=none --seq 64"),
        (2, 0, "latent --plan zero=0,recompute_modules=mla_up_proj,optimizer=none,dtype=bf16 --seq 64"),
        (2, 1, "moe --plan cp=2,cp_kind=ring,recompute_modules=per_op,optimizer=none,dtype=bf16 --seq 64"),
        (
            2,
            0,
            "mla --plan recompute_modules=layernorm+shared_experts+mla_up_proj,attention=unfused --layers 2",
        ),
        (2, 1, "moe --plan ep=2,zero=3,recompute=full,recompute_every=2,optimizer=none --batch 2 --layers 3"),
        (2, 1, "gpt --plan cp=2,cp_kind=ulysses,attention=unfused --microbatch 2 --layers 1 --seq 64"),
        (4, 0, "llama --plan cp=4,cp_kind=two_level,ulysses=2,optimizer=none --microbatch 2 --layers 1"),
        (2, 1, "latent --plan tp=2,sp=0,recompute_modules=layernorm,optimizer=none --layers 1 --seq 64"),
        (4, 1, "gpt --plan tp=2,lora_rank=4,recompute_modules=mlp,dtype=bf16 --batch 8 --layers 2"),
        (4, 2, "mixtral-8x7b --plan lora_rank=8,frozen_dtype=fp4,ep=2,tp=2,dtype=bf16 --layers 1"),
        (4, 3, "mla --plan tp=2,ep=2,etp=1,dtype=fp8,head_dtype=fp8,act_input_dtype=fp8 --batch 4"),
        (2, 1, "mixtral-8x7b --plan ep=2,dispatch_dtype=fp8,dtype=bf16 --layers 1"),
        (4, 3, "gpt --plan pp=2,vpp=2,zero=2,dtype=bf16 --batch 4 --layers 4 --steps 2"),
        (2, 1, "llama --plan pp=2,vpp=4,zero=3,dtype=bf16 --batch 2 --layers 8"),  # weights go and come again
        (8, 2, "gpt --plan pp=4,tp=2,schedule=zb-h1,dtype=bf16 --batch 2 --layers 4"),
        (2, 0, "gpt --plan tp=2,dtype=fp8,head_dtype=fp8,loss_chunks=2 --layers 1"),
        (4, 2, "moe --plan pp=2,ep=2,schedule=zb-v,recompute=full,dtype=fp32 --batch 6 --layers 4"),
        (4, 1, "llama --plan pp=2,tp=2,schedule=dualpipe,zero=2,dtype=bf16 --batch 4 --steps 2"),
        (2, 0, "mla --plan pp=2,schedule=dualpipe-v,dtype=bf16 --batch 4 --layers 4"),
        (2, 1, "further --plan tp=2,optimizer=none,dtype=fp32 --batch 2 --layers 1 --seq 32"),
        (4, 3, "further --plan pp=2,schedule=zb-h1,zero=2,recompute=full,dtype=bf16 --layers 2"),
        (2, 1, "llama3-8b --plan zero=1,optimizer=adam-8bit,offload_optimizer=1 --layers 1"),
        (5, 4, "gpt3-13b --plan zero=0,optimizer=adam-8bit,dtype=bf16 --layers 1 --steps 2"),
        (4, 3, "mla --plan optimizer=muon,tp=2,ep=2,etp=1,dtype=bf16 --batch 2 --seq 4 --steps 2"),
        (4, 1, "moe --plan ep=4,dispatch=per_rank,optimizer=none,dtype=bf16 --layers 1 --seq 64"),
        (4, 3, "moe --plan ep=4,imbalance=1.5,dtype=bf16 --layers 1 --seq 32"),
        (2, 1, "gpt --plan pp=2,schedule=zb-h1,dtype=fp8 --batch 4 --layers 2"),
        (2, 1, "llama --plan tp=2,dtype=fp4,head_dtype=fp8 --layers 1 --seq 24"),
        (4, 1, "mla --plan cp=2,cp_kind=ulysses,offload_activations=0.5,offload_optimizer=0.3 --seq 64"),
    ],
)
def test_the_peak_of_all_live_tensors_has_a_closed_form(ranks: int, rank: int, words: str) -> None:
    """To the byte what a dry run finds alive, gathered weights and temporaries of every op included."""
    model, *rest = words.split()
    seq = [] if "--seq" in words else ["--seq", "16"]
    options = parse_options(TRAIN, ["--model", MODELS.get(model, model), *seq, *rest])
    found = compare_program(TRAIN, options, ranks=ranks, rank=rank, with_run=False)
    peaks = [row.values for row in found.rows if row.column == "peak_bytes"]
    assert len(peaks) == 1
    assert peaks[0]["estimate"] == peaks[0]["dry_run"]


def test_queries_straight_from_what_keys_are_made_of_agree(tmp_path: Path) -> None:
    """Latent attention without latents of queries, where every tensor-parallel rank has all tokens."""
    config = json.loads(Path(MODELS["latent"]).read_text()) | {"q_lora_rank": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--plan", "tp=2,sp=0,recompute_modules=layernorm,optimizer=none", "--layers", "1", "--seq", "64"]
    options = parse_options(TRAIN, ["--model", str(tmp_path / "config.json"), *words])
    found = compare_program(TRAIN, options, ranks=2, rank=1, with_run=False)
    assert found.agree, found.differences()[:3]

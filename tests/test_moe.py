"""The arithmetic of a mixture-of-experts evaluation, against a printed profile, oracles, the program."""

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from closed_form import check_estimate_is_the_dry_run
from data_tables import DATA, table
from meshwise.core.errors import ModelError
from meshwise.model.gpt_config import GptConfig, find_gpt_config, gpt_config_from_dict, to_model
from meshwise.model.weights import num_active_params, num_params
from meshwise.program.expert_pass import Pass, evaluation, new_pass, num_passes, rank_params
from meshwise.program.lifetime import peak_bytes
from meshwise.published import moe_inference as moe
from meshwise.runtime.dry_run import dry_run
from meshwise.runtime.programs.eval_lm import Options
from meshwise.runtime.programs.moe import MoELayer, Shard, metric_names, route

pytestmark = pytest.mark.slow

PRINTED_CONFIG = DATA / "fairseq_moe_lm_15b.txt"  # as fairseq's eval_lm prints it
PASSES = 5  # max_valid_steps 4
GIB = 2**30


def document() -> Pass:
    """The printed run: 4 ranks, fp16, capacity fraction 0.05, dictionary of 50264 words."""
    config = replace(find_gpt_config(str(PRINTED_CONFIG)), vocab_size=50264)
    return new_pass(config, ep=4)


# --- the printed profile -------------------------------------------------------------------------

PRINTED = table("fairseq_profile")
WRONG = table("wrong_inputs")
CALLS, MEMORY_GIB = PRINTED["calls"], PRINTED["memory_gib"]


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_those_of_the_printed_profile(name: str) -> None:
    assert moe.aten_calls(document(), PASSES)[name] == CALLS[name]


def test_shapes_of_the_printed_run() -> None:
    # The grids of its kernels: dispatch 412 tiles of 128 rows, GELU 4944 blocks of 64 x 4 elements, the
    # routing tensor 421,888 blocks of 256.
    of = document()
    assert of.capacity == 103
    assert of.slots == 412 * 128
    assert of.local_experts == 128
    assert of.ep * of.capacity * of.config.expert_ffn_dim == 4944 * 64 * 4
    assert of.routing_size == 421_888 * 256
    assert moe.report(of, PASSES)["calls"]["expert_ffn"] == 3840
    assert moe.exchanges(of, PASSES) == 60
    assert moe.exchange_bytes(of) == 81_002_496
    assert num_passes(10**6, 4, max_valid_steps=4) == PASSES


@pytest.mark.parametrize("name", MEMORY_GIB)
def test_bytes_are_those_of_the_printed_profile(name: str) -> None:
    """To the rounding of CUDA's allocator, which books up to 1.4 % more than a tensor needs."""
    low, high = MEMORY_GIB[name]
    found = float(moe.profiled_bytes(document(), PASSES)[name]) / GIB
    assert low - 0.005 - 0.014 * low <= found <= high + 0.005


def test_parameters_of_the_15b_model() -> None:
    # Artetxe et al., arXiv 2112.10684: 15B parameters; the parts are matrix sizes.
    of = document()
    model = to_model(of.config)
    assert num_params(model) == 6 * 512 * 4_722_432 + 97_683_456
    assert rank_params(of) == 3_724_511_232
    assert num_active_params(model) == pytest.approx(154e6, rel=0.005)
    assert 2 * rank_params(of) / GIB == pytest.approx(6.94, abs=0.005)


def test_flop_worked_out_by_hand() -> None:
    of, giga = document(), 1e9
    wanted = {"experts": 2986.1, "dispatch": 995.4, "combine": 995.4, "lm_head": 158.1, "attention": 154.6,
              "qkvo": 116.0, "dense_ffn": 116.0, "gate": 9.7, "combine_outer": 2.6}  # fmt: skip
    found = moe.flop_by_role(of)
    assert {role: round(float(flop) / giga, 1) for role, flop in found.items()} == wanted
    assert round(float(moe.total_flop(of)) / giga) == 5534
    assert round(float(moe.useful_flop(of)) / giga) == 786
    assert moe.report(of, 1)["shapes"]["slot_use_frac"] == pytest.approx(0.078, abs=0.0005)


def test_host_reads_of_the_token_loop() -> None:
    # 40,995 aten::item on rank 1; 35,375 on rank 0, with one block of 643 tokens. Forty are not the loop's.
    assert moe.host_reads(2048, PASSES) + 40 == 40_995
    assert moe.host_reads(2048, PASSES - 1) + moe.host_reads(643, 1) + 40 == 35_375


def test_dry_run_of_the_printed_run_counts_the_same() -> None:
    options = Options(config="en-moe-lm-15b", max_valid_steps=0, max_blocks=4)
    outcome = dry_run("eval-lm", options, ranks=4, rank=1, device="cpu")
    of = document()
    calls = Counter[str]()
    for row in outcome.ledger.rows():
        calls[row["op"]] += row["count"]
    for name in ("addmm", "gelu", "mm", "bmm"):
        assert PASSES * calls[name] == CALLS[f"aten::{name}"]
    exchanges = outcome.ledger.where(op="all_to_all")
    assert exchanges.total("payload_bytes") == 60 / PASSES * 81_002_496
    assert outcome.ledger.total("flop") == moe.total_flop(of)
    assert outcome.peak_bytes == peak_bytes(evaluation(of))


# --- what-ifs ------------------------------------------------------------------------------------


def test_command_prints_it_all(meshwise: Any) -> None:
    words = ("eval-lm", "--chips", "v100-16g-sxm,h200-sxm", "--max-tokens", "4")
    document = meshwise(*words, "--json").document
    assert document["calls"]["aten::addmm"] == 7740
    assert document["parameters"]["rank"] == 3_724_511_232
    by_name = {row["name"]: row for row in document["what_ifs"]}
    assert not by_name["fraction 0.5"]["fits"]["v100-16g-sxm"]
    assert by_name["fraction 0.5"]["total_s"]["h200-sxm"] > by_name["sparse dispatch"]["total_s"]["h200-sxm"]
    eval_lm, generate = (document["programs"][name] for name in ("eval_lm", "generate"))
    assert eval_lm["peak_bytes"] == document["bytes"]["peak"] and generate["fits"]["v100-16g-sxm"]
    fraction = ("--override", "moe_eval_capacity_token_fraction=0.5", "--show", "programs")
    assert "v100-16g-sxm out of memory" in " ".join(meshwise(*words, *fraction).out.split())


# --- the closed form is the program ----------------------------------------------------------------

TINY = (
    "decoder_layers=4,tokens_per_sample=48,moe_expert_count=8,decoder_embed_dim=32,decoder_ffn_embed_dim=64,"
    "moe_eval_capacity_token_fraction=0.1"
)


@pytest.mark.parametrize(("ranks", "override", "options"), table("tables")["eval_lm"]["dry_runs"])
def test_estimate_is_the_dry_run(ranks: int, override: str, options: dict[str, Any]) -> None:
    """Every row that the closed form states, every FLOP and collective, and the peak, to the last byte."""
    chosen = Options(override=f"{TINY},{override}".rstrip(","), max_blocks=6, **options)
    check_estimate_is_the_dry_run("eval-lm", chosen, ranks)


# --- routing -------------------------------------------------------------------------------------


def route_by_hand(logits: torch.Tensor, slots: int, top_k: int) -> list[list[tuple[int, int, float]]]:
    """Per token its (expert, slot, weight): the words of fairseq's top2gate, one token after the other."""
    gates = logits.double().softmax(dim=1)
    num_tokens, num_experts = gates.shape
    ranked = [sorted(range(num_experts), key=lambda e: -float(gates[s, e])) for s in range(num_tokens)]
    queue: Counter[int] = Counter()
    taken: list[list[tuple[int, int, float]]] = [[] for _ in range(num_tokens)]
    for choice in range(top_k):
        for s in range(num_tokens):
            expert = ranked[s][choice]
            slot = queue[expert]
            queue[expert] += 1
            if slot < slots:
                taken[s].append((expert, slot, float(gates[s, expert])))
    if top_k == 1:
        return taken
    totals = [sum(weight for *_, weight in places) for places in taken]
    return [
        [(expert, slot, weight / total) for expert, slot, weight in places]
        for places, total in zip(taken, totals, strict=True)
    ]


@given(
    num_tokens=st.integers(1, 20), num_experts=st.integers(2, 6), slots=st.integers(1, 8),
    top_k=st.integers(1, 2), seed=st.integers(0, 1000),
)  # fmt: skip
def test_routing_is_the_one_by_hand(
    num_tokens: int, num_experts: int, slots: int, top_k: int, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts)
    found, by_hand = route(logits, slots, top_k), route_by_hand(logits, slots, top_k)
    for s in range(num_tokens):
        mine = [
            (int(e[s]), int(p[s]), float(w[s]))
            for e, p, k, w in zip(found.expert, found.slot, found.kept, found.weight, strict=True)
            if k[s]
        ]
        assert [(e, p) for e, p, _ in mine] == [(e, p) for e, p, _ in by_hand[s]]
        assert [w for *_, w in mine] == pytest.approx([w for *_, w in by_hand[s]], abs=1e-6)
    places = [(e, p) for token in by_hand for e, p, _ in token]
    assert len(places) == len(set(places))
    overflow = found.metrics[metric_names(top_k).index("overflow_expert1")]
    num_dropped = num_tokens - int(found.kept[0].sum())
    assert float(overflow) == pytest.approx(100 * num_dropped / num_tokens, abs=1e-4)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_layer_is_the_weighted_sum_of_experts(sparse: bool, grouped: bool) -> None:
    torch.manual_seed(0)
    config = GptConfig(
        decoder_embed_dim=6, decoder_ffn_embed_dim=10, moe_expert_count=5, moe_freq=1, use_tutel_moe=sparse,
        moe_eval_capacity_token_fraction=1.0, decoder_attention_heads=1,
    )  # fmt: skip
    layer = MoELayer(config, Shard(), grouped=grouped).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 7, 6)
    with torch.no_grad():
        y, _ = layer(x)
    gates = (x @ layer.gate.weight.t()).softmax(dim=-1)
    best = gates.topk(2, dim=-1)
    shares = torch.zeros_like(gates).scatter(2, best.indices, best.values)
    shares /= shares.sum(dim=-1, keepdim=True)
    fc1, fc2 = layer.experts.fc1, layer.experts.fc2
    hidden = torch.nn.functional.gelu(torch.einsum("btm,ehm->bteh", x, fc1.weight) + fc1.bias)
    answers = torch.einsum("bteh,emh->btem", hidden, fc2.weight) + fc2.bias
    torch.testing.assert_close(y, torch.einsum("bte,btem->btm", shares, answers), rtol=1e-4, atol=1e-5)


# --- configs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["json", "toml", "txt"])
def test_configs_in_every_form(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"config.{suffix}"
    fields = {"decoder_layers": 3, "moe_freq": 3, "moe_expert_count": 4, "use_tutel_moe": True}
    texts = {
        "json": json.dumps(fields),
        "toml": "decoder_layers = 3\nmoe_freq = 3\nmoe_expert_count = 4\nuse_tutel_moe = true\n",
        "txt": repr(fields),
    }
    path.write_text(texts[suffix])
    config = find_gpt_config(str(path), "decoder_layers=6")
    assert asdict(config) == asdict(GptConfig(**(fields | {"decoder_layers": 6})))  # type: ignore[arg-type]
    assert config.num_moe_layers == 2


@pytest.mark.parametrize(("raw", "says"), WRONG["gpt_configs"])
def test_configs_that_are_wrong(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        gpt_config_from_dict(raw)

"""A whole step: published facts, the time of its ops, where layers are placed, the loss, fsdp2."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import meshwise as mw
from data_tables import table
from meshwise.estimate.adverse import Adversity, adverse_machine
from meshwise.estimate.one_plan import TIME_PARTS, Estimate, estimate, model_flop
from meshwise.estimate.priced_model import priced_model
from meshwise.estimate.priced_part import price_parts
from meshwise.estimate.step import play, price_step
from meshwise.estimate.timing import machine, machine_for, op_times
from meshwise.machine.hardware import find_cluster
from meshwise.machine.overheads import FULL_WATTS, NONE, Overheads, software_on
from meshwise.model.find import find_model
from meshwise.model.weights import num_params
from meshwise.plan.plan import Plan, parse_plan
from meshwise.plan.rules import resolve
from meshwise.plan.stages import layers_of_chunks, loses_step, stages_of
from meshwise.plan.workload import Workload
from meshwise.program.block import block
from meshwise.program.cut import Cut
from meshwise.program.vocabulary import head
from meshwise.search.study import changed

GIB = 2**30


def priced(
    model: str = "gpt3-175b", plan: str = "tp=8,pp=8", *, ideal: bool = False, **work: Any
) -> Estimate:
    cluster = find_cluster(work.pop("cluster", "a100-80g-sxm:64"))
    load = Workload(**{"batch": 64, "seq": 2048, **work})
    return estimate(find_model(model), cluster, parse_plan(plan), load, ideal=ideal)


# --- facts -------------------------------------------------------------------------------------

FIGURE_1 = table("tables")["korthikanti"]


def layers_memory(name: str, extra: str) -> tuple[float, float]:
    """GiB of (states, activations) of the layers alone on the first stage, embedding left out."""
    plan_text, batch, micro, gpus, *_ = FIGURE_1[name]
    model, plan = find_model(name), parse_plan(f"{plan_text},attention=unfused,zero=0,{extra}")
    cluster = find_cluster(f"a100-80g-sxm:{gpus}")
    mesh = resolve(model, plan, Workload(batch=batch, seq=2048, microbatch=micro), cluster)
    first = replace(stages_of(model, mesh)[0], embeddings=0.0, heads=0.0)
    priced = priced_model(model, mesh, machine(cluster, "bf16", ideal=True))
    memory = price_step(priced, [first]).stages[0].memory
    states = memory.weights + memory.gradients + memory.optimizer
    return float(states) / GIB, float(memory.activations) / GIB


@pytest.mark.parametrize("name", FIGURE_1)
def test_memory_korthikanti_figure_1(name: str) -> None:
    states, activations, selective = FIGURE_1[name][4:]
    assert layers_memory(name, "sp=0")[0] == pytest.approx(states, rel=2e-3)
    assert layers_memory(name, "sp=0")[1] == pytest.approx(activations, rel=2e-3)
    assert layers_memory(name, "sp=1,recompute=selective")[1] == pytest.approx(selective, rel=2e-3)


@pytest.mark.parametrize(("zero", "bytes_per_param"), table("tables")["zero_bytes"])
def test_zero_divides_the_16_bytes_rajbhandari_figure_1(zero: int, bytes_per_param: float) -> None:
    """arXiv 1910.02054: 2 + 2 + 12 bytes with fp16 gradients; stage 1, 2, 3 divide 12, 14, 16 by dp."""
    memory = priced("llama2-7b", f"zero={zero},grad_dtype=bf16", cluster="a100-80g-sxm:64").memory_bytes
    states = memory["weights"] + memory["gradients"] + memory["optimizer"]
    assert states / num_params(find_model("llama2-7b")) == pytest.approx(bytes_per_param, rel=1e-9)


def test_flop_of_llama3_405b_arxiv_2407_21783() -> None:
    """Section 3.2: 3.8e25 FLOP for 15.6e12 tokens, by 6 FLOP per parameter and token."""
    model = find_model("llama3-405b")
    assert num_params(model) == 405_853_388_800
    per_token = 3 * model_flop(model, 8192) / 8192
    attention = 3 * 2 * 2 * 126 * 128 * 128 * 8192 / 2  # scores and mix over half of the pairs
    assert (per_token - attention) * 15.6e12 == pytest.approx(3.8e25, rel=0.02)


@pytest.mark.parametrize(("name", "gflop_per_token"), table("tables")["gflop_per_token"])
def test_training_flop_per_token_arxiv_2505_09343_table_2(name: str, gflop_per_token: float) -> None:
    """ "Insights into DeepSeek-V3", Table 2: training GFLOP per token at a sequence of 4096."""
    per_token = 3 * model_flop(find_model(name), 4096) / 4096
    assert per_token / 1e9 == pytest.approx(gflop_per_token, rel=0.011)


@pytest.mark.parametrize(("sp", "forward_ms", "backward_ms"), [(0, 7.7, 11.9), (1, 7.2, 11.8)])
def test_a_layer_with_and_without_sequence_parallelism_korthikanti_table_4(
    sp: int, forward_ms: float, backward_ms: float
) -> None:
    """arXiv 2205.05198, Table 4: one layer of the 22B model, tp=8, microbatch 4, on the software of its time.

    Sequence parallelism gathers each gradient once more, and cuts norms, dropouts and residuals by tp: it
    wins where those are slow kernels (here 3 %), and no more where they are fused (software megatron-2026).
    A layer timed alone has no sum of earlier microbatches to add its gradients to.
    """
    plan = f"tp=8,sp={sp},attention=unfused,software=megatron-2020"
    of = priced("megatron-22b", plan, cluster="a100-80g-sxm:8", batch=4, microbatch=4)
    layer = of.step.of.parts["layer"]
    assert 1e3 * float(layer.forward_s) == pytest.approx(forward_ms, rel=0.09)
    adding_s = sum(row.spent_s for row in layer.rows if row.op.name == "add_gradients")
    backward_s = float(layer.backward_s + layer.weight_s - adding_s)
    assert 1e3 * backward_s == pytest.approx(backward_ms, rel=0.02)


# --- links -------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["tp=2,zero=3", "tp=2,zero=1", "cp=2,zero=3", "tp=4,cp=2,zero=2", "zero=3"])
@pytest.mark.parametrize("implementation", ["megatron", "fsdp2"])
def test_links_carry_one_exchange_at_a_time(plan: str, implementation: str) -> None:
    """All of a rank's collectives inside one node go over the same links, so a step takes as long as they."""
    words = f"{plan},implementation={implementation}"
    found = priced("qwen3-0.6b", words, cluster="a100-80g-sxm:8", batch=16, seq=128, ideal=True)
    rows = [row for row in found.ledger.rows() if row["collective"]]
    assert sum(row["count"] * row["comm_s"] for row in rows) <= found.step_s * (1 + 1e-9)


@pytest.mark.parametrize("implementation", ["megatron", "fsdp2"])
def test_the_ends_of_a_pipeline_inside_a_node_share_a_table_over_its_links(implementation: str) -> None:
    """Ranks 0 and 6 of eight are no farther from each other than ranks 0 and 4 of a node."""
    took = []
    for pp in (2, 4):
        plan, cluster = f"tp=2,pp={pp},implementation={implementation}", f"a100-80g-sxm:{2 * pp}"
        found = priced("qwen3-0.6b", plan, cluster=cluster, batch=8, seq=128, ideal=True)
        took.append(found.ledger.where(op="tied_embedding")["comm_s"])
    assert took[0] == pytest.approx(took[1]) and took[0][0] > 0


def test_the_stage_of_the_head_waits_for_its_microbatches() -> None:
    """Megatron-LM v2.5 fetches every microbatch on every stage (pretrain_gpt.py: get_batch)."""
    found = priced("qwen3-0.6b", "pp=4,software=megatron-2020", cluster="a100-80g-sxm:4", batch=8, seq=128)
    waits = [found.rank_ledger(rank).where(op="next_microbatch")["time_s"] for rank in range(4)]
    assert waits[3] == pytest.approx([found.machine.overheads.microbatch_s])


DENSE_IDLE = ["cp_kind=ulysses", "schedule=zb-h1", "overlap_pp=0", "sp=1", "zero=3"]


@pytest.mark.parametrize("key", [*DENSE_IDLE, "imbalance=2", "dispatch_dtype=fp8", "overlap_ep=1"])
def test_a_key_without_effect_is_told_and_has_none(key: str) -> None:
    model = "qwen3-0.6b" if key in DENSE_IDLE else "qwen3-30b-a3b"
    for kind in ("train",) if key == "zero=3" else ("train", "evaluate"):
        job: Any = {"cluster": "a100-80g-sxm:1", "batch": 4, "seq": 256, "kind": kind}
        stated, plain = (priced(model, plan, **job) for plan in (key, ""))
        assert f"without effect here: {key}" in stated.notes()
        assert (stated.time_s, stated.memory_bytes) == (plain.time_s, plain.memory_bytes)


# --- what must hold ----------------------------------------------------------------------------


def played_s(of: Estimate) -> float:
    """The pipeline of a step played out, and what the parts of the step say of it."""
    return play(of.step, hop_s=float(of.step.hop_s)).makespan_s


def pipeline_s(of: Estimate) -> float:
    once = of.rank_ledger(of.pace_rank).where(op=("shared_norms", "tied_embedding"))
    parts = (of.time_s[name] for name in (*TIME_PARTS[:6], "bubble", "comm_pp"))
    return sum(parts) - sum(row["count"] * row["time_s"] for row in once.rows())


def test_uneven_stages_are_played() -> None:
    uneven = priced(plan="tp=8,pp=4,zero=0,stages=30-22-22-22", batch=64)
    assert uneven.step_s > priced(plan="tp=8,pp=4,zero=0", batch=64).step_s
    assert played_s(uneven) == pytest.approx(pipeline_s(uneven), rel=1e-9)
    assert sum(row["count"] * row["time_s"] for row in uneven.ledger.rows()) > 0  # each row has a time


def test_dualpipe_holds_both_ends_of_the_model() -> None:
    """A rank holds stage r and pp - 1 - r and runs half of the microbatches through each."""
    of = priced("llama3-8b", "pp=4,stages=even,schedule=dualpipe,zero=0", cluster="h100-80g-sxm:4", batch=32)
    stages = of.to_json(ledger=False)["stages"]
    assert [(stage["num_like_it"], stage["dense_layers"]) for stage in stages] == [(2, 16), (2, 16)]
    assert pipeline_s(of) == pytest.approx(played_s(of), rel=0.03)


def test_sums_held_as_shards_are_reduced_in_every_microbatch() -> None:
    """ZeRO 2 has the gradient memory of ZeRO 3 and its reductions; ZeRO 1 sums whole gradients, once."""
    held, moved = [], []
    for zero in (1, 2, 3):
        of = priced("llama3-8b", f"tp=2,zero={zero}", cluster="h100-80g-sxm:8", batch=32)
        held.append(of.memory_bytes["gradients"])
        rows = of.ledger.where(op="gradients", collective="reduce_scatter").rows()
        moved.append(sum(row["count"] * row["payload_bytes"] for row in rows))
    assert held == pytest.approx([held[0], held[0] / 4, held[0] / 4])
    assert moved == pytest.approx([moved[0], 8 * moved[0], 8 * moved[0]])


# --- known mistakes of others ------------------------------------------------------------------


def test_full_recomputation_is_one_more_forward_not_prefix_sums() -> None:
    """A simulator summed recomputed layers as prefixes: 7.6 times the forward."""
    with_it, without = (priced(plan=f"tp=8,pp=8,{key}attention=unfused") for key in ("recompute=full,", ""))
    layers = without.ledger.where(phase="forward", module=("layer.attention", "layer.mlp"))
    again = with_it.ledger.where(phase="recompute")
    assert again.total("flop") == pytest.approx(layers.total("flop"), rel=1e-12)
    assert len(without.ledger.where(phase="recompute")) == 0


@pytest.mark.parametrize(("model", "plan", "left_out"), table("tables")["early_stop"])
def test_early_stop_leaves_out_what_follows_the_last_kept(model: str, plan: str, left_out: list[str]) -> None:
    rows = priced(model, f"recompute=full,zero=3,{plan}", cluster="h200-sxm:64").ledger.rows()
    ops = [(row["module"], row["op"], row["phase"]) for row in rows if "layer" in row["module"]]
    once = Counter(one[:2] for one in ops if one[2] == "forward")
    once.subtract(Counter(one[:2] for one in ops if one[2] == "recompute"))
    assert {name for (_, name), count in once.items() if count} == {*left_out}


def test_states_of_experts_lie_on_all_their_replicas() -> None:
    plans = (f"tp=4,ep={ep},etp=1,zero=1" for ep in (1, 2, 4))
    found = {priced("mixtral-8x7b", plan).memory_bytes["optimizer"] for plan in plans}
    assert len(found) == 1


def test_an_evaluation_runs_on_the_software_of_the_training() -> None:
    job = {"model": "qwen3-30b-a3b", "cluster": "tpu-v5p:64", "plan": "tp=8,ep=8", "batch": 64}
    assert mw.estimate(**job, kind="evaluate").step_s < 0.5 * mw.estimate(**job).step_s


# --- layers on stages -------------------------------------------------------------------------------

SMALL = ("llama3-8b", "gpt3-175b", "qwen3-0.6b", "llama3-70b")
SLOWER = {"llama3-8b": ["even"], "llama3.2-1b": ["even"], "nemotron-3-nano": ["even", "5-7-7-7-7-7-7-5"]}


@settings(max_examples=40)
@given(
    st.sampled_from(SMALL), st.integers(4, 11), st.integers(2, 4), st.sampled_from(["1f1b", "zb-h1", "gpipe"])
)
def test_no_placement_has_a_faster_slowest_stage(name: str, layers: int, pp: int, schedule: str) -> None:
    model = replace(mw.find_model(name), num_layers=layers)
    of = mw.estimate(model, f"h100-80g-sxm:{pp}", f"pp={pp},schedule={schedule}", batch=32, seq=1024)
    seconds = [part.forward_s + part.backward_s + part.weight_s for part in of.step.of.by_part]
    embedding, layer, head = map(float, seconds)
    slowest = min(
        max(sizes[0] * layer + embedding, *(size * layer for size in sizes[1:-1]), sizes[-1] * layer + head)
        for sizes in itertools.product(range(layers + 1), repeat=pp)
        if sum(sizes) == layers
    )
    assert float(of.pace.time.total_s) == pytest.approx(slowest, rel=1e-9)


@pytest.mark.parametrize(("model", "ranks", "plan"), table("tables")["listed_stages"])
def test_a_plan_costs_the_same_listed_and_among_others(model: str, ranks: int, plan: str) -> None:
    """Where layers do not divide, too: an interleaved schedule keeps step."""
    cluster, job = f"h100-80g-sxm:{ranks}", {"batch": 16384, "seq": 1024}
    of = mw.estimate(model, cluster, plan, **job)
    sizes = "-".join(map(str, layers_of_chunks(of.model, of.mesh)))
    assert any(f"stages={sizes};" in note for note in of.notes())
    again = mw.estimate(model, cluster, f"{plan},stages={sizes}", **job)
    assert (again.step_s, again.memory_bytes) == (of.step_s, of.memory_bytes)
    assert not loses_step(of.model, of.mesh)
    for slower in SLOWER.get(model, ()):
        assert of.step_s < mw.estimate(model, cluster, f"{plan},stages={slower}", **job).step_s
    for one in mw.search(model, cluster, plan.replace("vpp=4", "vpp=4|2"), **job).pareto:
        assert mw.estimate(model, cluster, one.plan, microbatch=one.microbatch, **job).step_s == one.step_s


@pytest.mark.parametrize("plan", ["pp=4,vpp=4,ep=64", "pp=8,vpp=2,ep=32", "pp=8,vpp=4,ep=32"])
def test_short_ends_take_as_long_as_they_do_played(plan: str) -> None:
    of = mw.estimate("deepseek-v3", "gb200:256", f"{plan},dtype=fp8", batch=2048, seq=4096)
    assert pipeline_s(of) == pytest.approx(played_s(of), rel=0.02)


# --- the loss: what is fused of it says what it holds and what it moves -----------------------------

LOGITS = 8 * 4096 * 151_936
HEAD_PLAN = "dtype=bf16,zero=0,software={},loss_fusion={},tp={}"
"""Of a small model with a large vocabulary, whose peak is at its head."""


def at_the_head(software: str, fusion: str, tp: int) -> mw.Estimate:
    plan = HEAD_PLAN.format(software, fusion, tp)
    return mw.estimate("qwen3-0.6b", f"h200-sxm:{tp}", plan, batch=8, seq=4096, microbatch=8)


@pytest.mark.parametrize(("dtype", "per_weight"), [("bf16", 12), ("fp32", 8), ("tf32", 8)])
def test_fp32_weights_are_their_own_master(dtype: str, per_weight: int) -> None:
    found = mw.estimate("llama3-8b", "h100:8", f"dtype={dtype},zero=0", batch=8, seq=4096).memory_bytes
    assert found["optimizer"] == per_weight * num_params(find_model("llama3-8b"))


@pytest.mark.parametrize(("software", "fusion", "tp", "held", "moved"), table("tables")["losses"])
def test_kernels_of_a_loss_are_its_memory_and_its_traffic(
    software: str, fusion: str, tp: int, held: float, moved: float
) -> None:
    """Megatron-LM core/tensor_parallel/cross_entropy.py, PyTorch SoftMax.cu, counted by hand."""
    of = at_the_head(software, fusion, tp)
    rows = of.ledger.where(module="head", op="cross_entropy").rows()
    kernels = [row for row in rows if not row["collective"]]
    found = sum(row["count"] * (row["read_bytes"] + row["write_bytes"]) for row in kernels)
    assert found * tp == pytest.approx(moved * LOGITS)
    beyond = of.memory_bytes["buffers"] - at_the_head(software, "in_place", tp).memory_bytes["buffers"]
    assert beyond * tp == pytest.approx((held - 2) * LOGITS)


def test_what_software_fuses() -> None:
    """As it does unless a plan says so; PyTorch's own parts and transformers do not."""
    job = {"cluster": "h100-80g-sxm:8", "batch": 8, "seq": 4096}
    usual = {"megatron-2020": "none", "megatron-2024": "kernels", "torch-2023": "kernels"}
    for software, fusion in usual.items():
        plan = f"tp=8,software={software}"
        stated, left = (priced("llama3-8b", plan + text, **job) for text in (f",loss_fusion={fusion}", ""))
        assert (stated.step_s, stated.memory_bytes) == (left.step_s, left.memory_bytes)


def test_answers_that_are_weighed_last_are_computed_again() -> None:
    """MaxText weighs tokens in their own order: weights of the router need the answers of the experts."""

    def again(software: str, chip: str = "h100", **more: Any) -> set[str]:
        plan = f"recompute=full,zero=3,software={software}"
        rows = mw.estimate("mixtral-8x7b", f"{chip}:64", plan, batch=64, **more).ledger.columns
        return {op for op, phase in zip(rows["op"], rows["phase"], strict=True) if phase == "recompute"}

    assert {"expert_fc2", "to_tokens"} <= again("xla-2024", "tpu-v5p")
    assert {"expert_fc2", "to_tokens"}.isdisjoint(again("torch-2024"))
    padded = again("xla-2024", "tpu-v5p", capacity_factor=1.25)  # a matmul of all experts, a place a row
    assert "expert_fc2" in padded and "to_tokens" not in padded


def test_a_chip_of_one_software_is_priced_under_it() -> None:
    job = {"model": "qwen3-30b-a3b", "cluster": "tpu-v7:64", "batch": 128, "seq": 4096}
    one, *others = (
        mw.estimate(plan=plan, **job)
        for plan in ("ep=8", "ep=8,software=xla-2024", {"ep": 8}, mw.Plan(ep=8), mw.parse_plan("ep=8"))
    )
    assert all((other.step_s, other.plan) == (one.step_s, one.plan) for other in others)
    with pytest.raises(mw.MeshwiseError, match="megatron-2024 does not run on tpu-v7"):
        mw.estimate(plan="ep=8,software=megatron-2024", **job)


def test_without_a_pipeline_no_schedule_keeps_more() -> None:
    job = {"model": "llama3-8b", "cluster": "h100:8", "batch": 64, "seq": 8192}
    kept = [mw.estimate(plan=f"zero=3,schedule={name}", **job) for name in ("1f1b", "gpipe", "zb-h1")]
    assert len({(one.step_s, one.memory_bytes["total"]) for one in kept}) == 1


@pytest.mark.parametrize(("software", "pays"), [("xla-2024", True), ("torch-2024", False)])
def test_xla_hides_no_all_reduce_of_gradients(software: str, pays: bool) -> None:
    """MaxText @e591f30, Llama 2 7B sharded in a node of A3: 1.56 s on 1 node, 1.82 on 2, 2.05 on 16."""
    plan = f"zero=3,zero_group=8,software={software}"
    alone, many = (
        mw.estimate("llama2-7b", f"h100-80g-sxm:{8 * n}", plan, batch=32 * n, seq=4096) for n in (1, 16)
    )
    (row,) = many.ledger.where(op="gradients", collective="all_reduce").rows()
    grown = many.time_s["comm_dp"] - alone.time_s["comm_dp"]
    assert (grown == pytest.approx(row["count"] * row["comm_s"])) == pays


# --- implementations: what fsdp2 is told, and that its grid of plans is its plans -------------------

FSDP2 = "implementation=fsdp2,zero=3"
JOB = {"cluster": "h100-80g-sxm:64", "batch": 256, "seq": 4096}


@pytest.mark.parametrize("plan", ["tp=2,recompute=full", "pp=4,vpp=4", "pp=2,schedule=zb-v"])
@pytest.mark.parametrize("rank", [0, 13, 63])
def test_the_rows_of_any_rank_add_up_to_the_step(plan: str, rank: int) -> None:
    of = priced("llama3-8b", f"{FSDP2},{plan}", **JOB)
    ledger = of.rank_ledger(rank)
    assert ledger.total("time_s") == pytest.approx(of.step_s, rel=1e-12)
    assert set(ledger["rank"]) == {rank}
    if rank == 0:
        assert ledger.to_json() == of.ledger.where(rank=0).to_json()


def test_all_shards_are_the_weights() -> None:
    """Over all ranks the states are 16 bytes a weight, and once more for what tensor parallelism copies."""
    of = priced("llama3-8b", f"{FSDP2},tp=2", **JOB)
    states = {"module": "memory", "op": ("weights", "gradients", "optimizer")}
    held = [of.rank_ledger(rank).where(**states) for rank in range(64)]
    norms = (2 * 32 + 1) * 4096
    total = sum(ledger.total("live_bytes") for ledger in held)
    assert total == 16 * (of.to_json(ledger=False)["model"]["num_params"] + norms)


# --- the time of ops: the bare roofline, and what a real machine adds -------------------------------

GPT3 = find_model("gpt3-175b")


def test_an_ideal_op_takes_its_roofline() -> None:
    on = machine(find_cluster("a100-80g-sxm:8"), "bf16", ideal=True)
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
    real, ideal = (machine(find_cluster(chip), "bf16", ideal=is_ideal) for is_ideal in (False, True))
    for op, ours, best in zip(ops, op_times(ops, real), op_times(ops, ideal), strict=True):
        least_s = 0.95 * best if op.kind == "collective" else ideal.roofline_s(op)[0]
        assert ours >= least_s, op.name


@pytest.mark.parametrize("vocab, halvings", [(50304, 0), (50260, 1), (50258, 2), (50257, 3)])
def test_a_vocabulary_off_16_bytes_takes_its_halvings_longer(vocab: int, halvings: int) -> None:
    on = machine(find_cluster("a100-80g-sxm:8"), "fp16", overheads=NONE)
    pays = replace(on, overheads=Overheads(unaligned_frac=0.5))
    every = head(replace(GPT3, vocab=vocab), Cut(microbatch=1.0, seq=2048.0))
    ops = [op for op in every if op.kind == "matmul"]
    assert len(ops) == 3
    for fast, slow in zip(op_times(ops, on), op_times(ops, pays), strict=True):
        assert slow == pytest.approx(fast * (1.0 + 0.5 * halvings))


def test_launches_that_block_add_up_with_the_kernels() -> None:
    on = machine(find_cluster("a100-80g-sxm:8"), "bf16", overheads=NONE)
    ops = block(GPT3, Cut(microbatch=1.0, seq=2048.0))

    def host_s(blocks: bool) -> float:
        pays = replace(on, overheads=Overheads(host_s=1e-5, blocked_s=8e-6, launches_block=blocks))
        rows = price_parts({"layer": ops}, pays)["layer"].rows
        return sum(row.spent_s for row in rows if row.is_wait and row.phase == "forward")

    launches = sum(op.phase == "forward" and op.kind != "collective" for op in ops)
    assert host_s(False) == 0.0  # the kernels of GPT-3 are longer than their launches
    assert host_s(True) == pytest.approx((1e-5 + 8e-6) * launches)


def test_the_clock_follows_the_cube_root_of_the_power() -> None:
    pays = Overheads(joule_per_flop={"bf16": 1e-12}, full_watts=FULL_WATTS["hopper"])
    assert pays.sustained_flop_per_s("bf16", 700.0) == pytest.approx(700e12)
    assert pays.sustained_flop_per_s("bf16", 87.5) == pytest.approx(350e12)
    assert pays.sustained_flop_per_s("bf16", 0.0) == float("inf")


@pytest.mark.parametrize("chip", ["h100-80g-sxm:8", "b200-sxm:8", "mi300x:8"])
def test_a_slower_chip_sustains_less_too(chip: str) -> None:
    """What-ifs of compute change what a FLOP takes, not the watts."""
    clusters = (changed(find_cluster(chip), {"compute": times}) for times in (1.0, 0.5))
    usual, half = (machine_for(one, Plan(), "train") for one in clusters)
    assert usual.sustained_s(1e15, "bf16") > 0.0
    for one in (half, adverse_machine(usual, Adversity(kernels=0.5))):
        assert one.sustained_s(1e15, "bf16") == pytest.approx(2.0 * usual.sustained_s(1e15, "bf16"))


@pytest.mark.parametrize("chip", ["tpu-v7:64", "trn2:64", "h200-sxm:64"])
def test_what_hides_costs_no_more_than_what_is_hidden(chip: str) -> None:
    """DeepEP's kernels hold cores where a chip has many small ones."""
    plan = f"ep=32,dispatch=per_rank,pp=2,software={software_on(find_cluster(chip).chip) or 'megatron-2024'}"
    plans = (f"{plan},overlap_ep={hides}" for hides in (0, 1))
    open_s, hidden_s = (mw.estimate("qwen3-235b-a22b", chip, one, batch=64).step_s for one in plans)
    assert hidden_s < open_s


@pytest.mark.parametrize(("zero", "ranks"), [(0, 1), (1, 8)])
def test_muon_orthogonalizes_the_matrices_of_blocks(zero: int, ranks: int) -> None:
    """5 (4 n m^2 + 2 m^3) of each, dealt to the ranks by ZeRO; Adam has the rest (arXiv 2502.16982)."""
    plans = (f"recompute=full,zero={zero},optimizer={name}" for name in ("adam", "muon"))
    adam, muon = (mw.estimate("llama3-8b", "h100-80g-sxm:8", one, batch=8) for one in plans)
    matrices = 32 * (2 * [(4096, 4096)] + 2 * [(1024, 4096)] + 3 * [(4096, 14336)])
    peak_s = sum(5 * (4 * n * m**2 + 2 * m**3) for m, n in matrices) / ranks / 989e12
    assert peak_s < muon.time_s["optimizer"] < 2 * peak_s + adam.time_s["optimizer"]
    less = adam.memory_bytes["optimizer"] - muon.memory_bytes["optimizer"]
    assert less == pytest.approx(4 * sum(m * n for m, n in matrices) / ranks)

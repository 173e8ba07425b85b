"""A whole step: published facts, parts that sum, grids against single plans, others' known mistakes."""

from dataclasses import replace

import pytest

from meshwise.cost.simulate import Timeline
from meshwise.estimate.one_plan import TIME_PARTS, Estimate, estimate, model_flop
from meshwise.estimate.step import play, price_step
from meshwise.estimate.timing import machine
from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.model.weights import num_params
from meshwise.plan.mesh import resolve
from meshwise.plan.plan import parse_plan
from meshwise.plan.stages import stages_of
from meshwise.plan.workload import Workload

GIB = 2**30


def priced(
    model: str = "gpt3-175b",
    plan: str = "tp=8,pp=8",
    *,
    cluster: str = "a100-80g-sxm:64",
    batch: int = 64,
    seq: int = 2048,
    microbatch: int = 1,
    kind: str = "train",
    ideal: bool = False,
) -> Estimate:
    load = Workload(batch=batch, seq=seq, microbatch=microbatch, kind=kind)
    return estimate(find_model(model), find_cluster(cluster), parse_plan(plan), load, ideal=ideal)


# --- facts -------------------------------------------------------------------------------------

# Korthikanti et al., arXiv 2205.05198, Table 3 (configurations) and Figure 1 (GiB of the layers on the
# first pipeline stage: parameters and optimizer states; activations without recomputation under tensor
# parallelism; with sequence parallelism and selective recomputation).
FIGURE_1 = {
    "megatron-22b": ("tp=8", 4, 4, 8, 45.56, 59.25, 9.56),
    "gpt3-175b": ("tp=8,pp=8,vpp=3", 64, 1, 64, 45.56, 66.84, 12.35),
    "megatron-530b": ("tp=8,pp=35,vpp=3", 280, 1, 280, 31.64, 114.02, 23.08),
    "megatron-1t": ("tp=8,pp=64", 512, 1, 512, 32.96, 131.25, 26.56),
}


def layers_memory(name: str, extra: str) -> tuple[float, float]:
    """GiB of (states, activations) of the layers alone on the first stage, embedding left out."""
    plan_text, batch, micro, gpus, *_ = FIGURE_1[name]
    model, plan = find_model(name), parse_plan(f"{plan_text},attention=unfused,zero=0,{extra}")
    cluster = find_cluster(f"a100-80g-sxm:{gpus}")
    mesh = resolve(model, plan, Workload(batch=batch, seq=2048, microbatch=micro), cluster)
    first = replace(stages_of(model, mesh)[0], embeddings=0.0, heads=0.0)
    memory = price_step(model, mesh, machine(cluster, "bf16", ideal=True), [first]).stages[0].memory
    states = memory.weights + memory.gradients + memory.optimizer
    return float(states) / GIB, float(memory.activations) / GIB


@pytest.mark.parametrize("name", FIGURE_1)
def test_memory_korthikanti_figure_1(name: str) -> None:
    states, activations, selective = FIGURE_1[name][4:]
    assert layers_memory(name, "sp=0")[0] == pytest.approx(states, rel=2e-3)
    assert layers_memory(name, "sp=0")[1] == pytest.approx(activations, rel=2e-3)
    assert layers_memory(name, "sp=1,recompute=selective")[1] == pytest.approx(selective, rel=2e-3)


@pytest.mark.parametrize(
    ("zero", "bytes_per_param"), [(0, 16.0), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)]
)
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


@pytest.mark.parametrize(
    ("name", "gflop_per_token"), [("deepseek-v2", 155), ("deepseek-v3", 250), ("llama3-405b", 2448)]
)
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
    layer = of.step.parts["layer"]
    assert 1e3 * float(layer.forward_s) == pytest.approx(forward_ms, rel=0.09)
    adding_s = sum(row.spent_s for row in layer.rows if getattr(row, "name", "") == "add_gradients")
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


# --- what must hold ----------------------------------------------------------------------------


def played_pipeline(of: Estimate) -> Timeline:
    return play(of.model, of.mesh, of.step, of.machine, hop_s=float(of.step.hop_s))


def test_uneven_stages_are_played() -> None:
    even = priced(plan="tp=8,pp=4,zero=0", batch=64)
    uneven = priced(plan="tp=8,pp=4,zero=0,stages=30-22-22-22", batch=64)
    assert uneven.step_s > even.step_s
    played = played_pipeline(uneven)
    spent = uneven.time_s
    assert played.makespan_s == pytest.approx(
        spent["bubble"] + spent["comm_pp"] + sum(spent[x] for x in TIME_PARTS[:6]), rel=1e-9
    )


def test_dualpipe_holds_both_ends_of_the_model() -> None:
    """A rank holds stage r and pp - 1 - r and runs half of the microbatches through each."""
    of = priced("llama3-8b", "pp=4,stages=even,schedule=dualpipe,zero=0", cluster="h100-80g-sxm:4", batch=32)
    assert [(s["num_like_it"], s["dense_layers"]) for s in of.to_json(ledger=False)["stages"]] == [
        (2, 16),
        (2, 16),
    ]
    played = played_pipeline(of)
    closed = sum(of.time_s[name] for name in (*TIME_PARTS[:6], "bubble", "comm_pp"))
    assert closed == pytest.approx(played.makespan_s, rel=0.03)


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
    with_it = priced(plan="tp=8,pp=8,recompute=full,attention=unfused")
    without = priced(plan="tp=8,pp=8,attention=unfused")
    layers = without.ledger.where(phase="forward", module=("layer.attention", "layer.mlp"))
    again = with_it.ledger.where(phase="recompute")
    assert again.total("flop") == pytest.approx(layers.total("flop"), rel=1e-12)
    assert len(without.ledger.where(phase="recompute")) == 0

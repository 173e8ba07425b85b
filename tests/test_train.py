"""The training step: the same losses and gradients in every world, the same counts by every instrument."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

from data_tables import DATA, table
from meshwise.model.weights import num_params
from meshwise.runtime.compare_program import compare_program
from meshwise.runtime.dry_run import dry_run
from meshwise.runtime.fakes import Parts
from meshwise.runtime.programs import find_program, make_options, parse_options
from meshwise.runtime.programs.attention_kernels import own_places
from meshwise.runtime.programs.linear_layers import Product
from meshwise.runtime.programs.train import the_model
from ranks import Ranks, compared, run_bare, train_checked

pytestmark = pytest.mark.slow
NUM_RANKS = 4

MODELS = {"llama": str(DATA / "tiny_llama.json"), "gpt": str(DATA / "tiny_gpt2.json")}
MODELS["moe"] = str(DATA / "tiny_mixtral.json")  # four experts, two a token
MODELS["further"] = str(DATA / "tiny_deepseek3.json")  # the same, and predicts one token more
MODELS["mla"] = str(DATA / "tiny_deepseek.json")  # a dense layer, two of routed and shared experts
MODELS["latent"] = str(DATA / "tiny_minicpm3.json")  # latent attention without experts
TRAIN = find_program("train")


def train_options(**values: Any) -> Any:
    return make_options(
        TRAIN, {"seq": 16, "steps": 1, **values, "model": MODELS[values.get("model", "llama")]}
    )


def enough_layers(plan: str) -> int:
    """The fewest that show what `plan` does; 0 is the model's own, which a pipeline may cut unevenly."""
    if any(word in plan for word in ("pp=4", "vpp=2", "zb-v", "dualpipe-v")):
        return 4
    return 0 if "pp=" in plan else 2


# --- numbers: N ranks compute what one does ----------------------------------------------------

PLANS = table("train_plans")


@pytest.mark.parametrize("words", PLANS["one_rank"])
def test_loss_and_gradients_are_those_of_one_rank(words: str, pool: Ranks) -> None:
    """In fp64, to 1e-10 of the largest gradient; several microbatches where there is a pipeline.

    Recorded where the recorder reaches into what is computed, which is what is recomputed; else bare.
    """
    model, batch, plan = words.split()
    values = {"plan": f"{plan},dtype=fp64", "model": model, "batch": int(batch)}
    values["layers"] = enough_layers(plan)
    found = checked(pool, recorded="recompute" in plan, **values)
    assert found["loss"] < 1e-10
    assert found["gradients"] < 1e-10


@pytest.mark.parametrize(
    ("plan", "model"), [("zero=3,dtype=fp8", "llama"), ("ep=2,lora_rank=4,dtype=fp8", "moe")]
)
def test_narrow_products_agree_to_the_sums_of_bf16(plan: str, model: str, pool: Ranks) -> None:
    """Where ranks cast what one process casts, only sums of gradients round apart."""
    found = checked(pool, plan=plan, batch=4, model=model)
    assert found["loss"] < 1e-6
    assert found["gradients"] < 1e-2


def test_narrow_products_are_near_those_in_fp32() -> None:
    """Each product, of both directions, rounds operands: to three bits, gradients to two."""
    x, weight, grad = (torch.randn(*shape) for shape in ((3, 48, 64), (32, 64), (3, 48, 32)))
    x.requires_grad_(), weight.requires_grad_()
    expected = torch.autograd.grad(y := x @ weight.t(), (x, weight), grad)
    narrow = torch.autograd.grad(rounded := Product.apply(x, weight), (x, weight), grad)
    for found, exact in zip((rounded, *narrow), (y, *expected), strict=True):
        assert 1e-3 < (found - exact).norm() / exact.norm() < 0.15


def test_a_difference_is_found(pool: Ranks) -> None:
    """bf16 rounds: the check must see it."""
    assert checked(pool, plan="tp=2,dtype=bf16", batch=4)["gradients"] > 1e-4


def checked(pool: Ranks, plan: str, recorded: bool = False, **values: Any) -> Any:
    """Loss and gradients are held against one process before the optimizer's turn, so there is none."""
    options = train_options(plan=f"{plan},optimizer=none", **values)
    results = pool.call(train_checked, options, recorded)
    assert len({str(outcome.result["losses"]) for outcome, _ in results}) == 1  # every rank knows the loss
    return results[0][1]


def test_losses_fall_alike_in_every_world(pool: Ranks) -> None:
    """Four sequences a step in fp32, three steps: the optimizer is the same too."""

    def losses(ranks: Ranks, plan: str) -> list[float]:
        options = train_options(plan=f"{plan},dtype=fp32", batch=4, steps=3)
        return ranks.call(run_bare, "train", options)[0].result["losses"]

    with Ranks(1) as alone:
        expected = losses(alone, "tp=1")
    found = [losses(pool, plan) for plan in ("tp=2", "pp=2,cp=2")]
    assert all(one == pytest.approx(expected, rel=1e-5) for one in found)
    assert expected[0] > expected[1] > expected[2]


def test_a_ring_rank_holds_the_tokens_that_torch_balances() -> None:
    order = _HeadTailLoadBalancer(24, 3, "cpu")._generate_indices()[0]
    assert torch.cat([own_places(24, 3, rank, torch.device("cpu")) for rank in range(3)]).equal(order.long())


@pytest.mark.parametrize(("rows", "number"), [(7, 3), (2, 5), (8, 4), (10, 4)])
def test_parts_are_those_of_chunk(rows: int, number: int) -> None:
    whole = torch.arange(rows * 3).view(rows, 3)
    chunks = list(whole.chunk(number))
    parts = Parts(whole, number, 0)
    assert all(parts[place].equal(chunk) for place, chunk in enumerate(chunks))
    assert all(parts[place].numel() == 0 for place in range(len(chunks), len(parts)))
    assert parts[-1].numel() == parts[number - 1].numel()


# --- counts: closed form = dry run = run -------------------------------------------------------


@pytest.mark.parametrize("words", PLANS["instruments"])
def test_all_instruments_agree(words: str, pool: Ranks) -> None:
    """FLOP, collectives, states, and the peak of activations, to the last digit."""
    rank, model, batch, plan = words.split()
    options = train_options(plan=plan, batch=int(batch), model=model, layers=enough_layers(plan))
    found = compared(pool, TRAIN, options, ranks=4, rank=int(rank))
    assert set(found.rows[0].values) == {"estimate", "dry_run", "run"}
    assert "saved_bytes" in {row.column for row in found.rows if row.op == "activations"}
    assert found.agree, found.differences()[:3]


@pytest.mark.parametrize("words", PLANS["dry_run"])
def test_estimate_is_dry_run(words: str) -> None:
    ranks, rank, model, *rest = words.split()
    short = ["--seq", "16", "--steps", "1"]
    options = parse_options(TRAIN, ["--model", MODELS.get(model, model), *short, *rest])
    found = compare_program(TRAIN, options, ranks=int(ranks), rank=int(rank), with_run=False)
    assert found.agree, found.differences()[:3]


def test_a_real_model_agrees() -> None:
    """Llama 3 8B, four of its layers, one rank of 64."""
    options = make_options(TRAIN, {"model": "llama3-8b", "plan": "tp=8,dtype=bf16", "seq": 8192, "layers": 4})
    found = compare_program(TRAIN, options, ranks=64, rank=13, with_run=False)
    assert found.agree, found.differences()[:3]
    held = {row.op: row.values["dry_run"] for row in found.rows if row.column == "weight_bytes"}
    norms = (2 * 4 + 1) * 4096  # every tensor-parallel rank keeps them all
    matrices = num_params(the_model(options)) - norms
    assert held["parameters"] == 4 * (matrices / 64 + norms / 8)
    assert held["optimizer"] == 2 * held["parameters"]


def test_gpt3_on_a_pipeline_agrees() -> None:
    """GPT-3 175B, a layer a stage: biases, learned positions, a table that is embedding and head."""
    values = {"model": "gpt3-175b", "layers": 8, "batch": 16, "seq": 2048, "steps": 1}
    options = make_options(TRAIN, {**values, "plan": "tp=8,pp=8,dtype=bf16,recompute=full"})
    for rank in (3, 127):
        found = compare_program(TRAIN, options, ranks=128, rank=rank, with_run=False)
        assert found.agree, found.differences()[:3]
    tied = [row for row in found.rows if row.op == "all_reduce" and row.column == "payload_bytes"]
    assert 4 * 51200 / 8 / 2 * 12288 in {row.values["dry_run"] for row in tied}  # fp32, tp=8, dp=2


# --- what is compared is what is printed -----------------------------------------------------


def test_recomputation_keeps_inputs_and_one_block() -> None:
    """One block's activations while it is done again, and the inputs of all: arXiv 2205.05198, section 4."""
    kept = []
    for layers, kind in ((1, "none"), (3, "none"), (3, "full")):
        options = train_options(plan=f"tp=2,dtype=bf16,recompute={kind}", layers=layers)
        ledger = dry_run("train", options, ranks=2, device="cpu").ledger
        kept.append(ledger.where(module="states", op="activations").total("saved_bytes"))
    alone, none, full = kept
    block_input = 16 / 2 * 32 * 2  # tokens of the rank, hidden width, bytes
    assert full == 2 * block_input + (none - alone) / 2


def test_a_dry_run_takes_two_steps_and_says_so(meshwise: Any) -> None:
    """The second begins with the optimizer's states, which are there at the peak; a third is like it."""
    words = ("--model", MODELS["llama"], "--plan", "zero=1", "--seq", "16", "--device", "cpu")
    peaks = {}
    for steps in ((), ("--steps", "1"), ("--steps", "3")):
        document = meshwise("dryrun", "train", "--ranks", "4", *words, *steps, "--json").document
        peaks[document["num_steps"]] = document["peak_bytes"]
    assert peaks[1] < peaks[2] == peaks[3]
    assert "peak memory of 2 steps" in meshwise("dryrun", "train", "--ranks", "4", *words).out


def test_a_run_is_profiled(meshwise: Any, tmp_path: Path) -> None:
    """torch's profiler watches all tensors from before the weights are made."""
    words = ("--model", MODELS["llama"], "--plan", "tp=2", "--seq", "16", "--profile", str(tmp_path))
    assert meshwise("run", "train", "--ranks", "2", *words, "--json").document["num_steps"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.json", "rank-1.json"]

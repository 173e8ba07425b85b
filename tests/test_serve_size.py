"""How many GPUs: the screen agrees with pass prices and the simulation, trade-offs are, prices add up."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tables import csv_rows, table
from meshwise.core.each import telling
from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.serve import serving as est
from meshwise.serve.answer import parse_prices
from meshwise.serve.engine import ENGINES
from meshwise.serve.load import Fleet, cost, under_load
from meshwise.serve.requests import Lengths, at_rate
from meshwise.serve.screen import BATCHES, Screen, screen
from meshwise.serve.simulate import LatencyLimits
from meshwise.serve.size import Sizing, Wanted, size
from meshwise.serve.stationary import RequestStream

ENGINE = replace(ENGINES["vllm"], launch_frac=1.0)
"""Of one that does not compile its layers, so that its host binds passes of prompts."""
LENGTHS = {"prompt": 1024, "output": 128}


def screened(model: str, cluster: str, **fixed: Any) -> Screen:
    return screen(partial(est.serving, find_model(model), **LENGTHS), find_cluster(cluster), fixed, ENGINE)


def sized(
    model: str, cluster: str, rate: float, ttft_s: float, tpot_s: float, *, pools: str = "",
    prices: dict[str, float] | None = None, **fixed: Any,
) -> Sizing:  # fmt: skip
    requests = at_rate(rate, Lengths(**LENGTHS), num=400)
    limits = LatencyLimits(ttft_s, tpot_s)
    load = Wanted(engine=ENGINE, requests=requests, limits=limits, pools=pools, usd_per_gpu_hour=prices)
    clusters = [find_cluster(name) for name in cluster.split(",")]
    return size(partial(est.serving, find_model(model), **LENGTHS), clusters, fixed, load)


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b"])
def test_a_layout_of_the_grid_is_the_layout_alone(model: str) -> None:
    found = screened(model, "h200-sxm:8", dtype=("fp8",))
    for i, of in enumerate(found.instances):
        assert of.cluster.num_chips == found.num_chips[i, 0]
        assert found.most[i, 0] == est.max_sequences(of)
        assert found.pass_s[i] == pytest.approx(est.token_pass(of, BATCHES).total_s)
        assert found.prompt_s[i, 0] == pytest.approx(est.prompt_s(of))


def test_what_is_chosen_holds_under_the_load_and_is_within_the_cluster() -> None:
    heard: list[str] = []
    with telling(lambda done, total: None, heard.append):
        found = sized("llama3-8b", "h100-80g-sxm:16", 30.0, 0.5, 0.02)
    best = found.best
    assert f"layouts simulated: {len(found.simulated)}; {best.fleet.num_chips} GPUs hold the load" in heard
    assert best.within_frac >= 0.9 and best.fleet.num_chips <= 16
    assert {one.fleet.prefill is None for one in found.bests} == {True, False}  # one pool, and two
    for one in found.bests:
        kind = [other for other in found.simulated if other.kind == one.kind]
        assert one.rank == min(other.rank for other in kind if other.holds)  # limits are farthest
        assert all(other.rank[0] <= one.rank[0] for other in kind)


def test_with_prices_the_cheapest_wins_and_without_the_fewest() -> None:
    """B200 at four times the price of H100: fewer of them hold the load, and cost more."""
    prices, asked = {"h100-80g-sxm": 2.0, "b200-sxm": 8.0}, ("llama3-8b", "h100-80g-sxm:16,b200-sxm:16")
    fewest, cheapest = (sized(*asked, 30.0, 0.5, 0.02, prices=usd).best for usd in (None, prices))
    assert fewest.kind[1] == "b200-sxm" and cheapest.kind[1] == "h100-80g-sxm"
    assert cheapest.fleet.num_chips > fewest.fleet.num_chips
    assert cheapest.usd_per_hour < replace(fewest, usd_per_gpu_hour=prices).usd_per_hour


@pytest.mark.parametrize(("pools", "has_prefill"), [("one", False), ("two", True)])
def test_either_kind_of_pools_can_be_ruled_out(pools: str, has_prefill: bool) -> None:
    found = sized("llama3-8b", "h100-80g-sxm:16,mi300x:16", 10.0, 0.5, 0.02, pools=pools)
    assert found.simulated and all(one.kind[0] in (None, one.kind[1]) for one in found.choices)  # of a vendor
    assert all((one.fleet.prefill is not None) == has_prefill for one in found.choices + found.simulated)


def test_headroom_is_the_traffic_that_still_holds() -> None:
    """One notch of MORE_TRAFFIC further the limits break, as longer simulations say too."""

    def stream(rate: float) -> RequestStream:
        return RequestStream(lambda num: at_rate(rate, Lengths(**LENGTHS), num=num), rate, most=8_000)

    asked = Wanted(engine=ENGINE, requests=stream(30.0), limits=LatencyLimits(0.5, 0.02), pools="one")
    make = partial(est.serving, find_model("llama3-8b"), **LENGTHS)
    found = size(make, [find_cluster("h100-80g-sxm:16")], {}, asked)
    best, rate, limits = found.best, 30.0 * (1.0 + found.headroom_frac), asked.limits
    assert len({one.fleet for one in found.simulated}) == len(found.simulated)  # each fleet once
    loads = (under_load(best.fleet, stream(more), best.load.engine, limits) for more in (rate, 1.5 * rate))
    assert [load.within_limits_frac >= 0.9 for load in loads] == [True, False]


def test_a_cluster_that_is_too_small_is_told_what_would_do(meshwise: Any) -> None:
    few = sized("llama3-8b", "h100-80g-sxm:2", 100.0, 0.5, 0.02)
    assert few.best is None and few.too_large is not None and few.simulated == ()
    told = meshwise(*BASE, "--rate", "1000", *LIMITS[2:], "--json")
    assert told.code == 1 and told.document["sizing"]["too_large"] and told.document["plan"] is None
    most = few.too_large.fleet.num_chips
    enough = sized("llama3-8b", f"h100-80g-sxm:{2 * most}", 100.0, 0.5, 0.02)
    assert enough.too_large is None and 2 < enough.best.fleet.num_chips <= most


RANKS = {"tp": (1,), "ep": (8,), "dtype": ("fp8",)}
"""A rank waits for the prompts of others, and all of them for the host, which launches their kernels."""
QWEN = ("qwen3-30b-a3b", "h200-sxm:32", 100.0, 0.5, 0.012)
DEEPSEEK = ("deepseek-v3", "h200-sxm:64", 10.0, 0.24, 0.02)


@pytest.mark.parametrize(("asked", "fixed"), [(QWEN, {}), (DEEPSEEK, RANKS)])
def test_no_worker_of_the_best_can_be_spared(asked: Any, fixed: Any) -> None:
    """Of three workers for prompts in closed form two do; computed prompts wait for a place to decode."""
    best = sized(*asked, **fixed).best
    pools, engine = ("workers", "prefill_workers"), best.load.engine
    fewer = [{name: num - 1} for name in pools if (num := getattr(best.fleet, name)) > 1]
    loads = [under_load(replace(best.fleet, **less), best.load.requests, engine) for less in fewer]
    assert loads and not any(best.load.limits.hold(load.served) for load in loads)


@pytest.mark.parametrize(
    ("model", "cluster", "fixed"), [("llama3-8b", "h100-80g-sxm:1", {}), ("deepseek-v3", "h200-sxm:8", RANKS)]
)
def test_closed_form_and_simulation_agree_below_saturation(model: str, cluster: str, fixed: Any) -> None:
    found = screened(model, cluster, **fixed)
    j = int(np.searchsorted(BATCHES, 16))
    requests = at_rate(float(found.rate[0, j]) * 0.98, Lengths(**LENGTHS), num=1500)
    load = under_load(Fleet(found.instances[0]), requests, ENGINE)
    assert load.served.tpot_s.mean() == pytest.approx(float(found.token_s[0, j]), rel=0.2)
    assert load.served.ttft_s.mean() == pytest.approx(float(found.first_s[0, j]), rel=0.3)


def test_prices_pay_for_all_gpus() -> None:
    of = screened("llama3-8b", "h100-80g-sxm:1").instances[0]
    requests = at_rate(5.0, Lengths(**LENGTHS), num=300)
    for fleet in (Fleet(of, 2), Fleet(of, 2, of, 1)):
        load = under_load(fleet, requests, ENGINE)
        paid = cost(load, {"": 3.0})
        assert paid["usd_per_hour"] == pytest.approx(3.0 * fleet.num_chips)
        sums = 1024 * paid["usd_per_million_input_tokens"] + 128 * paid["usd_per_million_output_tokens"]
        assert 300 * sums / 1e6 == pytest.approx(paid["usd_per_hour"] * load.served.span_s / 3600)
    halves = replace(requests, blocks=((0,),) * 300, block_tokens=512)
    alone, shared = (cost(under_load(Fleet(of), one, ENGINE), {"": 3.0}) for one in (requests, halves))
    name = "usd_per_million_input_tokens"  # a cache holds half of each prompt
    assert shared[name] == pytest.approx(alone[name] / 2, rel=0.05)
    assert parse_prices("h100-80g-sxm=2.5,b200-sxm=4") == {"h100-80g-sxm": 2.5, "b200-sxm": 4.0}


# --- the command ---------------------------------------------------------------------------------

BASE = ("serve", "llama3-8b", "--cluster", "h100-80g-sxm:4,h200-sxm:4", "--prompt", "512", "--output", "64")
LIMITS = ("--rate", "10", "--ttft-ms", "500", "--token-ms", "20", "--num-requests", "200")


def test_command_names_layout_workers_and_price(meshwise: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ("--csv", str(tmp_path / "all.csv"), "--plot", str(tmp_path / "trade.svg"), "--price", "2")
    document = meshwise(*BASE, *LIMITS, *files, "--json").document
    best = document["sizing"]["best"]
    assert best["holds"] and best["num_gpus"] >= 1 and document["ttft_s"] == best["simulated_ttft_s"]
    assert document["usd_per_hour"] == pytest.approx(2 * best["num_gpus"])
    rows = csv_rows(tmp_path / "all.csv")
    assert {row["chip"] for row in rows} == {"h100-80g-sxm", "h200-sxm"}
    assert "<svg" in (tmp_path / "trade.svg").read_text()
    free = meshwise(*BASE, "--pareto", "--json").document["sizing"]  # trade-offs need no load
    users = [row["tokens_per_s_per_user"] for row in free["pareto"]]
    assert len(users) > 2 and users == sorted(users, reverse=True) and free["best"] is None
    shown = meshwise(*BASE, *LIMITS).out
    assert "trade-offs" in meshwise(*BASE, "--pareto").out
    assert re.match("1 GPU holds.*max_sequences=", shown) and "why so many" not in shown


@pytest.mark.parametrize(("job", "chip", "num"), table("tables")["serve"]["fewest"])
def test_the_fewest_are_what_one_simulation_says(meshwise: Any, job: str, chip: str, num: int) -> None:
    found = meshwise("serve", *job.split(), "--cluster", f"{chip}:{num}", "--json").document
    alone = meshwise("serve", *f"{job} --cluster {chip}:1 --plan tp=1 --workers {num} --json".split())
    assert alone.code == 0 and alone.document["ttft_s"] == found["ttft_s"]


def test_limits_that_nothing_keeps_are_a_no(meshwise: Any) -> None:
    few = ("serve", "deepseek-v3", "--cluster", "h200-sxm:8", "--plan", "dp=8,ep=8", "--ttft-ms", "300")
    for words in ((*BASE, "--rate", "10", "--token-ms", "0.01"), (*few, "--rate", "4", "--token-ms", "20")):
        told, document = meshwise(*words), meshwise(*words, "--json").document
        assert told.code == 1 and "no layout of this cluster fits and keeps the limits" in (out := told.out)
        assert ("less than" in out) != ("would hold them" in out) and "out of memory" not in out
        assert document["sizing"]["least_tpot_s"] > 1e-5 and document["passes"] == []
        assert {document[name] for name in ("cluster", "plan", "first_token_s", "max_sequences")} == {None}


@pytest.mark.parametrize(("job", "instances", "gpus"), table("tables")["serve"]["without_a_layout"])
def test_a_cluster_without_a_layout_is_answered(meshwise: Any, job: str, instances: int, gpus: int) -> None:
    """tp=64 of 64 GPUs is refused: instances of a node, or of so many as the model needs."""
    document = meshwise("serve", *job.split(), "--json").document
    assert (document["num_instances"], document["cluster"]["num_chips"]) == (instances, gpus)
    assert document["max_sequences"] > 0

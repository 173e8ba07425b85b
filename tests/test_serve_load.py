"""Serving under load: closed forms of queues, conservation, what engines do differently, traces, command."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import meshwise as mw
from data_tables import table
from meshwise.core.errors import DataError, MeshwiseError
from meshwise.serve import measured, serving as est
from meshwise.serve.engine import ENGINES
from meshwise.serve.instance import ServingWorker
from meshwise.serve.load import Fleet, traffic, under_load
from meshwise.serve.pass_times import first_token_s, tabulate
from meshwise.serve.requests import Lengths, Requests, at_rate, in_closed_loop, read_requests
from meshwise.serve.router import parse_router
from meshwise.serve.simulate import Pools, simulate
from servers import BARE, NO_LIMIT, ONE_AT_A_TIME, VLLM, alone, passes, server

WRONG, TABLES = table("wrong_inputs"), table("serving")
TRACES, POINTS, POOLS = (TABLES[name] for name in ("traces", "points", "pools"))

# --- closed forms --------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.2, 0.6, 0.8])
@pytest.mark.parametrize("ratio", [1.0, 0.2])
def test_waiting_is_that_of_a_queue_with_one_server(load: float, ratio: float) -> None:
    """M/D/1 and M/G/1: Lindley's recursion to the last digit."""
    mean = 500 * (1 + ratio)
    requests = at_rate(load / (1e-3 * mean), Lengths(1000, 1, ratio), num=4_000)
    served = alone(requests, ONE_AT_A_TIME, passes(token_s=1e-3), NO_LIMIT)
    service = 1e-3 * np.array(requests.prompt)
    wait = served.ttft_s - service
    lindley = [0.0]
    for gap, taken in zip(np.diff(requests.arrival_s), service[:-1], strict=True):
        lindley.append(max(0.0, lindley[-1] + taken - gap))
    assert wait == pytest.approx(np.array(lindley), abs=1e-7)


@pytest.mark.parametrize("name", ENGINES)
def test_saturation_throughput(name: str) -> None:
    """A closed loop of B clients: no more than 1 / (p + O t(B) / B) requests a second, and about that."""
    tokens, output, clients = 1000, 200, 64
    times = passes(fixed_s=5e-3, token_s=2e-5, decode_s=1e-4)
    engine = replace(ENGINES[name], **BARE)
    requests = in_closed_loop(clients, Lengths(tokens, output, 0.8), num=40 * clients)
    served = alone(requests, engine, times, NO_LIMIT)
    prompt, generated = np.mean(requests.prompt), np.mean(requests.output)
    decode_s = 5e-3 + clients * 1e-4
    most = 1 / (2e-5 * prompt + generated * decode_s / clients)
    assert 0.85 * most < len(served.output) / served.span_s < 1.03 * most


@given(clients=st.integers(1, 40), output=st.integers(2, 60), name=st.sampled_from(list(ENGINES)))
@settings(max_examples=25, deadline=None)
def test_littles_law(clients: int, output: int, name: str) -> None:
    """Clients = requests/s x time of a request, while every client has a request."""
    requests = in_closed_loop(clients, Lengths(300, output, 0.5), num=30 * clients)
    engine = replace(ENGINES[name], reply_s=0.0)  # late answers let clients send the last ones out of turn
    served = alone(requests, engine, passes(fixed_s=5e-3, token_s=1e-5), NO_LIMIT)
    until = served.sent_s.max()  # when the last request is sent, all clients are still there
    inside = np.minimum(served.last_s, until) - served.sent_s
    assert inside.sum() == pytest.approx(clients * until, rel=1e-9, abs=1e-9)


def test_one_client_waits_for_nobody() -> None:
    """Each request is its prompt's pass and its decode passes, as `estimate` prices them."""
    of = server(prompt=1000, output=50)
    engine = replace(VLLM, prompt_slowdown=ENGINES["vllm"].prompt_slowdown)
    load = under_load(Fleet(of), in_closed_loop(1, Lengths(1000, 50), num=3), engine)
    assert load.served.ttft_s == pytest.approx(first_token_s(of, engine), rel=0.02)
    decode = [est.price_pass(of, of.decode(1.0, 1000.0 + past)).total_s for past in range(49)]
    assert load.served.tpot_s == pytest.approx(np.mean(np.array(decode)), rel=1e-3)


# --- conservation --------------------------------------------------------------------------------


@given(
    data=st.data(), name=st.sampled_from(list(ENGINES)), cache=st.integers(600, 4000),
    max_tokens=st.integers(20, 600), max_sequences=st.integers(1, 40), lag=st.integers(0, 1),
    groups=st.sampled_from([1, 2]),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_every_token_comes_once_and_the_cache_holds(
    data: Any, name: str, cache: int, max_tokens: int, max_sequences: int, lag: int, groups: int
) -> None:
    num = data.draw(st.integers(1, 60))
    draw = np.random.default_rng(data.draw(st.integers(0, 1000)))
    arrival = tuple(np.cumsum(draw.exponential(0.02, num)).tolist())
    closed = data.draw(st.booleans())
    requests = Requests(
        tuple(draw.integers(1, 400, num).tolist()),
        tuple(draw.integers(1, 200, num).tolist()),
        () if closed else arrival,
        data.draw(st.integers(1, num)) if closed else 0,
    )
    engine = replace(ENGINES[name], max_tokens=max_tokens, max_sequences=max_sequences, lag_passes=lag)
    engine = replace(engine, foresees_ends=closed)
    times = replace(passes(fixed_s=4e-3, token_s=1e-5, decode_s=1e-4, past_s=1e-8), groups=groups)
    served = alone(requests, engine, times, cache)
    assert len(served.output) == num
    assert served.num_tokens == sum(requests.output)
    assert served.peak_cache_tokens <= cache
    assert served.peak_sequences <= max_sequences * groups
    assert served.busy_s <= served.span_s + 1e-9
    assert (served.ttft_s > engine.front_s).all()
    assert (served.last_s[served.output == 1] == served.first_s[served.output == 1]).all()
    assert (served.tpot_s >= 4e-3).all()
    if engine.reserve_frac == 1:
        assert not served.num_preemptions


def test_a_full_cache_preempts_or_waits() -> None:
    """Without reservations sequences are computed again; with them they wait, less where ends are known."""
    requests = in_closed_loop(8, Lengths(100, 300), num=40)
    times = passes(fixed_s=5e-3, token_s=1e-5)
    eager, careful = (alone(requests, ENGINES[name], times, 1200) for name in ("vllm", "trtllm"))
    assert eager.num_preemptions > 0 == careful.num_preemptions
    assert careful.peak_sequences == 3  # 400 tokens each
    assert eager.peak_sequences > 3
    uneven, engine = in_closed_loop(8, Lengths(100, 300, 0.5), num=40), ENGINES["trtllm"]
    foreseen = alone(uneven, replace(engine, foresees_ends=True), times, 1200)
    assert foreseen.span_s < 0.95 * alone(uneven, engine, times, 1200).span_s and not foreseen.num_preemptions
    roomy = alone(requests, ENGINES["vllm"], times, NO_LIMIT)
    assert roomy.span_s < min(eager.span_s, careful.span_s)


# --- engines -------------------------------------------------------------------------------------


def test_printed_passes_are_those_of_the_engine(meshwise: Any) -> None:
    """vLLM reads an 8-bit cache on Hopper like one of 16 bits, and pads 33 sequences to 40."""
    base = "serve llama3-8b --cluster h100-80g-sxm:1 --plan tp=1,kv_dtype=fp8 --sequences 33,40"
    load = ("--prompt", "4000", "--output", "200", "--concurrency", "4", "--json")
    words = (*base.split(), *load, "--engine")
    vllm, trtllm = (meshwise(*words, name).document["passes"] for name in ("vllm", "trtllm"))
    bare = meshwise(*base.split(), *load[:4], "--json").document["passes"]
    times = tabulate(server(prompt=4000, output=200, kv_dtype="fp8"), ENGINES["vllm"], 4200, 40)
    for a, b, c in zip(vllm, trtllm, bare, strict=True):
        assert a["token_s"] == pytest.approx(times.decode_s(a["sequences"], 4100), rel=1e-3)
        assert a["time_s"]["attention"] > 1.5 * c["time_s"]["attention"]
        assert b["token_s"] == pytest.approx(c["token_s"])
    assert vllm[0]["time_s"]["mlp"] == vllm[1]["time_s"]["mlp"] > bare[0]["time_s"]["mlp"]


def test_a_larger_graph_spares_the_host_launches(meshwise: Any) -> None:
    base = "serve deepseek-v3 --cluster b200-sxm:8 --plan tp=8,ep=8 --prompt 128 --sequences 512,513 --json"
    load = ("--concurrency", "8", "--num-requests", "8")
    bare = meshwise(*base.split(), *load).document
    more = meshwise(*base.split(), *load, "--engine", "vllm,graph_batch=528").document
    (one, beyond), (same, captured) = ([row["token_s"] for row in of["passes"]] for of in (bare, more))
    assert one == same and beyond > 3 * captured > 3 * one
    told = [any("graph_batch=528 captures" in note for note in of["notes"]) for of in (bare, more)]
    assert told == [True, False]


# --- requests ------------------------------------------------------------------------------------


@given(rate=st.floats(0.1, 100), burstiness=st.floats(0.3, 10))
@settings(max_examples=20)
def test_arrivals_have_the_stated_rate_and_burstiness(rate: float, burstiness: float) -> None:
    gaps = np.diff(at_rate(rate, Lengths(100, 10), num=5000, burstiness=burstiness).arrival_s)
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.12)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.35)


@pytest.mark.parametrize("name", TRACES)
def test_traces_of_four_formats(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(TRACES[name])
    read = read_requests(tmp_path / name)
    assert (read.prompt, read.output) == ((200, 100), (20, 10))
    assert read.arrival_s == pytest.approx((0.0, 1.0), abs=1e-6)


@pytest.mark.parametrize(("name", "text", "says"), WRONG["requests"])
def test_a_bad_trace_is_one_sentence(tmp_path: Path, name: str, text: str, says: str) -> None:
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=says):
        read_requests(tmp_path / name)


# --- measured points -------------------------------------------------------------------------------


def test_measured_points_of_two_pools(meshwise: Any, tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text(POOLS)
    document = meshwise("validate", "--serving", str(tmp_path / "points.csv"), "--json").document
    ttft, tpot, rate = (row["predicted"] for row in document["rows"])
    assert 0 < tpot < ttft < 1.0
    output = 128  # which is not one of InferenceX: all answers are as long
    assert rate == pytest.approx(8 * output / (ttft + (output - 1) * tpot) / 16, rel=0.02)


def test_measured_points_are_predicted_or_say_why_not(meshwise: Any, tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text(POINTS)
    document = meshwise("validate", "--serving", str(tmp_path / "points.csv"), "--json").document
    rows = {(row["id"], row["quantity"]): row for row in document["rows"]}
    assert document["warnings"][0].endswith("not read: nodes")
    assert len(rows) == 24  # no rate of the third, without a time to the first token, and of the burst
    for name in ("dense", "cache", "ranks"):
        assert 1e-3 < rows[name, "tpot_s"]["predicted"] < 0.1
    assert rows["dense", "ttft_s"]["predicted"] > rows["dense", "tpot_s"]["predicted"]
    for name, why in TABLES["refused_points"].items():
        assert not rows[name, "ttft_s"]["expressed"]
        assert why in rows[name, "ttft_s"]["reason"]
    assert document["summary"]["tpot_s"]["num_rows"] == 9
    summary = document["summary"]["output_tokens_per_s_per_gpu"]
    assert (summary["num_rows"], summary["num_expressed"]) == (7, 2)
    for row in rows.values():
        assert row["interval"] is None or row["interval"]["p10"] <= row["predicted"] <= row["interval"]["p90"]


INFERENCEX = table("inferencex")


@pytest.mark.parametrize(("changes", "launched"), INFERENCEX["launched"])
def test_engines_are_launched_as_the_benchmark_s_scripts_do(
    changes: dict[str, str], launched: dict[str, Any]
) -> None:
    """Settings, guesses, type of the cache, requests; and the layouts of the script of 2 November 2025."""
    of = measured.point(INFERENCEX["row"] | changes)
    serving, guesses, requests = of.fleet.serving, of.fleet.serving.speculation, of.requests
    found: dict[str, float] = {name: int(getattr(serving.mesh, name)) for name in ("tp", "dp", "ep")}
    found |= {"drafts": guesses.drafts if guesses else 0, "prompts": len({*requests.blocks})}
    found |= {"num": len(requests.prompt), "clients": requests.concurrency, "kept": len(requests.kept)}
    found["shortest"] = round(min(requests.prompt) / max(requests.prompt), 1)
    plan = {"kv_dtype", "weight_dtype", "wide_modules"}
    for name, value in launched.items():
        plan_or_engine = serving.mesh.plan if name in plan else of.engine
        stated = found[name] if name in found else getattr(plan_or_engine, name)
        assert stated == (tuple(value) if isinstance(value, list) else value), name


def test_pools_decode_what_their_recipe_states() -> None:
    """Three workers of eight, as `ctx1_gen3_tep16_batch8` says: of 30 clients six wait for a place.

    A pass of the pool of prompts has two of them on each rank, as its `max_batch_size` says.
    """
    row = INFERENCEX["row"] | INFERENCEX["three_workers"]
    assert measured.point(row).engine.max_sequences == 8
    prompts = measured.point(row).engine.of_prompts
    assert (prompts.max_tokens, prompts.max_sequences) == (2048, 2)
    assert measured.point(row | {"concurrency": "60"}).engine.max_sequences == 16
    served = measured.simulated(row).simulated
    assert served.peak_sequences == 24
    assert 20 < float((served.last_s - served.first_s).sum()) / served.span_s < 24


def test_lengths_are_drawn_around_the_stated_means(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    drawn = Lengths(2000, 100, sigma=0.5).draw(40_000, rng)
    assert np.mean((drawn.prompt, drawn.output), axis=1) == pytest.approx([2000, 100], rel=0.02)
    assert np.log(drawn.prompt).std() == pytest.approx(0.5, rel=0.02)
    assert min(Lengths(1, 1, sigma=2.0).draw(1000, rng).output) == 1
    load: Any = {"prompt": 1024, "output": 512, "rate": 3.0, "length_sigma": 0.7, "num_requests": 500}
    cut = mw.serve("llama2-7b", "h100-80g-sxm:1", "tp=1", **load).load
    assert cut.requests.longest <= 4096 and any("were drawn again" in note for note in cut.notes)
    (tmp_path / "lengths.csv").write_text("prompt,output\n700,9\n50,90\n")
    found = read_requests(tmp_path / "lengths.csv")
    assert not found.arrival_s
    asked = traffic(2048, 256, rate=3.0, trace=found, num_requests=500)
    assert len(asked.arrival_s) == 500
    assert set(zip(asked.prompt, asked.output, strict=True)) == {(700, 9), (50, 90)}
    with pytest.raises(MeshwiseError, match="give rate or concurrency"):
        traffic(2048, 256, trace=found)


# --- pools and prefixes ---------------------------------------------------------------------------


@given(prefills=st.integers(1, 3), decodes=st.integers(1, 3), clients=st.integers(1, 12))
@settings(max_examples=20)
def test_separate_pools_conserve_tokens_and_keep_prompts_out_of_decoding(
    prefills: int, decodes: int, clients: int
) -> None:
    requests = in_closed_loop(clients, Lengths(500, 20, 0.5), num=40)
    times = passes(fixed_s=4e-3, token_s=1e-4)
    worker = ServingWorker(times, NO_LIMIT)
    pools = Pools(worker, decodes, worker, prefills, transfer_s=1e-3)
    served = simulate(requests, pools)
    assert served.num_tokens == sum(requests.output)
    assert served.tpot_s.max() == pytest.approx(4e-3)  # nothing but decode passes
    assert (served.ttft_s >= 4e-3 + 1e-4 * np.array(requests.prompt) + 1e-3 - 1e-9).all()


def test_a_pool_of_prompts_takes_as_many_of_them_as_it_is_told() -> None:
    """Six prompts at once, two in a pass of 40 ms: their first tokens come by pairs."""
    requests = Requests((100,) * 6, (1,) * 6, concurrency=6)
    pair = ServingWorker(passes(fixed_s=40e-3, engine=replace(VLLM, max_sequences=2)), NO_LIMIT)
    served = simulate(requests, Pools(ServingWorker(passes(), NO_LIMIT), 1, pair))
    assert served.ttft_s == pytest.approx([0.04, 0.04, 0.08, 0.08, 0.12, 0.12])


def test_frontends_that_count_on_their_own_send_to_one_worker_at_once() -> None:
    """Workers of one place each, as many as clients: with one count nobody waits, with ten many do."""
    requests = in_closed_loop(7, Lengths(100, 100), num=350)
    engine = replace(VLLM, max_sequences=1)

    def waits_s(router: str) -> float:
        worker = ServingWorker(passes(fixed_s=1e-3, engine=engine), NO_LIMIT)
        served = simulate(requests, Pools(worker, 7, router=parse_router(router)))
        shares = np.bincount(served.replica, minlength=7) / 350
        assert shares.min() > 0.05 and shares.max() < 0.3
        return float((served.start_s - served.sent_s).mean())

    assert waits_s("round-robin") == 0.0
    assert waits_s("round-robin=10") > 0.05


def test_prompts_that_begin_alike_are_computed_once() -> None:
    n, engine, times = 50, VLLM, passes(token_s=1e-4, decode_s=1e-4)
    requests = Requests((1000,) * n, (10,) * n, concurrency=1, blocks=((7,),) * n, block_tokens=800)
    served = alone(requests, engine, times, NO_LIMIT)
    assert served.num_found == 800 * (n - 1)
    assert served.ttft_s[1:] == pytest.approx(200 * 1e-4)
    assert alone(requests, engine, times, 1100).num_found == 800 * (n - 1)  # a block takes room once
    turns = replace(requests, blocks=((7,), (8,)) * (n // 2))
    assert alone(turns, engine, times, 1500).num_found == 0  # no room for the other one's block


def test_a_pass_takes_as_long_as_the_rank_with_most_prompts() -> None:
    """Three prompts on two ranks, which wait for each other: one each, then the third at the time limit."""
    times = replace(passes(fixed_s=1.0, token_s=1e-3), groups=2)
    engine = replace(ENGINES["trtllm"], **BARE, max_tokens=1000)
    requests = Requests((500, 500, 500), (50, 50, 50), concurrency=3)

    def first_s(**settings: int) -> list[float]:
        worker = ServingWorker(replace(times, engine=replace(engine, **settings)), NO_LIMIT, ranks=2)
        return simulate(requests, Pools(worker)).first_s.tolist()

    assert first_s() == pytest.approx([2.0, 2.0, 2.0])  # 1,000 tokens on one rank, 500 on the other
    assert first_s(max_tokens=600) == pytest.approx([1.5, 1.5, 1.5 + 1.501])
    assert first_s(max_tokens=600, align_passes=20) == pytest.approx([1.5, 1.5, 1.5 + 20.0 + 1.501])


def test_ranks_that_exchange_nothing_are_servers_of_their_own() -> None:
    """Eight dp ranks of a dense model are eight workers; those that share experts are one engine."""
    requests, engine = at_rate(40.0, Lengths(512, 64), num=400), ENGINES["vllm"]
    lengths = {"prompt": 512, "output": 64}
    ranks = Fleet(server("llama3-8b", "h100-80g-sxm:8", tp=1, dp=8, **lengths))
    workers = Fleet(server("llama3-8b", "h100-80g-sxm:1", tp=1, **lengths), 8)
    one, other = (under_load(fleet, requests, engine) for fleet in (ranks, workers))
    assert one.served.tpot_s == pytest.approx(other.served.tpot_s)
    assert one.to_json()["peak_cache_frac"] == pytest.approx(other.to_json()["peak_cache_frac"])
    assert server("deepseek-v3", "h200-sxm:8", dp=8, ep=8, dtype="fp8").engines == 1

"""Fleets: what caches hold, where routers send, when replicas start; against closed forms, and conserved."""

import math
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings, strategies as st

import meshwise as mw
from data_tables import csv_rows, table
from meshwise.core.errors import DataError, WorkloadError
from meshwise.launch.arguments import framework_arguments, with_version
from meshwise.serve import requests as arrivals
from meshwise.serve.engine import SETTINGS
from meshwise.serve.instance import ServingWorker
from meshwise.serve.kubernetes import SERVERS
from meshwise.serve.load import Fleet, pools_of
from meshwise.serve.prefix_cache import Tier
from meshwise.serve.requests import Lengths, Requests, at_rate, in_sessions, read_requests
from meshwise.serve.router import POLICIES, parse_router
from meshwise.serve.simulate import Autoscaling, Pools, simulate
from servers import NO_LIMIT, ONE_AT_A_TIME, VLLM, on, passes, server

STATED = table("fleets")
TURNS = arrivals.Turns(turns=4, prompt=300, think_s=2.0)


@given(
    router=st.sampled_from(POLICIES), num=st.integers(1, 5), sessions=st.integers(1, 30), data=st.data(),
    prefill=st.booleans(), cache=st.sampled_from([4_000, 8_000, NO_LIMIT]), shared=st.sampled_from([0, 100]),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_every_request_of_every_session_is_served_once(
    router: Any, num: int, sessions: int, data: Any, prefill: bool, cache: int, shared: int
) -> None:
    closed = data.draw(st.booleans())
    drawn = Lengths(500, 40, 0.5)
    load = arrivals.in_closed_loop(3, drawn, num=sessions) if closed else at_rate(3.0, drawn, num=sessions)
    requests = in_sessions(load, TURNS, shared)
    tiers = (Tier("host", 3_000, 1e-6), Tier("disk", 50_000, 1e-5))
    worker = ServingWorker(passes(2e-3, 1e-5), cache, tiers)
    served = simulate(
        requests,
        Pools(worker, num, worker if prefill else None, 2, transfer_s=1e-3, router=parse_router(router)),
    )
    assert len(served.output) == 4 * sessions
    assert served.num_tokens == sum(requests.output)
    assert served.peak_cache_tokens <= cache
    assert (served.sent_s <= served.start_s).all()
    assert (served.start_s < served.first_s).all()
    assert (served.found < np.array(requests.prompt)).all()
    assert (served.loaded <= served.found + 1).all()
    for index, before in enumerate(requests.after):
        if before >= 0:
            assert served.sent_s[index] == pytest.approx(served.last_s[before] + requests.think_s[index])


@pytest.mark.parametrize(("router", "times"), [("round-robin", 4), ("prefix", 1)])
def test_each_dp_rank_finds_what_it_has_computed_itself(router: str, times: int) -> None:
    """In turn, 15 prompts meet each of four ranks; a router of prefixes leads each to its own."""
    num, kinds = 8 * 15, 15
    blocks = tuple((i % kinds,) for i in range(num))
    requests = Requests((300,) * num, (2,) * num, concurrency=1, blocks=blocks, block_tokens=300)
    worker = ServingWorker(passes(1e-3), NO_LIMIT, ranks=4)
    served = simulate(requests, Pools(worker, router=parse_router(router)))
    assert (served.found == 0).sum() == times * kinds


def test_turns_of_a_trace_come_after_each_other(tmp_path: Path) -> None:
    """As AIPerf replays them: a turn adds its tokens to all before and their answers."""
    lines = STATED["turns"]
    (tmp_path / "turns.jsonl").write_text("\n".join(lines))
    requests = read_requests(tmp_path / "turns.jsonl")
    assert requests.prompt == (700, 1000, 1350, 512)
    served = on(requests)
    assert served.sent_s[2] == pytest.approx(served.last_s[1] + 2.5)
    assert served.found.tolist() == [0, 512, 1050, 511]
    (tmp_path / "turns.jsonl").write_text(lines[2] + "\n" + lines[2])
    with pytest.raises(DataError, match="line 1: the request has no timestamp"):
        read_requests(tmp_path / "turns.jsonl")


# --- caches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", ["session", "prefix"])
def test_a_cache_of_infinite_size_hits_everything_shared(router: Any) -> None:
    """All but what each turn adds, where its session stays; so seldom that no replica is ever busy."""
    requests = in_sessions(at_rate(0.02, Lengths(500, 40), num=200), TURNS)
    served = on(requests, num=4, router=parse_router(router))
    shared = [0 if before < 0 else requests.prompt[i] - 300 for i, before in enumerate(requests.after)]
    assert served.found.tolist() == shared
    apart = on(requests, num=4, router=parse_router("round-robin"))
    assert served.num_found > 1.5 * apart.num_found > 0


def test_what_left_the_chip_comes_back_over_its_link() -> None:
    """Two prompts in turn, with room for one: each is loaded, in its tokens times the time of one."""
    n = 20
    requests = Requests(
        (1000,) * n, (2,) * n, concurrency=1, blocks=((1,), (2,)) * (n // 2), block_tokens=900
    )
    host = on(requests, 1100, Tier("host", 2000.0, 1e-4))
    assert host.loaded[2:].tolist() == [900] * (n - 2)
    assert host.ttft_s[2:] == pytest.approx(900 * 1e-4 + 2e-3 + 100 * 1e-5)
    disk = on(requests, 1100, Tier("host", 100.0, 1e-4), Tier("disk", 2000.0, 1e-3))
    assert disk.ttft_s[2:] == pytest.approx(900 * 1e-3 + 2e-3 + 100 * 1e-5)
    assert on(requests, 1100).num_found == 0


# --- routers -------------------------------------------------------------------------------------


def test_routers_are_told_apart_by_how_long_requests_wait() -> None:
    """Equal requests in turn wait as in M/D/4, and so do those sent to the least loaded; others do not."""
    worker = ServingWorker(passes(token_s=1e-3, engine=ONE_AT_A_TIME), NO_LIMIT)

    def wait_s(ratio: float, router: Any) -> float:
        requests = at_rate(3.2 * 2 / (1 + ratio), Lengths(1000, 1, ratio), num=8_000)
        waits = simulate(requests, Pools(worker, 4, router=parse_router(router))).ttft_s - 1e-3 * np.array(
            requests.prompt
        )
        return float(waits.mean())

    free = [0.0] * 4
    waits = []
    for second in at_rate(3.2, Lengths(1000, 1), num=8_000).arrival_s:
        free.sort()
        waits.append(max(free[0] - second, 0.0))
        free[0] = max(free[0], second) + 1.0
    assert wait_s(1.0, "round-robin") == pytest.approx(np.mean(waits), rel=1e-6)
    assert wait_s(1.0, "least-loaded") == pytest.approx(np.mean(waits), rel=1e-6)
    assert wait_s(0.05, "least-loaded") < 0.8 * wait_s(0.05, "round-robin")


def test_each_instance_answers_its_own_requests_and_those_of_all_its_engines() -> None:
    """Three replicas at three times the rate are one at it; with three engines a server is thrice as late."""
    once = at_rate(100.0, Lengths(100, 40), num=200)
    thrice = Requests(*(tuple(np.repeat(of, 3)) for of in (once.prompt, once.output, once.arrival_s)))

    def first_s(requests: Requests, num: int, engines: int, reply_s: float = 1e-4) -> Any:
        times = passes(2e-3, engine=replace(VLLM, reply_s=reply_s))
        return simulate(requests, Pools(ServingWorker(times, NO_LIMIT, engines=engines), num)).ttft_s

    at_once_s, alone_s = first_s(once, 1, 1, 0.0), first_s(once, 1, 1)
    assert first_s(thrice, 3, 1)[::3] == pytest.approx(alone_s)
    assert alone_s.mean() > at_once_s.mean() + 1e-4
    assert first_s(once, 1, 3) - at_once_s == pytest.approx(3.0 * (alone_s - at_once_s))
    assert pools_of(Fleet(server(cluster="h100-80g-sxm:4", dp=4), 3), once, VLLM).worker.engines == 4


# --- scaling -------------------------------------------------------------------------------------


def test_replicas_follow_the_load_and_are_paid_for_from_their_start(tmp_path: Path) -> None:
    """A quiet hour, a busy one, a quiet one: replicas as the rates ask for, late by the start-up time."""
    (tmp_path / "day.csv").write_text("second,rate\n0,1\n3600,8\n7200,1\n10800,0\n")
    requests = arrivals.read_rates(tmp_path / "day.csv").requests(Lengths(100, 20), 1)
    (tmp_path / "bad.csv").write_text("second,rate\n0,1\n0,2\n")
    with pytest.raises(DataError, match="line 3: a second must be after the one before"):
        arrivals.read_rates(tmp_path / "bad.csv")
    hours = np.histogram(requests.arrival_s, bins=[0, 3600, 7200, 10800])[0]
    assert hours / 3600 == pytest.approx([1, 8, 1], rel=0.06)
    scaling = Autoscaling(1.5, least=1, most=20, every_s=60.0, start_s=120.0, hold_s=300.0)
    served = on(requests, num=1, router=parse_router("least-loaded"), scaling=scaling)
    assert served.num_tokens == sum(requests.output)

    def alive(second: float) -> int:
        return sum(start <= second < stop for start, stop in served.lives_s)

    assert 1 <= alive(3000.0) <= 2
    assert 6 <= alive(6000.0) <= 8  # ceil(8 / 1.5), and noise
    assert 1 <= alive(10_000.0) <= 2
    started = np.array(sorted(start for start, _ in served.lives_s))
    replica_of = served.replica[(served.sent_s > 3650) & (served.sent_s < 3700)]
    assert set(replica_of) <= set(np.flatnonzero(started < 3700 - 120))
    few = on(requests, num=1, scaling=replace(scaling, most=2))
    assert max(sum(a <= s < b for a, b in few.lives_s) for s in range(0, 10_000, 50)) == 2


# --- the command ---------------------------------------------------------------------------------

JOB = "serve llama3-8b --cluster h100-80g-sxm:1 --plan tp=1 --prompt 1000 --output 60 --sequences 8"
BASE = JOB.split()


def test_command_writes_records_that_agree_with_its_figures(meshwise: Any, tmp_path: Path) -> None:
    words = "--rate 30 --workers 3 --router session --turns 5 --think-s 2 --shared-prefix 300"
    words += " --num-requests 600 --percentile 75 --ttft-ms 60 --json"
    document = meshwise(*BASE, *words.split(), "--csv", str(tmp_path / "records.csv")).document
    rows = csv_rows(tmp_path / "records.csv")
    assert len(rows) == 600
    ttft_s = [float(row["ttft_s"]) for row in rows]
    assert document["ttft_s"]["p75"] == pytest.approx(np.percentile(ttft_s, 75))
    found = sum(int(row["found"]) for row in rows) / sum(int(row["prompt"]) for row in rows)
    assert document["prompt_tokens_found_frac"] == pytest.approx(found) and found > 0.6
    assert document["within_limits_frac"] == np.mean([row["within_limits"] == "True" for row in rows])
    assert len({row["session"] for row in rows}) == 120
    replicas = {row["session"]: row["replica"] for row in rows}
    assert all(replicas[row["session"]] == row["replica"] for row in rows)
    watts = document["power_watts"]
    assert 0.3 * 2100 < watts["gpus"] < 2100 < watts["wall"] + 3 * 300
    tokens_per_s = 3 * document["output_tokens_per_s_per_gpu"]
    assert document["joule_per_output_token"] == pytest.approx(watts["wall"] / tokens_per_s)


def test_an_autoscaled_fleet_costs_what_its_replicas_live(meshwise: Any) -> None:
    words = f"{JOB} --rate 60 --num-requests 8000 --price 2 --json --router least-loaded".split()
    scaled = meshwise(*words, "--autoscale", "utilization=0.8,max=9,start_s=20,every_s=10").document
    rule = scaled["autoscale"]
    assert 1 < rule["mean_replicas"] < rule["most_replicas"] <= 9
    assert scaled["usd_per_hour"] == pytest.approx(2 * rule["mean_replicas"])
    saturated = rule["requests_per_s"] / 0.8
    fixed = meshwise(*words, "--workers", str(math.ceil(60 / (0.8 * saturated)))).document
    assert fixed["e2e_s"]["p99"] < scaled["e2e_s"]["p99"]  # nobody waits for a start
    limits = ("--ttft-ms", "200", "--percentile", "99")
    within = meshwise(*words, *limits, "--autoscale", "sla,min=4,max=9").document
    assert within["autoscale"]["requests_per_s"] < saturated
    assert within["within_limits_frac"] > 0.98


@pytest.mark.parametrize("option", STATED["options"])
def test_no_option_is_dropped(option: str, tmp_path: Path, monkeypatch: Any) -> None:
    """What changes the figures is in the fleet, in its load, or among what is not expressed."""
    assert {*STATED["options"]} == {*signature(mw.serve).parameters, *SETTINGS}
    monkeypatch.chdir(tmp_path)
    for name, text in STATED["files"].items():
        Path(name).write_text(text)
    for case in STATED["options"][option]:
        without = {key: one for key, one in case.items() if one != "" and key != option}
        if option in SETTINGS:
            without["engine"] = case["engine"].partition(",")[0]
        words = {key: one for key, one in (STATED["base"] | case).items() if one != ""}
        found = [mw.serve(**one) for one in (words, STATED["base"] | without)]
        figures = [[one.to_json()[name] for name in ("num_gpus", "ttft_s", "tpot_s")] for one in found]
        assert figures[0] == figures[1] or found[0].deployment != found[1].deployment, case
        assert "Path(" not in str(found[0].deployment), case


def test_a_deployment_says_what_was_simulated_and_its_load_comes_again(meshwise: Any, tmp_path: Path) -> None:
    sessions = ("--rate", "30", "--turns", "3", "--think-s", "1", "--num-requests", "90", "--workers", "4")
    words = (*BASE, *sessions, "--router", "session", "--autoscale", "utilization=0.5,min=2,max=5")
    document = meshwise(*words, "--to", "vllm-stack", "--out", str(tmp_path), "--json").document
    values = yaml.safe_load((tmp_path / "values.yaml").read_text())
    (model,) = values["servingEngineSpec"]["modelSpec"]
    assert (model["replicaCount"], model["requestGPU"]) == (4, 1)
    assert (model["keda"]["minReplicaCount"], model["keda"]["maxReplicaCount"]) == (2, 5)
    trigger = model["keda"]["triggers"][0]["metadata"]
    assert float(trigger["threshold"]) == pytest.approx(document["autoscale"]["requests_per_s"], rel=1e-3)
    counted = f'{{model_name="{document["model"]}"}}[120s])) or vector(0)'
    assert counted in trigger["query"] and trigger["query"].endswith("/ 30")
    assert "{'stabilizationWindowSeconds': 300}" in str(model["keda"]["advanced"])
    other = meshwise(*words, "--engine", "sglang", "--to", "kubernetes", "--json").document["deployment"]
    assert "ScaledObject" not in str(other["files"]) and "of vLLM alone" in str(other["not_expressed"])
    long = meshwise(*words[:-1], f"{words[-1]},hold_s=3601", "--to", "vllm-stack")
    assert long.code == 2 and "more than the 3600 s" in long.err
    arguments = model["vllmConfig"]["extraArgs"]
    assert arguments[arguments.index("--max-num-seqs") + 1] == "1024"
    assert values["routerSpec"]["routingLogic"] == "session"
    replay = ("--requests", str(tmp_path / "load.jsonl"), "--sequences", "8", *words[-6:])
    again = meshwise(*BASE[:6], *replay, "--json")
    assert again.document["ttft_s"]["p50"] == pytest.approx(document["ttft_s"]["p50"], rel=1e-3)
    assert again.document["prompt_tokens_found_frac"] == pytest.approx(document["prompt_tokens_found_frac"])

    few = "serve llama3-8b --cluster h100-80g-sxm:8 --rate 9 --ttft-ms 500 --token-ms 30 --num-requests 300"
    sized = meshwise(*few.split(), "--to", "kubernetes", "--json").document["deployment"]
    assert "pools: kubernetes has one" in str(sized["not_expressed"])

    pools = ("--prefill-plan", "tp=1", "--prefill-workers", "2", "--router", "prefix", "--rate", "5",
             "--num-requests", "50", "--length-ratio", "0.5", "--ttft-ms", "90",
             "--engine", "vllm,max_sequences=64,prompt_tokens=4096")  # fmt: skip
    found = meshwise(*BASE, *pools, "--to", "dynamo", "--json").document["deployment"]
    graph = yaml.safe_load(found["files"]["fleet.yaml"])
    kinds = {one["type"]: one["replicas"] for one in graph["spec"]["components"]}
    assert kinds == {"frontend": 1, "prefill": 2, "decode": 1}
    pods = [one["podTemplate"]["spec"]["containers"][0]["args"] for one in graph["spec"]["components"][1:]]
    names = ("--max-num-seqs", "--max-num-batched-tokens")
    limits = [[args[args.index(name) + 1] for name in names] for args in pods]
    assert limits == [["1024", "4096"], ["64", "8192"]]  # each pool has its own
    bench = found["commands"][-1].split()
    mean, ratio = (float(bench[bench.index(f"--random-{of}") + 1]) for of in ("input-len", "range-ratio"))
    assert (mean * (1 - ratio), mean * (1 + ratio)) == pytest.approx((500, 1000), rel=1e-3)
    assert bench[-2:] == ["--goodput", "ttft:90"]
    found = meshwise(*BASE, *pools, "--to", "llm-d", "--json").document["deployment"]
    values = yaml.safe_load(found["files"]["values.yaml"])
    assert [values[pool]["replicas"] for pool in ("prefill", "decode")] == [2, 1]
    assert values["decode"]["parallelism"] == {"tensor": 1, "data": 1, "dataLocal": 1, "workers": 1}
    (container,) = values["prefill"]["containers"]
    assert "--kv-transfer-config" in container["args"] and "--tensor-parallel-size" not in container["args"]
    shared = "serve qwen3.5-35b-a3b --cluster b200-sxm:4 --plan dp=4,ep=4 --engine sglang,max_tokens=9000"
    few = "--speculate drafts=2,accept=0.7 --concurrency 4 --num-requests 8 --to kubernetes"
    flags = meshwise(*shared.split(), *few.split()).out
    said = {"--chunked-prefill-size": "'36000'", "--speculative-algorithm": "NEXTN"}  # tokens of all dp ranks
    assert all(f"{flag}\n        - {value}" in flags for flag, value in said.items())


def test_an_instance_on_several_nodes_is_a_group_of_pods_of_which_one_answers() -> None:
    """Its command is that of a Slurm job on as many nodes; what an operator says by itself is not in it."""
    words = {"model": "deepseek-v3", "cluster": "h100-80g-sxm:16", "num_requests": 20}
    job = mw.launch("deepseek-v3", cluster=words["cluster"], plan="tp=16", batch=1, seq=512, to="vllm")
    _, _, across = job.command.removesuffix(' "$@"').partition("--nnodes")
    across = across.replace("SLURM_NODEID", "LWS_WORKER_INDEX").replace("MASTER_ADDR", "LWS_LEADER_ADDRESS")
    scaled = {"plan": "tp=16", "rate": 1.0, "autoscale": "utilization=0.5,min=1,max=2"}
    files = mw.serve(**words, **scaled, to="kubernetes").deployment.files
    group, service, keda = yaml.safe_load_all(files["fleet.yaml"])
    template = group["spec"]["leaderWorkerTemplate"]
    leader, follower = (template[f"{name}Template"]["spec"]["containers"][0] for name in ("leader", "worker"))
    assert (template["size"], leader["resources"]["limits"]) == (2, {"nvidia.com/gpu": 8})
    assert leader.pop("readinessProbe") and leader == follower and leader["args"][0].endswith(across)
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    assert keda["spec"]["scaleTargetRef"]["kind"] == group["kind"] == "LeaderWorkerSet"
    pooled = {"plan": "dp=16,ep=16", "prefill_plan": "tp=16", "concurrency": 4}
    graph = mw.serve(**words, **pooled, engine="sglang", to="dynamo").deployment.files["fleet.yaml"]
    assert graph.count("nodeCount: 2") == 2 and "--nnodes" not in graph
    values = yaml.safe_load(mw.serve(**words, **pooled, to="llm-d").deployment.files["values.yaml"])
    assert values["multinode"] and values["decode"]["parallelism"]["dataLocal"] == 8
    assert "--port 8200 --data-parallel-size-local 8" in str(values["decode"]["containers"])
    with pytest.raises(WorkloadError, match="to=vllm-stack starts an instance in one pod, not on 2 nodes"):
        mw.serve(**words, **pooled, to="vllm-stack")


@pytest.mark.parametrize(("engine", "chip"), STATED["images"])
def test_image_and_arguments_are_of_one_version(engine: str, chip: str) -> None:
    """And files that arguments name are mounted."""
    words = STATED["base"] | STATED["shared_experts"] | {"engine": engine, "cluster": f"{chip}:4"}
    deployment, _, *maps = yaml.safe_load_all(mw.serve(**words).deployment.files["fleet.yaml"])
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    framework = SERVERS[engine].framework
    assert with_version(framework).split()[-1] in server["image"]
    assert server["resources"]["limits"] == {f"{'amd' if chip == 'mi355x' else 'nvidia'}.com/gpu": 4}
    known = framework_arguments(framework).arguments
    assert all(word in known for word in server["args"] if word.startswith("--"))
    files = {f"/files/{name}": text for one in maps for name, text in one["data"].items()}
    assert files.keys() == {word for word in server["args"] if word.startswith("/")}
    assert "fp8" in " ".join([*server["args"], *files.values()])

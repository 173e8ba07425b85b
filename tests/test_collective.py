"""Collectives: closed forms, what must hold of any machine, published bus bandwidths, and the verb."""

import io
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

import meshwise as mw
from data_tables import table
from meshwise.core.errors import ClusterError, DataError
from meshwise.core.expressions import value_of
from meshwise.cost.collective import Choices, collective_s, domains, peer_all_reduce_s, sent_bytes
from meshwise.estimate.collective import KINDS as VERB_KINDS
from meshwise.estimate.timing import Machine, machine
from meshwise.machine.efficiency import IDEAL, Efficiency, LinkEfficiency, PeerEfficiency, _tables, constants
from meshwise.machine.hardware import Cluster, Level, Link, find_chip, find_cluster, links_of
from meshwise.machine.overheads import find_overheads
from meshwise.report.pages import parts_of, print_parts

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "send")
LINKS = {"links": (Link(300e9, 2e-6, 8.0), Link(25e9, 5e-6, math.inf))}
REAL = constants(find_chip("a100"))

TABLES = table("tables")["collectives"]

kinds = st.sampled_from(KINDS)
efficiencies = st.sampled_from([IDEAL, REAL])
payloads = st.floats(1.0, 1e11)
groups = st.sampled_from([1, 2, 3, 4, 8, 12, 16, 64, 512])
strides = st.sampled_from([1, 2, 8, 64])


@pytest.mark.parametrize(("kind", "group", "stride", "formula", "_"), TABLES["ideal"])
def test_ideal_closed_forms(kind, group, stride, formula, _):
    expected_s = value_of(formula, {})
    assert collective_s(kind, 1e9, group, stride=stride, **LINKS) == pytest.approx(expected_s, rel=1e-12)


@given(kinds, payloads, strides, efficiencies)
def test_a_group_of_one_is_free(kind, payload, stride, efficiency):
    assert collective_s(kind, payload, 1, stride=stride, **LINKS, efficiency=efficiency) == 0.0
    assert sent_bytes(kind, payload, 1) == 0.0


@given(payloads, groups, strides)
def test_reduce_scatter_and_all_gather_make_an_all_reduce(payload, group, stride):
    times = {kind: collective_s(kind, payload, group, stride=stride, **LINKS) for kind in KINDS}
    assert times["reduce_scatter"] + times["all_gather"] == pytest.approx(times["all_reduce"], rel=1e-12)
    sent = {kind: sent_bytes(kind, payload, group) for kind in KINDS}
    assert sent["reduce_scatter"] + sent["all_gather"] == pytest.approx(sent["all_reduce"], rel=1e-12)


@pytest.mark.parametrize(("chip", "kind", "ranks", "busbw", "tolerance"), table("tables")["bus_bandwidths"])
def test_published_bus_bandwidth(chip, kind, ranks, busbw, tolerance):
    of = find_chip(chip)
    seconds = collective_s(kind, 16 * 2**30, ranks, links=links_of(of.levels), efficiency=constants(of))
    assert sent_bytes(kind, 16 * 2**30, ranks) / seconds == pytest.approx(busbw, rel=tolerance)


@pytest.mark.parametrize(("ranks", "size", "formula", "_"), TABLES["peers"])
def test_all_reduce_through_the_peers_memory(ranks, size, formula, _):
    expected_s = value_of(formula, {})
    links = {"link_bytes_per_s": 450e9, "memory_bytes_per_s": 3e12}
    waits = PeerEfficiency(wait_s=1e-6, host_s=2e-5)
    assert peer_all_reduce_s(size, ranks, **links, efficiency=waits) == pytest.approx(expected_s)
    called_s = peer_all_reduce_s(size, ranks, **links, graph=0.0, efficiency=waits)
    assert called_s == pytest.approx(max(2e-5, expected_s + 2 * size / 3e12))
    assert peer_all_reduce_s(size, ranks, **links, library_s=1e-9, efficiency=waits) == 1e-9


def test_a_dispatch_crosses_to_each_node_once():
    """Four nodes of 8, 8 choices: a token meets 4 (1 - (3/4)^8) nodes, three quarters of them others."""
    ranks, choices, token_bytes = 32.0, Choices(8.0), 1e6
    met_ranks, met_nodes = (places * (1 - (1 - 1 / places) ** 8.0) for places in (32.0, 4.0))
    links = (Link(450e9, 0.0, 8.0), Link(50e9, 0.0, math.inf))
    seconds = collective_s("dispatch", met_ranks * token_bytes, ranks, choices=choices, links=links)
    assert seconds == pytest.approx(met_nodes * 0.75 * token_bytes / 50e9)
    spine = (links[0], Link(50e9, 0.0, 16.0), Link(50e9, 0.0, math.inf))  # passed by the same adapter
    assert seconds == collective_s("dispatch", met_ranks * token_bytes, ranks, choices=choices, links=spine)
    assert collective_s("all_to_all", 1e9, ranks, links=spine) == pytest.approx(24 / 32 / 50)


def test_a_dispatch_waits_for_the_few_that_all_others_send_to():
    """Groups of 64 lie 8|56 in racks of 72: each of 8 takes in an eighth of what 56 send to any of them."""
    links = (Link(900e9, 0.0, 72.0).of_job(1152), Link(100e9, 0.0, math.inf))
    met_ranks, met_one_of_8 = 64 * (1 - (63 / 64) ** 8.0), 1 - (7 / 8) ** 8.0
    seconds = collective_s("dispatch", met_ranks * 1e6, 64.0, choices=Choices(8.0), links=links)
    assert seconds == pytest.approx(56 * met_one_of_8 * 1e6 / 8 / 100e9)


@pytest.mark.parametrize(("ranks", "alone"), [(9, 1), (12, 4), (16, 8)])
def test_a_lone_group_waits_for_its_members_in_the_last_node(ranks: int, alone: int) -> None:
    node = (Link(450e9, 0.0, 8.0), Link(50e9, 0.0, math.inf))
    seconds = collective_s("all_to_all", 1e9, float(ranks), links=node)
    assert seconds == pytest.approx((1 - alone / ranks) / 50)


@pytest.mark.parametrize(("job", "ranks", "stride"), table("tables")["on_racks_of_72"])
def test_all_wait_for_the_few_members_that_lie_alone(job: int, ranks: int, stride: int) -> None:
    """Against the domains of every group of a job, one by one."""
    racks = Link(900e9, 0.0, 72.0).of_job(job)
    first = (start + i for start in range(0, job, ranks * stride) for i in range(stride))
    held = [Counter((one + stride * i) // racks.job_ranks for i in range(ranks)).values() for one in first]
    fewest = min(map(min, held))
    assert domains(ranks, stride, racks) == (fewest, max(map(len, held)))
    seconds = collective_s("all_to_all", 1e9, ranks, stride=stride, links=(racks, Link(50e9, 0.0, math.inf)))
    inside_s = (fewest - 1) / ranks / 900
    assert seconds == pytest.approx(max((ranks - fewest) / ranks / 50, inside_s), rel=1e-12)


# --- torus, rails, oversubscription ------------------------------------------------------------


def torus(*shape: int, latency_s: float = 0.0) -> Machine:
    """A pod of TPU v4 with this shape, ideal; axes of a multiple of 4 chips close to rings."""
    levels = (
        Level(name="ici", bytes_per_s=300e9, latency_s=latency_s, torus=shape, ring_multiple=4),
        Level(name="dcn", bytes_per_s=6.25e9, latency_s=1e-5),
    )
    pod = Cluster(name="pod", chip=find_chip("tpu-v4"), num_chips=math.prod(shape), levels=levels)
    return machine(pod, "bf16", ideal=True)


@pytest.mark.parametrize(("kind", "shape", "group", "stride", "formula", "_"), TABLES["torus"])
def test_closed_forms_of_a_torus(kind, shape, group, stride, formula, _):
    expected_s = value_of(formula, {})
    assert torus(*shape).collective_s(kind, 1e9, group, stride) == pytest.approx(expected_s, rel=1e-12)


def test_a_pod_of_tpu_v4_has_its_published_bandwidths():
    """Google Cloud documentation, TPU v4: 24 TB/s of bisection and 1.1 PB/s of all-reduce for 4096 chips."""
    pod = machine(find_cluster("tpu-v4:4096"), "bf16", ideal=True)
    assert 4096 * 1e9 / 4 / pod.collective_s("all_to_all", 1e9, 4096, 1) == pytest.approx(24e12, rel=0.1)
    all_reduce_s = pod.collective_s("all_reduce", 1e9, 4096, 1)
    sent = 4096 * sent_bytes("all_reduce", 1e9, 4096)
    assert sent / all_reduce_s == pytest.approx(1.1e15, rel=0.15)


def of_pods(**last: Any) -> Machine:
    levels = (
        Level(name="nvlink4", ranks=8, bytes_per_s=400e9, latency_s=0.0),
        Level(name="leaf", bytes_per_s=50e9, latency_s=0.0, **last),
    )
    cluster = Cluster(name="pods", chip=find_chip("h100"), num_chips=256, levels=levels)
    return machine(cluster, "bf16", ideal=True)


def test_rails_load_the_links_inside_a_node_with_what_changes_the_rail():
    """8 of 16 parts leave the node; seven eighths of them, and of those that stay, cross NVLink first."""
    rails = of_pods(rails=True)
    inner, outer = rails.base.links
    slow = (inner._replace(bytes_per_s=10e9), outer._replace(bytes_per_s=50e9))
    slow_inside = replace(rails, base=replace(rails.base, links=slow))
    assert slow_inside.collective_s("all_to_all", 1e9, 16, 1) == pytest.approx(7 / 8 / 10)
    assert rails.collective_s("all_to_all", 1e9, 2, 8) == pytest.approx(1 / 2 / 50)
    for kind in KINDS:
        assert rails.collective_s(kind, 1e9, 32, 8) == of_pods().collective_s(kind, 1e9, 32, 8)


def test_an_oversubscribed_level_gives_each_rank_its_share():
    pods = machine(find_cluster("llama3-roce"), "bf16", ideal=True)
    assert pods.collective_s("send", 1e9, 2, 3072) == pytest.approx(7 / 50, rel=1e-3)
    assert pods.collective_s("send", 1e9, 2, 8) == pytest.approx(1 / 50, rel=1e-3)
    whole_pods_s = pods.collective_s("all_gather", 1e12, 2 * 3072, 1)  # 8 adapters a node bind, not the spine
    assert whole_pods_s == pytest.approx(1e12 / (8 * 50e9), rel=0.05)


@pytest.mark.parametrize(("kind", "ranks", "link", "host", "formula"), TABLES["shares"], ids=str)
def test_what_ranks_have_of_the_links_of_a_node(kind, ranks, link, host, formula):
    """Few of a mesh use few of its links; more than two GPUs on PCIe go through their host."""
    node = {"links": (Link(latency_s=0.0, ranks=8.0, **link),)}
    seconds = collective_s(kind, 1e9, ranks, **node, efficiency=Efficiency(inner=LinkEfficiency(**host)))
    assert seconds == pytest.approx(value_of(formula, {}))


@pytest.mark.parametrize(("chip", "pcie", "sizes", "measured_s"), TABLES["pairs"])
def test_pairs_with_a_bridge_meet_over_their_host(chip: str, pcie: int, sizes: Any, measured_s: Any) -> None:
    """Vidur's four GPUs in pairs: PCIe beyond NVLink is no network, and all go through the host."""
    bridge = Level(name="nvlink-bridge", ranks=2, bytes_per_s=300e9, latency_s=1e-6)
    levels = bridge, Level(name=f"pcie{pcie}", bytes_per_s=2e9 * 2**pcie, latency_s=2e-6)
    pairs = Cluster(name="pairs", chip=find_chip(chip), num_chips=8, levels=levels)
    found = mw.collective("all_reduce", pairs, sizes, ranks=4)
    assert [one.time_s for one in found.predicted] == pytest.approx(measured_s, rel=0.12)
    assert all(f"of {link}.link" in note for link, note in zip(("inner", "pcie"), found.notes, strict=True))


@pytest.mark.parametrize(("cluster", "name"), TABLES["networks"])
def test_the_network_is_the_first_level_beyond_the_links_of_a_node(cluster: str, name: str) -> None:
    on = find_cluster(cluster)
    assert constants(on.chip, on.levels).outer == _tables("efficiency.toml")["outer.link"][name]


def test_latency_of_an_all_reduce_grows_with_the_logarithm_of_the_nodes():
    """1 KiB on H100: NCCL's tree climbs log2(nodes) hops; the chains of all nodes run at once."""
    on = {ranks: machine(find_cluster(f"h100:{ranks}"), "bf16") for ranks in (512, 2048, 8192)}
    of_size = [float(each.collective_s("all_reduce", 1024, ranks, 1)) for ranks, each in on.items()]
    assert of_size[2] - of_size[1] == pytest.approx(of_size[1] - of_size[0], rel=0.01)
    assert of_size[2] < 300e-6


# --- the verb ---------------------------------------------------------------------------------------

H200 = ("--cluster", "h200-sxm:16")


@pytest.mark.parametrize("kind", VERB_KINDS)
def test_bus_bandwidth_grows_with_size_up_to_the_links(meshwise: Any, kind: str) -> None:
    rows = meshwise("collective", kind, *H200, "--json").document
    rates = [row["bus_bytes_per_s"] for row in rows]
    assert rates == sorted(rates)
    for row in rows:
        sent = float(sent_bytes(VERB_KINDS[kind], row["payload_bytes"], 16))
        assert row["bus_bytes_per_s"] * row["time_s"] == pytest.approx(sent)
    assert 0.5 * rows[-1]["ceiling_bytes_per_s"] < rates[-1]
    if kind != "all_reduce":  # a switch that adds may exceed a ring
        assert rates[-1] <= rows[-1]["ceiling_bytes_per_s"]


def test_ranks_and_stride_choose_the_links() -> None:
    inside, _ = mw.collective("all_gather", "h200-sxm:16", [2.0**30], ranks=8)
    across, _ = mw.collective("all_gather", "h200-sxm:16", [2.0**30], ranks=2, stride=8)
    assert inside[0].ceiling_bytes_per_s == pytest.approx(450e9)
    assert across[0].ceiling_bytes_per_s == pytest.approx(50e9)
    pair, node = (mw.collective("all_gather", "rtx-4090:8", [1e9], ranks=n)[0][0].time_s for n in (2, 8))
    assert node > 4 * pair  # without peer access the host passes on what eight exchange, not what two do


def test_a_library_that_reduces_all_to_reduce_and_scatter(tmp_path: Path) -> None:
    """Gloo: its reduce-scatter takes as long as its all-reduce, wherever it is priced."""
    links = 'num_chips = 8\nchip = "h100"\nlevels = [{ name = "tcp", bytes_per_s = 1e9, latency_s = 1e-5 }]'
    plain, whole, apart = (tmp_path / f"{name}.toml" for name in ("plain", "whole", "apart"))
    plain.write_text(links)
    apart.write_text(
        links.replace("[{", '[{ name = "node", ranks = 1, bytes_per_s = 1e9, latency_s = 1e-5 }, {')
    )
    whole.write_text(f'reduce_scatter = "all_reduce"\n{links}')
    times = {
        (file, kind): mw.collective(kind, file, [2.0**24])[0][0].time_s
        for file in (plain, whole, apart)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    }
    assert times[whole, "reduce_scatter"] == times[whole, "all_reduce"] == times[plain, "all_reduce"]
    assert times[plain, "reduce_scatter"] < times[plain, "all_reduce"]
    assert times[whole, "all_gather"] == times[plain, "all_gather"]
    assert times[apart, "all_reduce"] == times[plain, "all_reduce"]  # a network alone: no switch adds
    steps = [mw.estimate("llama3-8b", file, "zero=3", batch=8, seq=512).step_s for file in (plain, whole)]
    assert steps[1] > 1.2 * steps[0]
    whole.write_text(f'reduce_scatter = "ring"\n{links}')
    with pytest.raises(ClusterError, match="reduce_scatter"):
        mw.collective("all_reduce", whole, [2.0**24])


def test_measured_times_stand_beside(meshwise: Any, tmp_path: Path) -> None:
    path = tmp_path / "ops.csv"
    path.write_text(
        "hardware,op,dtype,n_gpus,shape,latency_us,kernel_or_library,source\n"
        "H200-SXM-141GB,nccl_all_reduce,fp16,8,bytes=3000000,40,NCCL,mine\n"
        "H200-SXM-141GB,nccl_all_reduce,fp16,4,bytes=5000000,40,NCCL,mine\n"
    )
    words = ("collective", "all_reduce", "--cluster", "h200-sxm:8", "--data", str(path))
    measured = {row["payload_bytes"]: row["measured_s"] for row in meshwise(*words, "--json").document}
    assert measured[3e6] == pytest.approx(40e-6) and 5e6 not in measured
    assert "40 µs" in meshwise(*words).out
    assert "note: tpu-v5p: " in meshwise("collective", "all_reduce", "--cluster", "tpu-v5p:8", "--json").err


def test_measured_collectives_take_the_place_of_predicted_ones(tmp_path: Path) -> None:
    """nccl-tests' output: at its points, between them, beyond as slow a link; every verb says so."""
    ranks = "".join(f"#  Rank  {rank} Group  0 Pid  7 on   node-a device  {rank} H100\n" for rank in range(4))
    rows = "".join(f"  {2**size}  1  float  sum  -1  {us}  1.0  1.0  0  {us}  1.0  1.0  0\n"
                   for size, us in ((20, 50.0), (26, 3200.0)))  # fmt: skip
    output = tmp_path / "all_reduce_perf.txt"
    tests = [
        f"# Collective test starting: {kind}_perf\n{ranks}{rows}" for kind in ("all_gather", "all_reduce")
    ]
    output.write_text("".join(f"[1,0]<stdout>: {line}\n" for line in "".join(tests).splitlines()))
    sizes = [2.0**power for power in (10, 20, 22, 26, 28)]
    times, _ = mw.collective("all_reduce", "h100:8", sizes, collectives=[output])
    assert [one.time_s for one in times] == pytest.approx([50e-6, 50e-6, 200e-6, 3200e-6, 12800e-6])
    assert [one.algorithm for one in times] == ["extrapolated", *["measured"] * 3, "extrapolated"]
    parts = [tmp_path / f"{part}_all_reduce_perf.txt" for part in range(2)]
    for part, row in zip(parts, rows.splitlines(), strict=True):
        part.write_text(f"{ranks}{row}\n")
    assert mw.collective("all_reduce", "h100:8", sizes, ranks=4, collectives=parts)[0] == times
    asked = "llama3-8b", "h100:4", "tp=4,sp=0"
    slow, plain = (mw.estimate(*asked, collectives=files) for files in ([output], []))
    assert slow.step_s != plain.step_s
    found = mw.search("llama3-8b", "h100:4", batch=4, collectives=[output])
    for notes in (slow.to_json()["notes"], found.to_json()["notes"]):
        assert "measured, not predicted (all_reduce_perf.txt): all_reduce among 4" in " ".join(notes)
    console = Console(record=True, width=200, file=io.StringIO())
    print_parts(parts_of(found), console)
    assert "note: measured, not predicted (all_reduce_perf.txt)" in console.export_text()
    unused = mw.estimate("llama3-8b", "h100:8", "tp=8", collectives=[output]).to_json()["notes"]
    assert any(one.endswith("; this step has none") for one in unused)
    for kind, stride in (("broadcast", 1), ("all_reduce", 4)):
        with pytest.raises(DataError, match=f"has no {kind} of 4 ranks {stride} apart"):
            mw.collective(kind, "h100:16", sizes, ranks=4, stride=stride, collectives=[output])
    for text, words in TABLES["refused"]:
        output.write_text(text.format(ranks=ranks, rows=rows))
        with pytest.raises(DataError, match=words):
            mw.estimate(*asked, collectives=[output])


def test_sums_of_a_server_are_those_of_the_kernel_that_was_measured(tmp_path: Path) -> None:
    """NCCL's table says nothing of the small sums that engines do by kernels of their own, whose rows do."""
    rows = "hardware,op,dtype,n_gpus,shape,latency_us,kernel_or_library,source\n"
    files = [tmp_path / f"{op}.csv" for op in ("nccl_all_reduce", "custom_allreduce", "nccl_all_gather")]
    for path in files:
        path.write_text(f"{rows}h100-80g-sxm,{path.stem},bf16,8,bytes=8192,9000,of a_graph,mine\n")
    each = [mw.serve("llama3-8b", "h100:8", "tp=8", collectives=one).to_json() for one in ((), *files)]
    plain, library, kernel, other = (
        [one["first_token_s"], one["prompt_tokens_per_s_per_gpu"]] for one in each
    )
    assert library[0] == plain[0] < kernel[0] and library[1] < plain[1] == kernel[1] and other == plain
    notes = [" ".join(one["notes"]) for one in each]
    assert ["in the engine's own kernel" in one for one in notes] == [False, True, False, False]
    assert ["no pass of this instance takes it" in one for one in notes] == [False, False, False, True]


def test_a_message_takes_the_links_to_one_neighbour() -> None:
    """In a box whose GPUs are joined in pairs, as MI300X's by xGMI, whichever it is."""
    found = [mw.collective("send", "mi300x:8", (2.0**30,), stride=stride)[0] for stride in (1, 2, 4)]
    times = [row.time_s for (row,) in found]
    assert times == pytest.approx([times[0]] * 3) and 2.0**30 / times[0] < 64e9


def test_what_training_reaches_of_roce_has_no_cliff() -> None:
    """nccl-tests, which runs alone, meets all of it."""
    overheads = find_overheads(find_chip("h100-80g-sxm"))
    reached = [overheads.reached_frac("RoCEv2", rate) for rate in (12.5e9, 25e9, 49.9e9, 50e9)]
    assert reached[0] == reached[1] < reached[2] == pytest.approx(reached[3], rel=5e-3) and reached[3] == 1.0
    cluster = find_cluster("h100-80g-sxm:64")
    links = [Level(name=name, bytes_per_s=25e9, latency_s=5e-6) for name in ("rocev2", "infiniband")]
    over = [replace(cluster, chip=replace(cluster.chip, levels=(cluster.levels[0], link))) for link in links]
    (roce,), (infiniband,) = (mw.collective("all_reduce", one, (2.0**30,))[0] for one in over)
    assert roce.time_s == infiniband.time_s

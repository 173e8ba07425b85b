"""Collectives: closed forms, what must hold of any machine, and published bus bandwidths."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.cost.collective import collective_s, members, peer_all_reduce_s, sent_bytes
from meshwise.machine.efficiency import IDEAL, PeerEfficiency, constants
from meshwise.machine.hardware import find_chip

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "send")
LINKS = {
    "link_bytes_per_s": (300e9, 25e9),
    "link_latency_s": (2e-6, 5e-6),
    "link_ranks": (8.0, math.inf),
}
REAL = constants(find_chip("a100"))

kinds = st.sampled_from(KINDS)
efficiencies = st.sampled_from([IDEAL, REAL])
payloads = st.floats(1.0, 1e11)
groups = st.sampled_from([1, 2, 3, 4, 8, 12, 16, 64, 512])
strides = st.sampled_from([1, 2, 8, 64])


@pytest.mark.parametrize(
    ("group", "stride", "domain", "inside"),
    [
        (8, 1, 8, 8),
        (16, 1, 8, 8),
        (16, 2, 8, 4),
        (4, 8, 8, 1),
        (4, 16, 8, 1),
        (2, 1, math.inf, 2),
        (6, 1, 4, 4),
    ],
)
def test_members_of_a_strided_group_in_a_domain(group, stride, domain, inside):
    assert members(group, stride, domain) == inside


@pytest.mark.parametrize(
    ("kind", "group", "stride", "expected_s"),
    [
        # V = 1e9 bytes; A100 node: 8 ranks at 300 GB/s and 2 us, nodes at 25 GB/s and 5 us per rank
        pytest.param("all_gather", 8, 1, 7 / 8 / 300 + 7 * 2e-6, id="ring in one node"),
        pytest.param("all_gather", 8, 8, 7 / 8 / 25 + 7 * 5e-6, id="ring of one rank per node"),
        pytest.param("all_gather", 16, 1, 15 / 16 / (8 * 25) + 14 * 2e-6 + 5e-6, id="eight rings, NICs bind"),
        pytest.param("reduce_scatter", 16, 4, 15 / 16 / (2 * 25) + 8 * 2e-6 + 7 * 5e-6, id="two rings"),
        pytest.param("all_reduce", 8, 1, 2 * (7 / 8 / 300 + 7 * 2e-6), id="reduce-scatter + all-gather"),
        pytest.param("broadcast", 8, 1, 1 / 300 + 7 * 2e-6, id="broadcast passes it on"),
        pytest.param("all_to_all", 16, 1, 8 / 16 / 25 + 5e-6, id="half the peers are in the other node"),
        pytest.param("all_to_all", 8, 1, 7 / 8 / 300 + 2e-6, id="all-to-all in one node"),
        pytest.param("send", 2, 1, 1 / 300 + 2e-6, id="neighbours in a node"),
        pytest.param("send", 4, 8, 1 / 25 + 5e-6, id="neighbours in other nodes"),
    ],
)
def test_ideal_closed_forms(kind, group, stride, expected_s):
    assert collective_s(kind, 1e9, group, stride=stride, **LINKS) == pytest.approx(expected_s, rel=1e-12)


def test_three_levels_take_the_slowest():
    links = {
        "link_bytes_per_s": (900e9, 100e9, 10e9),
        "link_latency_s": (1e-6, 2e-6, 4e-6),
        "link_ranks": (4.0, 16.0, math.inf),
    }
    expected = 63 / 64 / (16 * 10) + 48 * 1e-6 + 12 * 2e-6 + 3 * 4e-6
    assert collective_s("all_gather", 1e9, 64, **links) == pytest.approx(expected, rel=1e-12)


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


@given(kinds, payloads, st.floats(1.0, 100.0), groups, strides, efficiencies)
def test_more_bytes_never_cost_less(kind, payload, factor, group, stride, efficiency):
    def cost_s(size: float) -> float:
        return float(collective_s(kind, size, group, stride=stride, **LINKS, efficiency=efficiency))

    assert cost_s(payload) <= cost_s(payload * factor) * (1 + 1e-12)


@given(kinds, payloads, groups, strides)
def test_no_real_machine_beats_the_ideal_wire(kind, payload, group, stride):
    """Latencies differ in what they count; the bytes on the wire do not, unless the switch adds."""
    wire = LINKS | {"link_latency_s": (0.0, 0.0)}
    ideal_s = collective_s(kind, payload, group, stride=stride, **wire)
    real_s = collective_s(kind, payload, group, stride=stride, **wire, efficiency=REAL)
    assert real_s >= ideal_s


@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(payloads, groups, strides), min_size=1, max_size=8),
    efficiencies,
)
def test_an_array_is_the_loop_over_its_scalars(kind, cases, efficiency):
    payload, group, stride = (np.array(column, float) for column in zip(*cases, strict=True))
    together = collective_s(kind, payload, group, stride=stride, **LINKS, efficiency=efficiency)
    alone = [collective_s(kind, *case[:2], stride=case[2], **LINKS, efficiency=efficiency) for case in cases]
    np.testing.assert_allclose(together, np.array(alone, float), rtol=1e-12)


@pytest.mark.parametrize(
    ("chip", "kind", "ranks", "busbw", "tolerance"),
    [
        # Large messages inside one node, NCCL 2.27, stas00/ml-engineering network/README.md @744d01e18b
        pytest.param("h200", "all_reduce", 8, 480.0e9, 0.10, id="8 x H200, 16 GiB, NVLS"),
        pytest.param("h200", "all_reduce", 4, 363.3e9, 0.15, id="4 x H200, 8 GiB, ring"),
        pytest.param("h200", "all_gather", 8, 361.4e9, 0.10, id="8 x H200, 16 GiB all-gather"),
        pytest.param("a100", "all_reduce", 8, 234.9e9, 0.10, id="8 x A100, 16 GiB"),
        pytest.param("b200", "all_reduce", 4, 673.2e9, 0.15, id="4 x B200, 8 GiB, ring"),
    ],
)
def test_published_bus_bandwidth(chip, kind, ranks, busbw, tolerance):
    machine = find_chip(chip)
    seconds = collective_s(
        kind,
        16 * 2**30,
        ranks,
        link_bytes_per_s=[level.bytes_per_s for level in machine.levels],
        link_latency_s=[level.latency_s for level in machine.levels],
        link_ranks=[level.ranks for level in machine.levels],
        efficiency=constants(machine),
    )
    assert sent_bytes(kind, 16 * 2**30, ranks) / seconds == pytest.approx(busbw, rel=tolerance)


@pytest.mark.parametrize(
    ("ranks", "size", "expected_s"),
    [
        pytest.param(2, 900e3, 1e-6 + 900e3 / 450e9, id="two ranks read each other"),
        pytest.param(8, 900.0, 1e-6 + 7 * 900 / 450e9, id="one shot of a small tensor"),
        pytest.param(8, 9e6, 2e-6 + 2 * 7 / 8 * 9e6 / 450e9, id="two shots of a large one"),
    ],
)
def test_all_reduce_through_the_peers_memory(ranks, size, expected_s):
    machine = {"link_bytes_per_s": 450e9, "memory_bytes_per_s": 3e12}
    waits = PeerEfficiency(wait_s=1e-6, host_s=2e-5)
    assert peer_all_reduce_s(size, ranks, **machine, efficiency=waits) == pytest.approx(expected_s)
    called_s = peer_all_reduce_s(size, ranks, **machine, graph=0.0, efficiency=waits)
    assert called_s == pytest.approx(max(2e-5, expected_s + 2 * size / 3e12))
    assert peer_all_reduce_s(size, ranks, **machine, library_s=1e-9, efficiency=waits) == 1e-9


def test_a_dispatch_inside_one_node_is_an_all_to_all_of_what_it_sends():
    alone = collective_s("all_to_all", 1e9, 8.0, **LINKS_OF_A_NODE)
    assert collective_s("dispatch", 1e9, 8.0, choices=8.0, **LINKS_OF_A_NODE) == pytest.approx(alone)


def test_a_dispatch_crosses_to_each_node_once():
    """Four nodes of 8, 8 choices: a token meets 4 (1 - (3/4)^8) nodes, three quarters of them others."""
    ranks, choices, token_bytes = 32.0, 8.0, 1e6
    met_ranks, met_nodes = (places * (1 - (1 - 1 / places) ** choices) for places in (32.0, 4.0))
    seconds = collective_s("dispatch", met_ranks * token_bytes, ranks, choices=choices, **LINKS_OF_A_NODE)
    assert seconds == pytest.approx(met_nodes * 0.75 * token_bytes / 50e9)


@given(st.sampled_from([8.0, 16.0, 32.0, 64.0]), st.floats(1, 16))
def test_a_dispatch_per_rank_never_takes_longer_than_a_copy_per_expert(ranks, choices):
    sent = ranks * (1 - (1 - 1 / ranks) ** choices)
    per_rank = collective_s("dispatch", sent * 1e6, ranks, choices=choices, **LINKS_OF_A_NODE)
    per_expert = collective_s("all_to_all", choices * 1e6, ranks, **LINKS_OF_A_NODE)
    inside = sent * 1e6 * (1 - 1 / min(ranks, 8)) / 450e9  # a node passes on inside what came from others
    assert per_rank <= max(per_expert, inside) * (1 + 1e-9)


LINKS_OF_A_NODE = {
    "link_bytes_per_s": (450e9, 50e9),
    "link_latency_s": (0.0, 0.0),
    "link_ranks": (8.0, np.inf),
}

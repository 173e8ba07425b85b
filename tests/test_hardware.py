"""The hardware catalog against published figures, against first principles, and against bad input.

Three kinds of proof. Golden: figures as their makers print them (often per board or rack, with sparsity,
or both directions added), converted here and not in the catalog. Oracle: a peak is cores x FLOP per
clock x clock, a memory bandwidth is bus width x data rate. Properties: what every entry must obey.
"""

import datetime
import math
import re
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from data_tables import csv_rows, lines, table, with_field
from fuzz import toml_text
from meshwise.core.errors import ClusterError
from meshwise.machine import hardware
from meshwise.machine.hardware import chips, find_chip, find_cluster

CHIPS = sorted(chips())
CLUSTERS = sorted(hardware.cluster_names())
T = 1e12


def check_close(actual: float, expected: float, rel: float = 5e-3) -> None:
    assert actual == pytest.approx(expected, rel=rel)


# --- golden: figures as published, and oracles: a peak is cores x FLOP per clock x clock ----------------

TABLES = table("tables")["hardware"]
COLUMNS = ("quantity", "name", "printed", "source")
PUBLISHED = [tuple(row[name] for name in COLUMNS) for row in csv_rows("published_hardware.csv")]


def figure(printed: str) -> float:
    """A figure as printed: `36e3 / 8 / 2` of eight GPUs with sparsity (or of a link with both directions)."""
    first, *divisors = printed.split("/")
    return math.prod(map(float, first.split("*"))) / math.prod(map(float, divisors))


def ours(quantity: str, name: str) -> float:
    """What the catalog says, in the unit of the quantity."""
    if quantity in ("network of a node [Gb/s]", "ranks in a node", "chips"):
        node, network = find_cluster(name).levels[-2:]
        network_gbit_per_s = network.bytes_per_s * node.ranks * 8 / 1e9
        return {"chips": find_cluster(name).num_chips, "ranks in a node": node.ranks}.get(
            quantity, network_gbit_per_s
        )
    chip, (what, dtype) = find_chip(name), quantity.split()[:2]
    if what in ("matrix", "vector"):
        peak = chip.matrix_peak(dtype) if what == "matrix" else chip.vector_peak(dtype)
        return peak / 1e9 / chip.num_cores if quantity.endswith("a core]") else peak / T
    return {
        "memory [Gb/s]": chip.memory_bytes_per_s * 8 / 1e9,
        "memory [MiB]": chip.memory_bytes / 2**20,
        "innermost link [GB/s]": chip.levels[0].bytes_per_s / 1e9,
        "ranks in a domain": chip.levels[0].ranks,
    }[quantity]


@pytest.mark.parametrize(
    ("quantity", "name", "printed"),
    [row[:3] for row in PUBLISHED],
    ids=[f"{row[3]}-{row[1]}-{row[0]}" for row in PUBLISHED],
)
def test_the_catalog_is_as_published(quantity: str, name: str, printed: str) -> None:
    found, published = ours(quantity, name), figure(printed)
    if quantity == "memory [MiB]":  # what the driver prints; a framework sees up to 3 % less
        assert 0.965 - 0.04 * name.startswith("tpu") < found / published < 1
    elif "[" not in quantity:
        assert found == published
    else:
        check_close(found, published, rel=1e-2 if quantity.endswith("a core]") else 5e-3)


def test_every_chip_has_published_peaks_to_be_held_against() -> None:
    assert {name for quantity, name, *_ in PUBLISHED if quantity.endswith("[TFLOP/s]")} == set(CHIPS)


# --- properties of every entry ----------------------------------------------------------------------


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_is_documented_and_plausible(name: str) -> None:
    """Narrower types are never slower, and fp8 is twice bf16; links get slower outward."""
    chip = find_chip(name)
    assert chip.source
    assert datetime.date.fromisoformat(chip.checked)
    assert chip.num_cores > 0
    assert 8e9 < chip.memory_bytes < 1e12
    slowest_ms = 500 if name == "dgx-spark" else 80  # LPDDR; to read all of it once
    assert 2 < chip.memory_bytes / chip.memory_bytes_per_s * 1e3 < slowest_ms
    balance_flop_per_byte = chip.matrix_peak(chip.training_dtype) / chip.memory_bytes_per_s
    assert 10 < balance_flop_per_byte < 1000
    matrix, vector = chip.matrix_flop_per_s, chip.vector_flop_per_s
    peaks = [matrix[d] for d in ("fp64", "fp32", "tf32", "bf16", "fp8", "fp4") if d in matrix]
    assert peaks == sorted(peaks)
    assert vector.get("fp64", 0) <= vector["fp32"] <= vector.get("fp16", math.inf)
    assert max(vector.values()) <= max(matrix.values())
    if chip.generation not in ("volta", "turing", "tpu"):
        assert matrix["bf16"] == matrix["fp16"]
    if "fp8" in matrix and chip.generation not in ("tpu", "rubin", "trainium", "gaudi3"):
        check_close(matrix["fp8"], 2 * matrix["bf16"], rel=2e-2)
    check_levels(chip)
    assert chip.levels[0].bytes_per_s < chip.memory_bytes_per_s


def check_levels(owner: hardware.Chip | hardware.Cluster) -> None:
    levels = owner.levels
    assert levels[-1].ranks == math.inf
    for inner, outer in pairwise(levels):
        assert inner.ranks < outer.ranks
        assert inner.bytes_per_s >= outer.bytes_per_s
        assert inner.latency_s <= outer.latency_s


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_are_documented_and_their_links_get_slower_outward(name: str) -> None:
    cluster = find_cluster(name)
    check_levels(cluster)
    assert cluster.source
    assert datetime.date.fromisoformat(cluster.checked)
    assert cluster.num_chips >= cluster.levels[0].ranks or len(cluster.levels) == 1
    assert cluster.num_chips % min(8, cluster.levels[0].ranks) == 0


def test_no_name_or_alias_means_two_things() -> None:
    names = [n for name, chip in chips().items() for n in (name, *chip.aliases)] + CLUSTERS
    assert len(names) == len(set(names))
    assert all(n == n.lower() and ":" not in n and "/" not in n for n in names)


# --- finding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alias", "name"), [("H100-SXM", "h100-80g-sxm"), ("h200-141g-sxm", "h200-sxm"), (" b200 ", "b200-sxm")]
)
def test_aliases_find_their_chip_in_any_case(alias: str, name: str) -> None:
    assert find_chip(alias) is find_chip(name)
    assert find_cluster(f"{alias}:16").chip is find_chip(name)


def test_a_count_makes_a_cluster_of_a_chip_or_resizes_a_preset() -> None:
    assert find_cluster("a100-80g-sxm:512").num_chips == 512
    assert find_cluster("a100-80g-sxm:512").levels == find_chip("a100-80g-sxm").levels
    assert find_cluster("perlmutter:64").num_chips == 64
    assert [x.name for x in find_cluster("perlmutter:64").levels] == ["nvlink3", "slingshot11"]


NOT_FOUND = [
    ("", "dgx-h100"),
    ("dgx-h100:" + "9" * 5000, "not a number"),
    ("a\0b.toml", "no file"),
    ("x" * 5000 + "/y.toml", "File name too long"),
]


@pytest.mark.parametrize(("text", "hint"), NOT_FOUND, ids=[t[:20] or "empty" for t, _ in NOT_FOUND])
def test_what_cannot_be_found_is_one_sentence_with_a_hint(text: str, hint: str) -> None:
    with pytest.raises(ClusterError) as caught:
        find_cluster(text)
    assert hint in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_chip_and_a_missing_dtype_name_what_there_is() -> None:
    with pytest.raises(ClusterError, match=r"did you mean .*mi300x"):
        find_chip("mi300")
    with pytest.raises(ClusterError, match=r"v100-16g-sxm has no fp8 units; choose .* fp16"):
        find_chip("v100").matrix_peak("fp8")
    assert find_chip("v100").matrix_peak("fp32") == find_chip("v100").vector_peak("fp32") == 15.7e12
    assert find_chip("v100").vector_peak("bf16") == 15.7e12


# --- users' own files ---------------------------------------------------------------------------------

OWN = table("own_cluster")


def write_toml(path: Path, content: dict[str, Any]) -> str:
    path.write_text(toml_text(content), encoding="utf-8")
    return str(path)


def test_a_file_of_ones_own_is_a_cluster(tmp_path: Path) -> None:
    cluster = find_cluster(write_toml(tmp_path / "mine.toml", {**OWN, "checked": "2026-11-20"}))
    assert (cluster.name, cluster.num_chips, cluster.chip.vendor) == ("mine", 32, "acme")
    assert [(x.name, x.ranks) for x in cluster.levels] == [("nvlink", 4), ("ethernet", math.inf)]
    assert cluster.chip.levels[0].bytes_per_s == 200e9
    assert (cluster.source, cluster.checked) == ("our machine room", "2026-11-20")
    assert cluster.chip.matrix_peak("bf16") == 500e12
    fewer = find_cluster(f"{tmp_path}/mine.toml:8")
    assert (fewer.num_chips, fewer.chip.name) == (8, "mine")


def test_a_card_alone_needs_neither_links_nor_a_number(tmp_path: Path) -> None:
    """More of them exchange over what joins each to its host; all that is missing is named at once."""
    one = {"chip": {**OWN["chip"], "host_bytes_per_s": 16e9, "matrix_flop_per_s": {}}}
    found = find_cluster(path := write_toml(tmp_path / "mine.toml", one))
    assert (found.num_chips, found.levels[0].bytes_per_s) == (1, 16e9)
    assert found.levels[0].peer_ranks == 1 and find_cluster(f"{path}:2").num_chips == 2
    del one["chip"]["generation"], one["chip"]["vendor"]
    with pytest.raises(ClusterError, match="vendor, generation missing; state all"):
        find_cluster(write_toml(tmp_path / "mine.toml", one))


def test_a_file_may_name_a_chip_of_the_catalog(tmp_path: Path) -> None:
    cluster = find_cluster(write_toml(tmp_path / "pod", {"chip": "h100", "num_chips": 24}))
    assert cluster.chip is find_chip("h100")
    assert cluster.levels == find_chip("h100").levels


BAD_FILES: list[tuple[bytes, str]] = [
    (b"chip = ", "not valid TOML"),
    (b"\x00\x01\x02\xff\xfe", "not text"),
    (b"\x7fELF\x02\x01\x01", "not valid TOML"),
    (b"", "chip, num_chips missing; state all"),
    (b"a = " + b"[" * 100_000, "more than 65,536 bytes"),
]
for path, value, named in (*lines("bad_clusters"), ("chip.memory_bytes", 10**400, "memory_bytes")):
    BAD_FILES.append((toml_text(with_field(OWN, path, value)).encode(), named))


@pytest.mark.parametrize(("content", "says"), BAD_FILES, ids=lambda one: repr(one)[-60:])
def test_a_bad_file_is_one_sentence_that_names_it_and_what_is_wrong(
    tmp_path: Path, content: bytes, says: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    with pytest.raises(ClusterError) as caught:
        find_cluster(str(file))
    message = str(caught.value)
    assert str(file) in message and says in message and "\n" not in message


# --- torus, rails, oversubscription ------------------------------------------------------------

LINKS_OF_A_FILE = """
chip = "h100"
num_chips = 64
levels = [
  {{ name = "inside", {inside}, bytes_per_s = 450e9, latency_s = 1e-6 }},
  {{ name = "outside", {outside}, bytes_per_s = 70e9, latency_s = 4e-6 }},
]
"""


@pytest.mark.parametrize(("inside", "outside", "message"), TABLES["bad_links"])
def test_links_that_cannot_be_are_refused(inside: str, outside: str, message: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        hardware.parse_cluster(LINKS_OF_A_FILE.format(inside=inside, outside=outside))


@given(
    st.sampled_from([*CLUSTERS, *(f"{chip}:24" for chip in CHIPS)]),
    st.sampled_from(["num_chips", "reduce_scatter", "name", "source", ""]),
    st.sampled_from(["memory_bytes", "cache_bytes", "host_bytes_per_s", "source", "aliases", ""]),
)
def test_a_cluster_is_read_again_from_its_own_text(name: str, of_cluster: str, of_chip: str) -> None:
    others = {"num_chips": 7, "reduce_scatter": "all_reduce", "name": "mine", "source": 'a "book"\n'}
    others |= {"memory_bytes": 1e11 / 3, "cache_bytes": 1.0, "host_bytes_per_s": 7e9, "aliases": ("x",)}

    def changed(record: Any, field: str) -> Any:
        return replace(record, **{field: others[field]}) if field else record

    cluster = find_cluster(name)
    cluster = changed(replace(cluster, chip=changed(cluster.chip, of_chip)), of_cluster)
    assert asdict(hardware.parse_cluster(hardware.cluster_text(cluster))) == asdict(cluster)


@pytest.mark.parametrize(("name", "shape"), TABLES["boxes"])
def test_a_part_of_a_torus_is_the_most_cubic_box(name: str, shape: list[int]) -> None:
    cluster = find_cluster(name)
    levels = hardware.sliced(cluster.levels, cluster.num_chips)
    assert levels[0].torus == tuple(shape)
    ranks = [1.0, *(link.ranks for link in hardware.links_of(levels))][: len(shape) + 1]
    assert [outer / inner for inner, outer in pairwise(ranks)] == shape

"""`meshwise collective`: one collective by size, against the links' ceiling and against measurements."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import meshwise as mw
from meshwise.core.errors import ClusterError, DataError
from meshwise.cost.collective import sent_bytes
from meshwise.estimate.collective import KINDS
from meshwise.report.pages import print_result

H200 = ("--cluster", "h200-sxm:16")


@pytest.mark.parametrize("kind", KINDS)
def test_bus_bandwidth_grows_with_size_up_to_the_links(meshwise: Any, kind: str) -> None:
    rows = meshwise("collective", kind, *H200, "--json").document
    rates = [row["bus_bytes_per_s"] for row in rows]
    assert rates == sorted(rates)
    for row in rows:
        assert row["bus_bytes_per_s"] * row["time_s"] == pytest.approx(
            float(sent_bytes(KINDS[kind], row["payload_bytes"], 16))
        )
    assert 0.5 * rows[-1]["ceiling_bytes_per_s"] < rates[-1]
    if kind != "all_reduce":  # a switch that adds may exceed a ring
        assert rates[-1] <= rows[-1]["ceiling_bytes_per_s"]


def test_ranks_and_stride_choose_the_links() -> None:
    inside, _ = mw.collective("all_gather", "h200-sxm:16", [2.0**30], ranks=8)
    across, _ = mw.collective("all_gather", "h200-sxm:16", [2.0**30], ranks=2, stride=8)
    assert inside[0].ceiling_bytes_per_s == pytest.approx(450e9)
    assert across[0].ceiling_bytes_per_s == pytest.approx(50e9)


def test_a_library_that_reduces_all_to_reduce_and_scatter(tmp_path: Path) -> None:
    """Gloo: its reduce-scatter takes as long as its all-reduce, wherever it is priced."""
    links = (
        'num_chips = 8\nchip = "h100-80g-sxm"\n[[levels]]\nname = "tcp"\nbytes_per_s = 1e9\nlatency_s = 1e-5'
    )
    plain, whole = tmp_path / "plain.toml", tmp_path / "whole.toml"
    plain.write_text(links)
    whole.write_text(f'reduce_scatter = "all_reduce"\n{links}')
    times = {
        (file, kind): mw.collective(kind, file, [2.0**24])[0][0].time_s
        for file in (plain, whole)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    }
    assert times[whole, "reduce_scatter"] == times[whole, "all_reduce"] == times[plain, "all_reduce"]
    assert times[plain, "reduce_scatter"] < times[plain, "all_reduce"]
    assert times[whole, "all_gather"] == times[plain, "all_gather"]
    steps = [mw.estimate("llama3-8b", file, "zero=3", batch=8, seq=512).step_s for file in (plain, whole)]
    assert steps[1] > 1.2 * steps[0]
    whole.write_text(f'reduce_scatter = "ring"\n{links}')
    with pytest.raises(ClusterError, match="reduce_scatter"):
        mw.collective("all_reduce", whole, [2.0**24])


def test_measured_times_stand_beside(meshwise: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "ops.csv", tmp_path / "bus.png"
    path.write_text(
        "hardware,op,dtype,n_gpus,shape,latency_us,kernel_or_library,source\n"
        "H200-SXM-141GB,nccl_all_reduce,fp16,8,bytes=3000000,40,NCCL,mine\n"
        "H200-SXM-141GB,nccl_all_reduce,fp16,4,bytes=5000000,40,NCCL,mine\n"
    )
    words = ("collective", "all_reduce", "--cluster", "h200-sxm:8", "--data", str(path))
    measured = {row["payload_bytes"]: row["measured_s"] for row in meshwise(*words, "--json").document}
    assert measured[3e6] == pytest.approx(40e-6) and 5e6 not in measured
    done = meshwise(*words, "--plot", str(picture))
    assert "40 µs" in done.out and picture.stat().st_size > 0


def test_measured_collectives_take_the_place_of_predicted_ones(tmp_path: Path) -> None:
    """nccl-tests' output: at its points, between them, not beyond; every verb says so."""
    ranks = "".join(f"#  Rank  {rank} Group  0 Pid  7 on   node-a device  {rank} H100\n" for rank in range(4))
    rows = "".join(f"  {2**size}  1  float  sum  -1  {us}  1.0  1.0  0  {us}  1.0  1.0  0\n"
                   for size, us in ((20, 50.0), (26, 3200.0)))  # fmt: skip
    output = tmp_path / "all_reduce_perf.txt"
    output.write_text(f"# nThread 1\n{ranks}{rows}")
    sizes = [2.0**power for power in (20, 22, 26, 28)]
    times, _ = mw.collective("all_reduce", "h100:8", sizes, ranks=4, collectives=[output])
    assert [one.time_s for one in times[:3]] == pytest.approx([50e-6, 200e-6, 3200e-6])
    assert [one.algorithm == "measured" for one in times] == [True, True, True, False]
    apart, _ = mw.collective("all_reduce", "h100:16", sizes, ranks=4, stride=4, collectives=[output])
    assert "measured" not in {one.algorithm for one in apart}
    asked = "llama3-8b", "h100:4", "tp=4,sp=0"
    slow, plain = (mw.estimate(*asked, collectives=files) for files in ([output], []))
    assert slow.step_s != plain.step_s
    found = mw.search("llama3-8b", "h100:4", batch=4, collectives=[output])
    for notes in (slow.to_json()["notes"], found.to_json()["notes"]):
        assert any(
            "measured, not predicted (all_reduce_perf.txt): all_reduce among 4" in one for one in notes
        )
    console = Console(record=True, width=200, file=io.StringIO())
    print_result(found, console)
    assert "note: measured, not predicted (all_reduce_perf.txt)" in console.export_text()
    output.write_text("no table")
    with pytest.raises(DataError, match="no output of nccl-tests"):
        mw.estimate(*asked, collectives=[output])

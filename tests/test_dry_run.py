"""The dry run against the printed log of a real 16-GPU program, and against what a dry run may cost."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from data_tables import table
from forks import start_script
from meshwise.cost.allocator import CachingAllocator
from meshwise.runtime.dry_run import dry_run
from meshwise.runtime.programs import find_program, make_options

pytestmark = pytest.mark.slow

LOG = {"ranks": 16, "rank": 7, "device": "h100-80g-sxm"}
SIZES = {"seq": 60000, "hidden": 16384}

PRINTED = table("log_16_h100")


def dry(name: str, *, ranks: int, rank: int, device: str, **values: Any) -> Any:
    return dry_run(name, make_options(find_program(name), values), ranks=ranks, rank=rank, device=device)


@pytest.fixture(scope="module")
def ulysses() -> Any:
    return dry("ulysses", **LOG, **SIZES, heads=128)


@pytest.fixture(scope="module")
def model_2d() -> Any:
    return dry("model-2d", **LOG, **SIZES, ffn_hidden=53248, layers=126, tp=8, dp=2)


def test_log_peaks(ulysses: Any) -> None:
    assert {step.step: round(step.peak_bytes / 1e9, 2) for step in ulysses.steps} == PRINTED["peaks_gb"]
    assert ulysses.peak_bytes == 61018734592
    small = dry("ulysses", **LOG | {"device": "rtx-3090"}, **SIZES, heads=128)
    assert [of.to_json()["fits"] for of in (ulysses, small)] == [True, False]


def test_log_flop(ulysses: Any) -> None:
    counted = {step.step: round(step.flop / 1e12, 2) for step in ulysses.steps if step.flop}
    assert counted == PRINTED["tflop"]


@pytest.mark.parametrize("tensor", PRINTED["tensors"], ids=lambda tensor: f"log-{tensor[0]}-{tensor[1]}")
def test_log_tensors(tensor: tuple[Any, ...], ulysses: Any) -> None:
    *name, shape, elements, size_gb = tensor
    (step,) = (step for step in ulysses.steps if [step.name, step.symbols] == name)
    assert (list(step.shape), step.elements, step.bytes / 1e9) == (shape, elements, size_gb)


def test_log_second_part(model_2d: Any) -> None:
    steps = {step.name: step for step in model_2d.steps}
    assert steps["W1"].shape == (126, 16384, 6656)
    assert steps["W2"].shape == (126, 6656, 16384)
    assert steps["W1"].elements == steps["W2"].elements == 13740539904
    assert steps["inter"].bytes == 399.36e6
    assert steps["input_"].bytes == 983.04e6
    assert round(steps["W1"].bytes / 1e9, 2) == 27.48
    assert round(steps["inter"].current_bytes / 1e9, 2) == 56.50
    assert round(steps["inter"].peak_bytes / 1e9, 2) == 61.02
    assert round(model_2d.peak_bytes / 1e9, 2) == 61.02


def test_machine_additions_have_rows(ulysses: Any) -> None:
    machine = {row["op"]: row["peak_bytes"] for row in ulysses.ledger.where(module="machine").rows()}
    tensors = max(row["peak_bytes"] for row in ulysses.ledger.where(module="ulysses").rows())
    assert machine["cublas_workspace"] == 33554432
    assert tensors + sum(machine.values()) == ulysses.peak_bytes


@pytest.mark.parametrize("rank", [0, 16383])
def test_any_rank_of_a_large_world(rank: int) -> None:
    values = {"seq": 16384 * 8, "hidden": 16384, "heads": 16384, "attention": "flash", "causal": True}
    outcome = dry("ulysses", ranks=16384, rank=rank, device="h100-80g-sxm", **values)
    assert set(outcome.ledger.where(collective="all_to_all")["group_size"]) == {16384}
    blocks = outcome.ledger.where(op="attention").total("flop")
    assert blocks == (16384 * 8) ** 2 / 2 * 4


def said_by(code: str, folder: Path) -> str:
    """What a fresh process prints that runs `code`."""
    path = folder / "script.py"
    path.write_text(code)
    script = start_script(folder, [str(path)], {})
    assert script.end() == 0, script.err.read_text()
    return script.out.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="the most that a process held is read from /proc")
def test_host_memory_of_the_log_is_small(tmp_path: Path) -> None:
    """57.6 GB of scores, 2 GB of host memory at most (not as getrusage has it, which counts the parent's)."""
    code = (
        "from meshwise.runtime.programs import find_program, make_options\n"
        "from meshwise.runtime.dry_run import dry_run\n"
        "from pathlib import Path\n"
        "o = make_options(find_program('ulysses'), dict(seq=60000, hidden=16384, heads=128))\n"
        "dry_run('ulysses', o, ranks=16, rank=7, device='h100-80g-sxm')\n"
        "print(*(line.split()[1] for line in Path('/proc/self/status').open() if line.startswith('VmHWM')))"
    )
    assert int(said_by(code, tmp_path)) * 1024 < 2e9


def test_every_rank_in_one_process_whatever_ran_before(tmp_path: Path) -> None:
    """Autograd at work before the fake device exists; then several worlds of DTensors, one after another."""
    code = (
        "import torch\n"
        "from meshwise.runtime.programs import find_program, make_options\n"
        "from meshwise.runtime.dry_run import dry_run\n"
        "torch.ones(2, requires_grad=True).sum().backward()\n"
        "o = make_options(find_program('train'), dict(model='llama3-8b', layers=1, plan='tp=2', seq=64))\n"
        "print(*(dry_run('train', o, ranks=4, rank=rank, device='a100').peak_bytes for rank in range(4)))"
    )
    assert len(set(said_by(code, tmp_path).split())) == 1


def test_command_line(meshwise: Any) -> None:
    words = ["dryrun", "ulysses", "--ranks=4", "--rank=1", "--seq=64", "--hidden=32", "--heads=4"]
    document = meshwise(*words, "--json").document
    assert "allocation: 0" not in (shown := meshwise(*words).out) and "kFLOP" in shown
    assert set(document) >= {"program", "ranks", "rank", "device", "peak_bytes", "steps", "ledger"}
    keys = {"name", "symbols", "shape", "elements", "bytes", "flop", "current_bytes", "peak_bytes"}
    assert all(set(step) >= keys for step in document["steps"])


# --- the allocator alone ------------------------------------------------------------------------


@pytest.mark.parametrize(("size_bytes", "booked_bytes"), table("tables")["dry_run"]["booked"])
def test_allocator_books(size_bytes: int, booked_bytes: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate("x", size_bytes)
    assert allocator.booked_bytes == booked_bytes


def test_allocator_reuses_and_joins() -> None:
    allocator = CachingAllocator()
    for name in "abcd":
        allocator.allocate(name, 5 << 20)  # four blocks fill one segment of 20 MiB
    assert allocator.reserved_bytes == 20 << 20
    for name in "bc":
        allocator.release(name)
    allocator.allocate("wide", 9 << 20)  # fits only into b and c joined
    assert allocator.reserved_bytes == 20 << 20
    for name in ("a", "d", "wide"):
        allocator.release(name)
    assert allocator.booked_bytes == 0


def test_allocator_gives_segments_back_before_it_is_out_of_memory() -> None:
    allocator, mib = CachingAllocator(limit_bytes=100 << 20), 1 << 20
    for name in "ab":
        allocator.allocate(name, 40 * mib)
    allocator.release("a")
    allocator.allocate("wide", 50 * mib)
    assert (allocator.reserved_bytes, allocator.out_of_memory) == (90 * mib, {})
    allocator.allocate("more", 30 * mib)
    state = {"reserved_bytes": 90 * mib, "booked_bytes": 90 * mib}
    assert allocator.out_of_memory == {"wanted_bytes": 30 * mib, "limit_bytes": 100 * mib} | state
    assert allocator.peak_bytes == 120 * mib

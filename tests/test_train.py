"""The training step: the same losses in every world, and the same counts by every instrument."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from meshwise.instruments.compare_program import compare_program
from meshwise.instruments.launch import Ranks
from meshwise.instruments.run import run_rank
from meshwise.model import num_params
from meshwise.programs import find_program, make_options
from meshwise.programs.train import the_model

TINY = str(Path(__file__).parent / "data" / "tiny_llama.json")


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def train_options(**values: Any) -> Any:
    return make_options(find_program("train"), {"model": TINY, "seq": 16, **values})


def test_losses_do_not_depend_on_the_world(pool: Ranks) -> None:
    """Four sequences a step in fp32: on four data-parallel ranks, on 2 x 2, on one."""
    losses = [
        pool.call(run_rank, "train", train_options(plan=plan, batch=4, steps=3), 0, True)[0].result["losses"]
        for plan in ("tp=1,dtype=fp32", "tp=2,dtype=fp32")
    ]
    with Ranks(1) as alone:
        options = train_options(plan="tp=1,dtype=fp32", batch=4, steps=3)
        losses.append(alone.call(run_rank, "train", options, 0, True)[0].result["losses"])
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)
    assert losses[1] == pytest.approx(losses[2], rel=1e-5)
    assert losses[2][0] > losses[2][1] > losses[2][2]


@pytest.mark.parametrize("plan", ["tp=1,dtype=fp32", "tp=2,dtype=bf16"])
def test_all_instruments_agree(plan: str, pool: Ranks) -> None:
    options = train_options(plan=plan, batch=8)
    found = compare_program(find_program("train"), options, ranks=4, rank=2, pool=pool)
    assert set(found.rows[0].values) == {"estimate", "dry_run", "run"}
    assert found.agree, found.differences()[:3]


@pytest.mark.parametrize(
    ("ranks", "rank", "options"),
    [
        (5, 4, "--plan tp=1,dtype=fp32 --batch 10 --microbatch 2 --seq 16 --layers 2"),
        (4, 2, "--plan tp=2,dtype=bf16 --batch 2 --microbatch 1 --seq 4 --layers 1"),
        (6, 1, "--plan tp=2,dtype=fp32 --batch 18 --microbatch 2 --seq 48 --layers 2"),
    ],
)
def test_estimate_is_dry_run(ranks: int, rank: int, options: str) -> None:
    """Each in a process of its own, as users run it: DTensor keeps plans of worlds that are gone."""
    words = [sys.executable, "-m", "meshwise", "compare", "train", "--ranks", str(ranks), "--rank", str(rank)]
    words += ["--no-run", "--model", TINY, *options.split()]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_real_model_agrees() -> None:
    """Llama 3 8B, four of its layers, one rank of 64."""
    options = make_options(
        find_program("train"), {"model": "llama3-8b", "plan": "tp=8,dtype=bf16", "seq": 8192, "layers": 4}
    )
    found = compare_program(find_program("train"), options, ranks=64, rank=13, with_run=False)
    assert found.agree, found.differences()[:3]
    held = {row.op: row.values["dry_run"] for row in found.rows if row.column == "weight_bytes"}
    norms = (2 * 4 + 1) * 4096  # every tensor-parallel rank keeps them all
    matrices = num_params(the_model(options)) - norms
    assert held["parameters"] == 4 * (matrices / 64 + norms / 8)
    assert held["optimizer"] == 2 * held["parameters"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--plan pp=2", "built for pp=1, not pp=2"),
        ("--plan tp=2,sp=0", "not sp=0"),
        ("--plan tp=4", "kv heads 2 does not divide by tp=4"),
        ("--plan tp=2 --seq 15", "seq 15 does not divide by tp=2"),
        ("--batch 3", "batch 3 does not divide by dp=4"),
        ("--plan dtype=fp8", "dtype=fp8 is not one that the program computes in"),
        ("--model gpt3-175b", "choose a Llama-shaped model"),
    ],
)
def test_what_is_not_built_is_said(words: str, sentence: str, meshwise: Callable[..., Any]) -> None:
    model = [] if "--model" in words else ["--model", TINY]
    outcome = meshwise("dryrun", "train", "--ranks", "4", *model, *words.split())
    assert outcome.code == 2
    assert sentence in outcome.err

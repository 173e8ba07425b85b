"""Evaluation over ranks: the loss does not depend on how the model is spread."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from data_tables import table
from meshwise.core.errors import WorkloadError
from meshwise.runtime.launch import RankPlace
from meshwise.runtime.programs.eval_lm import Options, check
from meshwise.runtime.programs.text_data import PAD, read_blocks
from meshwise.runtime.programs.transformer_lm import sinusoidal_positions
from meshwise.runtime.start import Outcome, run_rank
from ranks import Ranks, run_bare

pytestmark = pytest.mark.slow
NUM_RANKS = 4

TINY = (
    "decoder_layers=2,tokens_per_sample=32,moe_expert_count=4,decoder_embed_dim=16,decoder_ffn_embed_dim=32,"
    "moe_eval_capacity_token_fraction=0.2"
)
BASE = Options(override=TINY, max_blocks=7, dtype="fp32")


def alone(options: Options) -> Outcome:
    """The evaluation on one rank, in this process."""
    check(options, 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        return run_bare(RankPlace(0, 1, 0), "eval-lm", options)
    finally:
        dist.destroy_process_group()


def together(pool: Ranks, options: Options) -> list[Outcome]:
    """The evaluation on all ranks of the pool."""
    check(options, 4)
    return pool.call(run_bare, "eval-lm", options)


@pytest.mark.parametrize(("override", "options"), table("tables")["eval_lm"]["worlds"])
def test_loss_does_not_depend_on_the_world(pool: Ranks, override: str, options: dict[str, Any]) -> None:
    chosen = replace(BASE, override=f"{TINY},{override}".rstrip(","), **options)
    one = alone(replace(chosen, tp=1, ep=0)).result
    for outcome in together(pool, chosen):
        assert outcome.result["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert outcome.result["routing"] == pytest.approx(one["routing"], rel=1e-4, abs=1e-4)
        for name in ("num_tokens", "num_blocks", "num_batches", "capacity"):
            assert outcome.result[name] == one[name]


def test_bare_run_gives_the_same_and_records_nothing(pool: Ranks) -> None:
    recorded = pool.call(run_rank, "eval-lm", BASE, 0, True)[0]
    bare = together(pool, BASE)[0]
    assert bare.result["loss"] == recorded.result["loss"]
    assert bare.result["routing"] == recorded.result["routing"]
    assert len(recorded.ledger) > 0
    assert len(bare.ledger) == 0
    assert bare.to_json()["peak_bytes"] is None


# --- text and positions ----------------------------------------------------------------------------


def test_positions_are_those_of_fairseq() -> None:
    # fairseq's SinusoidalPositionalEmbedding: padding index 1, so the first token has row 2.
    table = sinusoidal_positions(40, 8)
    assert table.shape == (40, 8)
    assert not table[PAD].any()
    for row in (0, 2, 39):
        for i in range(4):
            angle = row / 10000 ** (i / 3)
            assert float(table[row, i]) == pytest.approx(np.sin(angle), abs=1e-5)
            assert float(table[row, 4 + i]) == pytest.approx(np.cos(angle), abs=1e-5)
    assert torch.equal(sinusoidal_positions(5, 7)[:, 6], torch.zeros(5))


# --- what is refused -------------------------------------------------------------------------------


def test_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(WorkloadError, match="is empty"):
        check(replace(BASE, text=str(tmp_path)), 1)
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    with pytest.raises(WorkloadError, match="holds no text"):
        read_blocks(str(tmp_path), 8)

"""A server of one's own: records of four load generators are read, and constants fitted to them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_tables import table
from meshwise.calibrate.fit_server import fit_server
from meshwise.calibrate.server_records import ServerRecord
from meshwise.serve.engine import ENGINES, of_version, parse_engine
from meshwise.serve.load import Fleet, under_load
from meshwise.serve.requests import Lengths, at_rate, in_closed_loop
from servers import server

TABLES = table("tables")["calibrate_server"]

TRUE: dict[str, float] = {"front_s": 0.06, "prompt_slowdown": 1.5, "decode_slowdown": 1.25, "pass_s": 1e-3}
"""Constants of a server that is slower than the catalog says."""


def measured(clients: int, rate: float | None, num: int) -> dict[str, float]:
    """What a client would see of that server: mean latencies [ms], tokens."""
    lengths = Lengths(1000, 100)
    requests = at_rate(rate, lengths, num=num) if rate else in_closed_loop(clients, lengths, num=num)
    of = server(prompt=1000, output=100)
    load = under_load(Fleet(of), requests, replace(ENGINES["vllm"], **TRUE))  # type: ignore[arg-type]
    return {"ttft": 1e3 * load.served.ttft_s.mean(), "tpot": 1e3 * load.served.tpot_s.mean()}


def bench(clients: int | None, rate: Any, num: int) -> dict[str, Any]:
    """An object of `vllm bench serve` and `sglang.bench_serving`."""
    seen = measured(clients or num, rate if rate in (2.0, 4.0) else None, num)
    return {
        "completed": num, "total_input_tokens": 1000 * num, "total_output_tokens": 100 * num,
        "request_rate": rate, "max_concurrency": clients, "mean_ttft_ms": seen["ttft"],
        "mean_tpot_ms": seen["tpot"], "median_ttft_ms": 1.0,
    }  # fmt: skip


def perf(clients: int, config: dict[str, Any]) -> dict[str, Any]:
    """The statistics of GenAI-Perf and AIPerf."""
    seen, num = measured(clients, None, 10 * clients), 10 * clients
    return {
        "time_to_first_token": {"unit": "ms", "avg": seen["ttft"], "p50": 1.0},
        "inter_token_latency": {"unit": "ms", "avg": seen["tpot"]},
        "input_sequence_length": {"unit": "tokens", "avg": 1000.0},
        "output_sequence_length": {"unit": "tokens", "avg": 100.0},
        "request_count": {"unit": "requests", "avg": num},
        "input_config": config,
    }


@pytest.fixture
def records(tmp_path: Path) -> list[str]:
    lines = [bench(8, float("inf"), 80), bench(None, 4.0, 300)]
    texts = {
        "vllm.json": json.dumps(bench(64, "inf", 640)),
        "sglang.jsonl": "\n".join(map(json.dumps, lines)),  # writes Infinity
        "profile_export_genai_perf.json": json.dumps(perf(1, {"stimulus": {"concurrency": 1}})),
        "profile_export_aiperf.json": json.dumps(perf(24, {"loadgen": {"concurrency": 24}})),
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return [str(tmp_path / name) for name in texts]


def test_a_server_is_found_from_its_records(meshwise: Any, records: list[str], tmp_path: Path) -> None:
    """From 17 % off to 1 %; the file is an engine for `serve`, which then says what it is fitted to."""
    server = str(tmp_path / "server.toml")
    files = [word for path in records for word in ("--serving", path)]
    words = ("--model", "llama3-8b", "--cluster", "h100-80g-sxm:1", "--out", server)
    found = meshwise("calibrate", *files, *words, "--json").document
    for quantity in ("ttft_s", "tpot_s"):
        assert found["mean_abs_frac"]["before"][quantity] > 0.15
        assert found["mean_abs_frac"]["after"][quantity] < 0.03
    after = {name: value["after"] for name, value in found["constants"].items()}
    assert after["prompt_slowdown"] == pytest.approx(TRUE["prompt_slowdown"], rel=0.15)
    assert after["decode_slowdown"] == pytest.approx(TRUE["decode_slowdown"], rel=0.15)
    shown = " ".join(meshwise("calibrate", *files, *words).out.split())
    assert "decode_slowdown" in shown and "before" in shown
    engine = parse_engine(server)
    assert engine.front_s == pytest.approx(after["front_s"], rel=1e-3)
    assert "fitted to 5 records" in engine.title


@pytest.mark.parametrize(("text", "says"), TABLES["bad_records"])
def test_a_bad_record_is_one_sentence(meshwise: Any, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    words = ("--model", "llama3-8b", "--cluster", "h100-80g-sxm:1", "--out", str(tmp_path / "x.toml"))
    outcome = meshwise("calibrate", "--serving", str(tmp_path / "bad.json"), *words)
    assert outcome.code == 2 and says in " ".join(outcome.err.split())


@pytest.mark.parametrize(("asked", "tile", "title"), TABLES["versions"])
def test_a_version_has_the_settings_of_the_one_before_it(asked: str, tile: int, title: str) -> None:
    engine = parse_engine(asked)
    assert (engine.expert_tile, engine.title) == (tile, title)
    assert of_version("sglang", "0.5.10.post1").graph_sizes == ENGINES["sglang"].graph_sizes


def test_a_fit_starts_from_what_serve_says_on_a_small_chip() -> None:
    """SGLang takes 4,096 tokens a pass on 48 GB: the first prediction is that of the same load."""
    fleet, engine = Fleet(server(cluster="l40s:1", prompt=2000, output=20)), ENGINES["sglang"]
    record = ServerRecord("here", 64, Lengths(2000, 20), None, 32, ttft_s=1.0, tpot_s=0.05)
    found = fit_server([record], lambda prompt, output: fleet, engine)
    load = under_load(fleet, record.requests, engine)
    assert found.predicted_before[0, 0] == pytest.approx(load.served.ttft_s.mean())

"""What load generators write of a run, in our words: vLLM's and SGLang's bench, GenAI-Perf, AIPerf.

- `vllm bench serve --save-result`: an object a file, with `--save-detailed` the tokens of every request.
- `sglang.bench_serving --output-file`: an object a line.
- `profile_export_genai_perf.json`, `profile_export_aiperf.json`: statistics of each metric; the load lies
  somewhere in `input_config`.

A record without a rate or a number of clients sent all requests at once.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from meshwise.core.errors import DataError
from meshwise.core.files import read_text
from meshwise.core.refusals import refuse
from meshwise.serve.requests import Lengths, Requests, at_rate, in_closed_loop

MOST_BYTES = 2**28
MOST_SIMULATED = 4000
"""Requests of a record that are simulated: as many again change no mean."""

_NOT_JSON = re.compile(r"(?<=[:\[,])\s*(-?Infinity|NaN)(?=\s*[,\]}])")
"""Numbers as Python's json writes them (SGLang: a request rate of Infinity)."""


@dataclass(frozen=True, slots=True, eq=False)
class ServerRecord:
    """A run of a load generator: `num` requests at `rate` a second or from `clients`; mean latencies.

    `where`: file and line; `lengths`: tokens of the requests.
    """

    where: str
    num: int
    lengths: Lengths
    rate: float | None
    clients: int
    ttft_s: float
    tpot_s: float | None

    @property
    def requests(self) -> Requests:
        """The requests that the client sent; of many, some."""
        num = min(self.num, max(MOST_SIMULATED, 10 * self.clients))
        if self.rate is not None:
            return at_rate(self.rate, self.lengths, num=num)
        return in_closed_loop(min(self.clients, num), self.lengths, num=num)


def read_records(path: Path) -> Iterator[ServerRecord]:
    """The records of a file; DataError for one that is none of the four."""
    text = _NOT_JSON.sub("null", read_text(path, "records of a load generator", most_bytes=MOST_BYTES))
    try:
        documents = [(str(path), msgspec.json.decode(text))]
    except msgspec.DecodeError:
        lines = [(f"{path}, line {i}", line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
        try:
            documents = [(where, msgspec.json.decode(line)) for where, line in lines]
        except msgspec.DecodeError as error:
            raise DataError(f"{path} is neither JSON nor JSON lines: {error}") from None
    for where, document in documents:
        for one in document if isinstance(document, list) else [document]:
            try:
                yield _bench(where, one) if "mean_ttft_ms" in one else _perf(where, one)
            except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
                why = f"it has no {error}" if isinstance(error, KeyError) else error
                raise DataError(f"{where} is no record of vLLM, SGLang, GenAI-Perf, AIPerf: {why}") from None


def _bench(where: str, of: Mapping[str, Any]) -> ServerRecord:
    """`vllm bench serve`, `sglang.bench_serving`."""
    num = int(of["completed"])
    rate = of.get("request_rate")
    rate = None if rate in (None, "inf") else float(rate)
    prompt, output = (round(of[f"total_{name}_tokens"] / num) for name in ("input", "output"))
    lens = of.get("input_lens", ()), of.get("output_lens", ())
    pairs = tuple((p, o) for p, o in zip(*lens, strict=True) if o)
    ratio = float(of.get("random_range_ratio") or 1.0) if of.get("dataset_name") == "random" else 1.0
    if not pairs and ratio < 1.0:  # SGLang draws from ratio x the stated to the stated
        prompt, output = (round(2.0 * tokens / (1.0 + ratio)) for tokens in (prompt, output))
    lengths = Lengths(prompt, max(output, 1), 1.0 if pairs else ratio, pairs=pairs)
    clients, ttft_ms, tpot_ms = of.get("max_concurrency"), of["mean_ttft_ms"], of["mean_tpot_ms"]
    return _checked(where, num, lengths, rate, clients, ttft_ms, tpot_ms)


def _perf(where: str, of: Mapping[str, Any]) -> ServerRecord:
    """GenAI-Perf, AIPerf: their "inter token latency" is the time per token of each request."""

    def mean(name: str) -> float:
        return float(of[name]["avg"]) * {"ns": 1e-6, "us": 1e-3, "s": 1e3}.get(of[name].get("unit", ""), 1.0)

    load = dict(_leaves(of.get("input_config", {})))
    num = int(of["request_count"]["avg"]) if "request_count" in of else int(load.get("request_count") or 0)
    lengths = Lengths(round(mean("input_sequence_length")), max(round(mean("output_sequence_length")), 1))
    clients = load.get("concurrency")
    rate = None if clients else load.get("request_rate")
    refuse("load of a record", DataError, where=where, is_said=clients or rate)
    tpot_ms = mean("inter_token_latency") if "inter_token_latency" in of else 0.0
    num = num or 10 * int(clients or 100)
    return _checked(where, num, lengths, rate, clients, mean("time_to_first_token"), tpot_ms)


def _leaves(of: Any) -> Iterator[tuple[str, Any]]:
    """Names and numbers of nested tables, whatever lies around them."""
    if isinstance(of, dict):
        for name, value in of.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield name, value
            yield from _leaves(value)


def _checked(
    where: str, num: int, lengths: Lengths, rate: Any, clients: Any, ttft_ms: Any, tpot_ms: Any
) -> ServerRecord:
    ttft_s, tpot_s = (1e-3 * float(number or 0.0) for number in (ttft_ms, tpot_ms))
    rate = None if rate is None else float(rate)
    names = {"num": num, "lengths": lengths, "rate": rate, "clients": clients}
    refuse("server record", DataError, f"{where}: ", ttft_s=ttft_s, tpot_s=tpot_s, **names)
    return ServerRecord(where, num, lengths, rate, int(clients or num), ttft_s, tpot_s or None)

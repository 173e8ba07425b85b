"""Speed of `search` on one core (CPU time): Calculon's space, DeepSeek-V3, and how cost grows with the space.

Beside Calculon, where CALCULON names a copy of github.com/calculon-ai/calculon (with psutil installed): its
own search over the plans of one (tp, pp), by the rate that it reaches on one core.
"""

import os
import resource
import subprocess
import sys
import time
from typing import Any

from benchmarks.timing import median_s, report
from meshwise.machine.hardware import find_cluster
from meshwise.model.find import find_model
from meshwise.search.search import Result, search

CALCULONS = ("sp", "overlap_tp", "overlap_dp", "overlap_pp", "offload_optimizer", "offload_activations")
"""Keys that Calculon varies and a search leaves alone unless told."""

OTHERS = """
import time
from calculon import io, System
from calculon.llm import Llm
from calculon.llm.optimal_execution import OptimalExecution as Search
app = Llm.Application(io.read_json_file("models/gpt3-175B.json"))
system = System(io.read_json_file("systems/a100_80e.json"))
start = time.process_time()
tried = Search.search(False, 1, False, 512, 1536, "float16", app, system, 8, 8, 8, 3, 1536, "none", True,
                      "rs_ag", [True], False, True, True)[1]
print(tried / (time.process_time() - start))
"""


def one(model: str, cluster: str, batch: int, seq: int, stated: dict[str, Any]) -> Result:
    return search(find_model(model), find_cluster(cluster), batch=batch, seq=seq, stated=stated)


def line(name: str, *job: Any, target_s: float | None = None) -> None:
    num = one(*job).plans_considered
    seconds = median_s(lambda: one(*job), 3, time.process_time)
    report(f"{name}: {num:,} plans, {num / seconds / 1e6:.1f} M/s", seconds, target_s)


def main() -> None:
    gpt3 = ("gpt3-175b", "a100-80g-sxm:512", 1536, 2048)
    line("GPT-3 on 512 A100, Calculon's keys", *gpt3, dict.fromkeys(CALCULONS, ("*",)), target_s=1.5)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"{'most memory so far':<60} {most:10.0f} MB   target 500 MB")
    for count in range(len(CALCULONS)):
        line(f"  {count} of these keys", *gpt3, dict.fromkeys(CALCULONS[::-1][:count], ("*",)))
    line("DeepSeek-V3 on 2,048 H800", "deepseek-v3", "h800-sxm:2048", 15360, 4096, {}, target_s=5.0)
    line("Llama 3 405B on 16,384 H100", "llama3-405b", "h100-80g-sxm:16384", 2048, 8192, {}, target_s=1.0)
    fsdp2 = {"implementation": ("fsdp2",)}
    line("Llama 3 70B on 64 H100, FSDP2", "llama3-70b", "h100-80g-sxm:64", 256, 8192, fsdp2, target_s=3.0)
    if folder := os.environ.get("CALCULON"):
        code = [sys.executable, "-c", OTHERS]
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(code, cwd=folder, env=environment, check=True, capture_output=True, text=True)
        print(f"{'Calculon, plans a second':<60} {float(done.stdout):10.0f}")

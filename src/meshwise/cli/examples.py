"""One or two examples under the help of every verb."""

from __future__ import annotations

import re
import textwrap
from typing import Any

EXAMPLES = {
    "estimate": (
        "estimate llama3-70b --cluster h100-80g-sxm:64 --plan tp=8,pp=2 --batch 128 --seq 8192",
        "estimate my/config.json --cluster my_cluster.toml --plan zero=3 --tokens 1T --price 2",
    ),
    "search": (
        "search llama3-70b --cluster h100-80g-sxm:64 --batch 128 --seq 8192 --top 5",
        "search llama3-8b --cluster h100-80g-sxm:16 --batch 64 --plan 'tp=1|2,pp=1'",
    ),
    "run": ("run ulysses --ranks 4 --profile out/",),
    "dryrun": ("dryrun model-2d --ranks 16 --rank 3", "dryrun train --ranks 8 --model llama3-8b --zero 3"),
    "compare": ("compare ulysses --ranks 4",),
    "calibrate": ("calibrate --device cpu -o my_machine.toml",),
    "validate": ("validate", "validate --runs my_runs.csv --json"),
    "fit": ("fit --data measurements/",),
    "list": ("list models", "list plan"),
    "explain": (
        "explain traces/ --model llama3-8b --cluster h100-80g-sxm:8 --plan zero=3 --batch 8 --seq 8192",
    ),
    "profile": ("profile -o traces/ -- torchrun --nproc-per-node=4 train.py",),
    "eval-lm": ("eval-lm --ranks 8",),
    "moe": ("moe --ranks 8",),
    "serve": (
        "serve llama3-70b --cluster h100-80g-sxm:8 --plan tp=8 --rate 4 --prompt 2048 --output 256",
        "serve deepseek-v3 --cluster h200-sxm:16 --plan ep=16,dp=16 --concurrency 512",
        "serve llama3-70b --cluster h200-sxm:64 --plan dtype=fp8 --rate 20 --ttft-ms 500 --token-ms 30",
    ),
    "launch": (
        "launch llama3-8b --cluster h100-80g-sxm:64 --plan zero=3 --batch 128 --seq 8192 --to torchtitan",
    ),
    "sweep": ("sweep scaling.toml -o results/",),
    "collective": ("collective all_reduce --cluster h100-80g-sxm:64 --size 64MiB --size 1e9",),
    "frontier layer": (
        "frontier layer --chip h100-80g-sxm --d-in 16384 --d-out 65536 --batch 4194304 --tp-out 8",
    ),
    "frontier run": ("frontier run --chip h100-80g-sxm --months 3",),
    "frontier sensitivity": ("frontier sensitivity --chip h100-80g-sxm",),
    "trace summary": ("trace summary traces/ --steps complete",),
    "trace merge": ("trace merge traces/ -o merged.json.gz",),
    "trace diff": ("trace diff before/ after/",),
    "trace sections": ("trace sections traces/",),
    "trace table": ("trace table traces/",),
    "trace ledger": ("trace ledger traces/ --json",),
    "trace launches": ("trace launches traces/",),
    "trace report": ("trace report traces/ -o report.html",),
    "trace rates": ("trace rates traces/",),
    "trace memory": ("trace memory traces/",),
    "trace bandwidth": ("trace bandwidth traces/",),
    "trace path": ("trace path traces/",),
    "web": ("web", "web --port 8123 --traces traces/"),
    "trace plot": ("trace plot traces/ -o ranks.png",),
}


def epilog(group: Any, command: Any) -> str | None:
    """The examples of a command as the end of its help; of a group, one of each of its first two commands."""
    name = f"{group} {command.name or command.callback.__name__.replace('_', '-')}".strip()
    inside = [lines[0] for verb, lines in EXAMPLES.items() if verb.startswith(f"{name} ")]
    lines = EXAMPLES.get(name, inside[:2])
    return "\b\nExamples:\n" + "\n".join(map(_shown, lines)) if lines else None


def _shown(line: str) -> str:
    """One command, broken before options, as a shell reads it, where it is wider than a terminal."""
    together = re.sub(r"(--\S+) (?!-)", "\\1\N{NO-BREAK SPACE}", f"meshwise {line}")
    parts = textwrap.wrap(
        together, 75, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
    )
    return " \\\n".join(parts).replace("\N{NO-BREAK SPACE}", " ")

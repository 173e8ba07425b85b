"""Draws the figures of docs/estimate.md: `python docs/figures/estimate.py`."""

from __future__ import annotations

from pathlib import Path

import meshwise as mw
from meshwise.report.pages import draw

STEPS = {
    "gpt3": {
        "model": "gpt3-175b",
        "cluster": "a100-80g-sxm:512",
        "plan": "tp=8,pp=8,vpp=3,recompute=selective",
        "batch": 512,
        "seq": 2048,
    },
    "deepseek": {
        "model": "deepseek-v3",
        "cluster": "h800:2048",
        "plan": "pp=16,ep=64,schedule=dualpipe,dtype=fp8,recompute=full,overlap_ep=1,"
        + f"stages=3-{'4-' * 14}2",
        "batch": 15360,
        "seq": 4096,
    },
    "llama": {
        "model": "llama3-405b",
        "cluster": "h100-80g-sxm:16384",
        "plan": f"tp=8,pp=16,stages=7-{'8-' * 14}7",
        "batch": 2048,
        "seq": 8192,
    },
}


def main() -> None:
    for name, step in STEPS.items():
        draw(mw.estimate(**step), Path(__file__).parent / f"estimate_{name}.png")


if __name__ == "__main__":
    main()

"""What each rank of `test_network.py` runs; the environment says which rank it is, as under torchrun."""

from __future__ import annotations

import json
import os
from typing import Any

from meshwise.instruments.calibrate import collective_time_s
from meshwise.instruments.launch import Place, launch
from meshwise.instruments.run import run_rank
from meshwise.programs import find_program, make_options

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
PAYLOAD_BYTES = (8 << 20,)
# All-to-all drives several TCP streams at once through the cable; how they share it varies.
REPEATS = {"all_reduce": 2, "all_gather": 2, "all_to_all": 6}
NUM_RUNS = 2
PROGRAMS: dict[str, dict[str, Any]] = {
    "model-2d": {
        **{"seq": 32768, "hidden": 64, "ffn_hidden": 64, "layers": 1, "tp": 4, "dtype": "fp32"},
        **{"after_ulysses": False, "backward": True},
    },
    "ulysses": {
        "seq": 4096,
        "hidden": 1024,
        "heads": 8,
        "dtype": "fp64",
        "attention": "flash",
        "causal": True,
    },
}


def measure(place: Place) -> dict[str, Any]:
    """Times of the collectives alone, and of each that the programs issue on this rank, run by run."""
    alone = [
        {
            "kind": kind,
            "payload_bytes": size,
            "time_s": collective_time_s(place, kind, size, repeats=REPEATS[kind]),
        }
        for kind in COLLECTIVES
        for size in PAYLOAD_BYTES
    ]
    inside = {}
    for name, values in PROGRAMS.items():
        options = make_options(find_program(name), values)
        runs = [run_rank(place, name, options, 0, True).ledger.rows() for _ in range(NUM_RUNS)]
        inside[name] = [[row for row in rows if row["collective"] and row["time_s"]] for rows in runs]
    return {"alone": alone, "inside": inside}


if __name__ == "__main__":
    results = launch(measure, int(os.environ["WORLD_SIZE"]))
    if results is not None:
        print(json.dumps(results))

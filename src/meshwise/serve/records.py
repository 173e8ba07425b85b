"""A row for each request of a load, as benchmark clients write them."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwise.serve.load import LoadResult


def records(load: LoadResult) -> dict[str, list[Any]]:
    """Columns: who, when [s], how long [s], tokens; `counts` in the figures, or warm-up and end."""
    run, requests = load.simulated, load.requests
    num = len(run.output)
    tpot = np.where(run.output > 1, (run.last_s - run.first_s) / np.maximum(run.output - 1, 1), np.nan)
    counts = np.ones(num, dtype=bool)
    if load.window is not None:
        sent = load.window.served.sent_s
        counts = (run.sent_s >= sent.min()) & (run.sent_s <= sent.max())
    within = load.limits.kept(run)
    found: dict[str, Any] = {
        "request": np.arange(num),
        "session": np.array(requests.sessions) if requests.after else np.arange(num),
        "replica": run.replica,
        "sent_s": run.sent_s,
        "start_s": run.start_s,
        "first_token_s": run.first_s,
        "last_token_s": run.last_s,
        "prompt": np.array(requests.prompt),
        "output": run.output,
        "found": run.found,
        "loaded": run.loaded,
        "ttft_s": run.ttft_s,
        "tpot_s": tpot,
        "e2e_s": run.last_s - run.sent_s,
        "within_limits": within,
        "counts": counts,
    }
    columns = {name: column.tolist() for name, column in found.items()}
    columns["tpot_s"] = [None if value != value else value for value in columns["tpot_s"]]
    return columns

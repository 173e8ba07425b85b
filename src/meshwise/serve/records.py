"""A row for each request of a load, as benchmark clients write them."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwise.serve.load import LoadResult


def records(load: LoadResult) -> dict[str, list[Any]]:
    """Columns: who, when [s], how long [s], tokens; `counts` in the figures, or warm-up and end."""
    run, requests = load.simulated, load.requests
    num = len(run.output)
    tpot = [one if more else None for one, more in zip(run.token_s.tolist(), run.output > 1, strict=True)]
    counts = np.ones(num, dtype=bool)
    if load.window is not None:
        sent = load.window.served.sent_s
        counts = (run.sent_s >= sent.min()) & (run.sent_s <= sent.max())
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
        "within_limits": load.limits.kept(run),
        "counts": counts,
    }
    return {name: np.asarray(column).tolist() for name, column in found.items()}

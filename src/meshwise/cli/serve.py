"""`meshwise serve`: what a server of a model gives: how many fit, each token's time, under load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwise import api
from meshwise.cli.output import on_nodes, show, write_rows
from meshwise.core.errors import WorkloadError
from meshwise.core.options import takes


@takes(api.serve)
def serve(
    *,
    ray: str = "",
    csv: Path | None = None,
    plot: Path | None = None,
    trace: Path | None = None,
    html: Path | None = None,
    out: Path | None = None,
    json: bool = False,
    **asked: Any,
) -> None:
    """Estimate an inference server: latency, throughput, what fits.

    Kernels are timed by models fitted to measurements of serving kernels; routing is even, nothing overlaps.
    With --rate, --concurrency or --requests the engine is simulated pass by pass, queue included.
    With --rate, --ttft-ms and --token-ms, and no tp in the plan, the answer is the fewest GPUs of the cluster
    (or of several: h100-80g-sxm:64,b200-sxm:64) that keep the limits; exit 1 if none do.

    Args:
        csv: Write a row for each request of the load to this CSV file; or each layout considered.
        plot: Draw the trade-offs (png, svg, pdf).
        trace: Write a timeline of the load for Perfetto: replicas, requests, what waits.
        out: Write the files of --to into this folder [print them].
    """
    with on_nodes(ray, "clusters"):
        found = api.serve(**asked)
    if ray and found.sizing is None:
        raise WorkloadError("--ray is for sizing on several clusters; give limits and no tp, or leave it out")
    if plot and found.sizing is None:
        raise WorkloadError("--plot shows layouts; add --pareto, or limits and a rate without tp")
    if (csv or trace) and found.load is None and (trace or found.sizing is None):
        raise WorkloadError("--csv and --trace show a load; give rate, concurrency or requests (or --pareto)")
    if out is not None and found.deployment is None:
        raise WorkloadError("--out is for files of --to; give --to kubernetes, dynamo, llm-d or vllm-stack")
    columns = found.columns if csv is not None else {}
    write_rows(csv, [list(columns), *zip(*columns.values(), strict=True)])
    if trace is not None and found.load is not None:
        from meshwise.report.serve_trace import write_load_timeline

        write_load_timeline(found.load.simulated, trace)
    if out is not None and found.deployment is not None:
        found.deployment.write(out)
    show(found, json=json, html=html, plot=plot, ok=not found.is_no, with_files=out is None)

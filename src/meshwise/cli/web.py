"""`meshwise web`: the page in the browser."""

from pathlib import Path
from typing import Annotated

import typer

from meshwise.core.errors import DataError
from meshwise.core.extras import import_extra

LOOPBACK = "127.0.0.1"
Port = Annotated[int, range(2**16)]


def web(*, port: Port = 8000, host: str = LOOPBACK, traces: Path | None = None) -> None:
    """Open the page in a browser: plans, search, serving, traces.

    The page needs no network. It answers this machine alone; with --host, others who know the token.

    Args:
        port: Port; 0 for any that is free.
        host: Address to listen on; other than this machine's own, a token is needed.
        traces: Folder below which the page may read profiler traces.
    """
    for package in ("starlette", "uvicorn", "plotly"):
        import_extra(package, "web")
    if traces is not None and not traces.is_dir():
        raise DataError(f"--traces {traces} is no folder; name the folder of your profiler traces")
    from meshwise.web.app import serve_page

    serve_page(host, port, traces, say=lambda text: typer.echo(text, err=True))

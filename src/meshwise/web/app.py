"""The server of the page: `meshwise web`. It answers on this machine alone, unless a host is stated.

Other sites cannot use it: a page of theirs has another origin, and a name of theirs that leads to this
machine is no allowed host. With a host that others reach, every request needs the token of the printed
address.

A socket is opened first, so that the address that is printed is the one that answers.

Of the slow questions a few are answered at a time, the others wait in a line that has a length. A client that
goes away or asks anew leaves the line, and what runs for it ends.
"""

import asyncio
import hmac
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from meshwise.core.errors import DataError, MeshwiseError
from meshwise.report.html import escape
from meshwise.web.forms import form_html, view_name
from meshwise.web.views import QUICK, VIEWS, Hear, Server, answer, options

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
STATIC = [("meshwise", "web/static"), ("meshwise", "report/static"), ("plotly", "package_data")]
"""Packages and their folders of scripts and styles."""
MOST_BYTES = 1_000_000
"""A state is no larger."""
READ_S = 20.0
"""A body, or the next piece of a file, arrives within this time."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_FIRST = {"model": "llama3-8b", "cluster": "h100-80g-sxm:8"}


def make_app(server: Server | None = None, *, token: str = "") -> Starlette:
    """The application of one server; with a `token`, any host may ask that knows it."""
    guard = [] if token else [Middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK))]
    app = Starlette(
        routes=[
            Route("/", _index),
            Mount("/static", StaticFiles(packages=STATIC)),
            Route("/api/progress/{name}", _progress),
            Route("/api/drop", _drop, methods=["POST"]),
            Route("/api/drop/{name}/{file:path}", _receive, methods=["PUT"]),
            Route("/api/{view}", _api, methods=["POST"]),
        ],
        lifespan=_lifespan,
        middleware=[*guard, Middleware(_Guard, token=token)],
    )
    app.state.server = server or Server()
    app.state.pool = Pool()
    return app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    yield
    app.state.pool.close()
    app.state.server.drop.close()


class _Guard:
    """Refuses other sites, and who does not know the token; adds the headers that confine the page."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self.app if scope["type"] != "http" else self._refusal(Request(scope)) or self.app
        await answer(scope, receive, send_confined)

    def _refusal(self, request: Request) -> Response | None:
        origin, stated = request.headers.get("origin"), request.query_params.get("token")
        if origin is not None and origin != f"{request.url.scheme}://{request.headers.get('host')}":
            return Response("another site may not ask", 403)
        if self._knows(stated):
            found = RedirectResponse("/")
            found.set_cookie("token", self.token, httponly=True, samesite="strict")
            return found
        if self.token and not self._knows(request.cookies.get("token")):
            return Response("open the address that meshwise web printed: it holds the token", 403)
        return None

    def _knows(self, stated: str | None) -> bool:
        return bool(self.token and stated) and hmac.compare_digest(str(stated).encode(), self.token.encode())


async def _index(request: Request) -> Response:
    links = "".join(f'<a href="#{view}">{escape(view_name(view))}</a>' for view in VIEWS)
    written = "".join(form_html(view, options(view)) for view in VIEWS)
    page = (resources.files("meshwise.web") / "static" / "page.html").read_text(encoding="utf-8")
    return HTMLResponse(page.replace("<!--links-->", links).replace("<!--forms-->", written))


async def _api(request: Request) -> Response:
    """The answer of a view, or one sentence that says what is wrong with its state: an answer too."""
    view, server = request.path_params["view"], request.app.state.server
    try:
        if int(request.headers.get("content-length", MOST_BYTES + 1)) > MOST_BYTES:
            return _json({"error": f"a state has at most {MOST_BYTES:,} bytes"}, 413)
        body = await asyncio.wait_for(request.body(), READ_S)
        state = msgspec.json.decode(body, type=dict[str, str])
    except (msgspec.MsgspecError, ValueError):
        return _json({"error": "a state is one JSON object of texts"}, 400)
    except (TimeoutError, ClientDisconnect):
        return _GONE
    try:
        if view in QUICK:
            return _json(answer(view, state, server))
        return _json(await request.app.state.pool.answer(request, partial(answer, view, state, server)))
    except MeshwiseError as error:
        return _json({"error": str(error)})
    except ClientDisconnect:
        return _GONE


async def _progress(request: Request) -> Response:
    """How far the answer to a slow question is."""
    return _json(request.app.state.pool.progress(request.path_params["name"]))


async def _drop(request: Request) -> Response:
    """The name of a new folder, for the files of a folder that the browser sends."""
    return _json({"folder": request.app.state.server.drop.start()})


async def _receive(request: Request) -> Response:
    """A file of that folder."""
    try:
        name, file = request.path_params["name"], request.path_params["file"]
        await request.app.state.server.drop.receive(name, file, _timed(request.stream()))
    except (TimeoutError, ClientDisconnect):
        return _GONE
    except DataError as error:
        return _json({"error": str(error)})
    except OSError as error:
        return _json({"error": f"the folder cannot be kept: {error.strerror}"})
    return _json({})


async def _timed(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces of a body; TimeoutError where the next one is late."""
    while (piece := await asyncio.wait_for(anext(pieces, None), READ_S)) is not None:
        yield piece


_GONE = Response("the request did not arrive whole", 408, {"connection": "close"})


def _json(document: dict[str, object], status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")


# --- its start ------------------------------------------------------------------------------------


def serve_page(host: str, port: int, traces: Path | None, *, say: Callable[[str], None]) -> None:
    """Serve the page until it is interrupted; `say` is told its address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        _listen(listener, host, port)
        server = Server(traces)
        token = "" if host in ("127.0.0.1", "localhost", "::1") else secrets.token_urlsafe(24)
        app = make_app(server, token=token)
        answer("explore", _FIRST, server)  # imports what others need
        shown = f"[{host}]" if ":" in host else host
        say(f"http://{shown}:{listener.getsockname()[1]}/{'?token=' + token if token else ''}")
        config = uvicorn.Config(app, http=Patient, ws="none", log_level="warning", access_log=False)
        uvicorn.Server(config).run([listener])


class Patient(AutoHTTPProtocol):
    """A connection that is closed where the head of a request does not arrive in time."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        is_answered = self.cycle is None or self.cycle.response_complete
        if not is_answered and self._late is not None:
            self._late.cancel()
            self._late = None
        elif is_answered and self._late is None:
            self._late = self.loop.call_later(READ_S, self.transport.close)


def _listen(listener: socket.socket, host: str, port: int) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else an answer waits 44 ms for more
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        raise DataError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    except TypeError:
        raise DataError(f"--host {host!r} is no name of a host; use 127.0.0.1") from None


# --- the slow questions ---------------------------------------------------------------------------

SLOTS = min(4, os.cpu_count() or 1)
"""Questions that are answered at a time."""
MOST_WAITING = 32
"""Questions that may wait."""


class _LeftError(Exception):
    """Nobody waits for this answer any more."""


@dataclass(eq=False)
class _Job:
    """A question in the line: whether its turn has come, and how far it is."""

    name: str
    runs: bool = False
    so_far: str = ""
    left: Event = field(default_factory=Event)

    def run(self, ask: Callable[[Hear], dict[str, Any]]) -> dict[str, Any]:
        self.runs = True
        return ask(self.hear)

    def hear(self, so_far: str) -> None:
        self.so_far = so_far or self.so_far
        if self.left.is_set():
            raise _LeftError


class Pool:
    """The line, and the threads that answer it; a question is known by the name that its asker gave it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(SLOTS)
        self._jobs: list[_Job] = []

    async def answer(self, request: Request, ask: Callable[[Hear], dict[str, Any]]) -> dict[str, Any]:
        """What `ask` answers when its turn comes. ClientDisconnect if the client goes away before."""
        waiting = sum(not job.runs for job in self._jobs)
        if waiting >= MOST_WAITING:
            raise DataError(f"{waiting} questions wait for an answer already; ask again in a minute")
        job = _Job(request.headers.get("question", "")[:40])
        self._jobs.append(job)
        answered = self._threads.submit(job.run, ask)
        answered.add_done_callback(lambda _: self._jobs.remove(job))
        found = asyncio.wrap_future(answered)
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((found, gone), return_when=asyncio.FIRST_COMPLETED)
            if not found.done():
                raise ClientDisconnect
            return found.result()
        finally:
            job.left.set()
            found.cancel()
            gone.cancel()

    def progress(self, name: str) -> dict[str, Any]:
        """Of the question `name`: how many come before it while it waits, and how far its answer is."""
        for before, job in enumerate(self._jobs):
            if job.name == name:
                return {"before": 0 if job.runs else before, "so_far": job.so_far}
        return {"before": 0, "so_far": ""}

    def close(self) -> None:
        """Let go of all questions."""
        for job in self._jobs:
            job.left.set()
        self._threads.shutdown(wait=False, cancel_futures=True)


async def _gone(request: Request) -> None:
    """Ends when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""Starting the server: a socket first, so that the address that is printed is the one that answers."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from meshwise.core.errors import DataError
from meshwise.web.app import READ_S, make_app
from meshwise.web.views import Server, answer


def serve_page(host: str, port: int, traces: Path | None, *, say: Callable[[str], None]) -> None:
    """Serve the page until it is interrupted; `say` is told its address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        _listen(listener, host, port)
        server = Server(traces)
        token = "" if host in ("127.0.0.1", "localhost", "::1") else secrets.token_urlsafe(24)
        app = make_app(server, token=token)
        answer(
            "explore", {"model": "llama3-8b", "cluster": "h100-80g-sxm:8"}, server
        )  # the first one imports
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

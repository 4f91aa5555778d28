"""What a process answers over HTTP, metrics and how it is, and `rose health`, which asks.

Keeps true
- `/healthz` is 200 while the loop turns over and `/readyz` while it does what it is there for, 503 otherwise; the body
  is the sentence. Any other path is 404, and nothing that is sent changes anything.
- Who asks and then says nothing holds one thread, for PATIENCE_SECONDS at most; however many ask, and however slowly,
  they hold no more than MOST_LINES: the process's own files and sockets are not theirs to use up.
"""

import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, InvalidURL
from socketserver import ThreadingMixIn
from threading import Lock, Thread, Timer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from rose.pipeline.config.options import Common
from rose.pipeline.config.sections import HIGHEST_PORT
from rose.pipeline.process.terminal import print_line
from rose.schemas.errors import RoseError, UsageError
from rose.topics.health import HEALTH, Health

LIVE, READY, METRICS = "/healthz", "/readyz", "/metrics"

PORT = re.compile("[0-9]{1,5}")

TEXT = "text/plain; charset=utf-8"
"""The type of what is told of a process."""

ASK_SECONDS = 3.0
"""How long a process that is asked by `rose health` may be silent."""

ANSWER_SECONDS = 10.0
"""How long its whole answer may take."""

PATIENCE_SECONDS = 10.0
"""With whoever is connected and says nothing."""

MOST_LINES = 32
"""Connections at once. Who comes when there are so many takes the place of the one that has lasted longest."""

WAITING_REQUESTS = 128
"""One more has to knock again."""

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = WAITING_REQUESTS

    def __init__(self, *arguments: Any) -> None:
        self._lines: dict[Any, None] = {}
        """Connections, in the order in which they came."""
        self._changing = Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        oldest = None
        with self._changing:
            if len(self._lines) >= MOST_LINES:
                oldest = next(iter(self._lines))
                del self._lines[oldest]
            self._lines[request] = None
        if oldest is not None:
            with suppress(OSError):  # it has just ended by itself
                oldest.shutdown(socket.SHUT_RDWR)  # whoever waits for it finds its end, and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._changing:
            self._lines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who goes away or falls silent before the answer is no trouble of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """A probe every few seconds is no decision: not logged."""


def health_app(health: Health) -> WsgiApp:
    """The process's WSGI application."""
    from prometheus_client import make_wsgi_app

    import rose.topics.metrics  # noqa: F401  exports what the process counts

    metrics: WsgiApp = make_wsgi_app()

    def answer(environ: dict[str, Any], begin: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == METRICS:
            return metrics(environ, begin)
        standing = health.status
        if path in (LIVE, READY):
            well, sentence = standing.alive if path == LIVE else standing.ready, standing.sentence
            status = "200 OK" if well else "503 Service Unavailable"
        else:
            status, sentence = "404 Not Found", f"there are {METRICS}, {LIVE} and {READY}"
        begin(status, [("Content-Type", TEXT)])
        return [f"{sentence}\n".encode()]

    return answer


def serve_health(host: str, port: int, health: Health = HEALTH) -> int:
    """Answer at this address for as long as the process lives; returns the port. Raises UsageError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        of_family = type("_Server", (_Server,), {"address_family": family})
        server: WSGIServer = make_server(host, port, health_app(health), server_class=of_family, handler_class=_Handler)
    except (OSError, UnicodeError, OverflowError) as error:  # the second: no name of a host; the third: no port
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"metrics cannot be served on {host}:{port} ({reason}): choose another") from None
    Thread(target=server.serve_forever, name="http", daemon=True).start()
    return int(server.server_port)


def print_health(common: Common, address: str | None, *, live: bool) -> None:
    """Print how the process at HOST:PORT is; left out, the one of this container. Raises UsageError or Unwell."""
    address = address or _own_address(common)
    host, colon, port = address.rpartition(":")
    if not colon or not PORT.fullmatch(port) or not 0 < int(port) <= HIGHEST_PORT:
        raise UsageError(f"{address!r} is no HOST:PORT")
    try:
        connection = HTTPConnection(host.strip("[]") or "127.0.0.1", int(port), timeout=ASK_SECONDS)
        with closing(connection), _hung_up(connection, ANSWER_SECONDS):
            connection.request("GET", LIVE if live else READY)
            answer = connection.getresponse()
            sentence = answer.read(1000).decode(errors="replace").strip()
    except (UnicodeError, InvalidURL):
        raise UsageError(f"{address!r} is no HOST:PORT") from None
    except (OSError, HTTPException) as error:
        raise ProcessUnhealthy(
            f"nothing answers at {address} ({error}): is the role up, and its metrics served there?"
        ) from None
    if answer.headers.get("Content-Type") != TEXT:
        raise ProcessUnhealthy(f"what answers at {address} is no process of ROSE: give the address of a role's metrics")
    if answer.status != 200:
        raise ProcessUnhealthy(sentence)
    print_line(sentence)


@contextmanager
def _hung_up(connection: HTTPConnection, seconds: float) -> Iterator[None]:
    """End the connection, which is made here, after so long, though something comes now and then. Raises OSError."""
    connection.connect()
    line: socket.socket = connection.sock

    def hang_up() -> None:
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)

    timer = Timer(seconds, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _own_address(common: Common) -> str:
    from rose.pipeline.config.load import load

    port = load(common).settings.metrics.port
    if not port:
        raise UsageError("nothing says where to ask: give HOST:PORT of the role's metrics, or set metrics.port")
    return f"127.0.0.1:{port}"


class ProcessUnhealthy(RoseError):
    """A process that is not what it was asked to be."""

"""HTTP server for a process's metrics and health, and `rose health`, its client.

Keeps true
- `/healthz` is 200 while the loop runs, `/readyz` is 200 while the process does its work, and both are 503 otherwise;
  the body is one sentence. Any other path is 404. No request changes state.
- A silent connection holds one thread, for at most PATIENCE_SECONDS. Connections never hold more than MOST_LINES
  threads and sockets, however many clients there are and however slow they are.
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
from rose.pipeline.terminal import print_line
from rose.schemas.errors import RoseError, UsageError
from rose.schemas.setting_bounds import HIGHEST_PORT
from rose.topics.health import HEALTH, Health

LIVE, READY, METRICS = "/healthz", "/readyz", "/metrics"

PORT = re.compile("[0-9]{1,5}")

TEXT = "text/plain; charset=utf-8"
"""The content type of a health answer."""

ASK_SECONDS = 3.0
"""How long `rose health` waits for the next bytes of an answer."""

ANSWER_SECONDS = 10.0
"""How long the complete answer may take."""

PATIENCE_SECONDS = 10.0
"""How long a connection may be silent."""

MOST_LINES = 32
"""Maximum number of connections. A new connection above the maximum replaces the oldest one."""

WAITING_REQUESTS = 128
"""Length of the listen queue; further clients have to connect again."""

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = WAITING_REQUESTS

    def __init__(self, *arguments: Any) -> None:
        self._lines: dict[Any, None] = {}
        """Open connections, oldest first."""
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
            with suppress(OSError):  # the connection has just ended by itself
                oldest.shutdown(socket.SHUT_RDWR)  # its thread sees the end and closes the socket
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._changing:
            self._lines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or fall silent before the answer; report other errors."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests: health checks come every few seconds."""


def health_app(health: Health) -> WsgiApp:
    """Return the WSGI application that answers with the metrics and the health of the process."""
    from prometheus_client import make_wsgi_app

    import rose.topics.metrics  # noqa: F401  exports the process's metrics

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
    """Serve on this address while the process lives, and return the port. Raises UsageError if it cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        of_family = type("_Server", (_Server,), {"address_family": family})
        server: WSGIServer = make_server(host, port, health_app(health), server_class=of_family, handler_class=_Handler)
    except (OSError, UnicodeError, OverflowError) as error:  # the second: invalid host name; the third: invalid port
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"metrics cannot be served on {host}:{port} ({reason}): choose another") from None
    Thread(target=server.serve_forever, name="http", daemon=True).start()
    return int(server.server_port)


def print_health(common: Common, address: str | None, *, live: bool) -> None:
    """Print the health of the process at HOST:PORT; if `address` is None, of the process on the own metrics port.

    `live` asks whether the loop runs instead of whether the process does its work. Raises UsageError for a bad address,
    ProcessUnhealthy if the process does not answer or reports a problem.
    """
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
    """Connect, and shut the connection down after `seconds`, even if it is not silent. Raises OSError."""
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
    """The process does not answer, or is not healthy."""

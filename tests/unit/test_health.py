"""Health of a process: silence is a hang after any report, a waiting process is healthy, and HTTP reports the same."""

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline import health_server as health_over_http
from rose.pipeline.config.options import Common
from rose.pipeline.health_server import MOST_LINES, ProcessUnhealthy, print_health, serve_health
from rose.schemas.errors import UsageError
from rose.topics.health import (
    HUNG_SECONDS,
    RESTART_LIMIT,
    RESTART_WINDOW_SECONDS,
    START_SECONDS,
    Health,
    LoopReport,
    status_of,
)
from rose.workers.executor.records import health_summary


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(sentence=st.text(), ready=st.booleans(), lasts=st.floats(0, 1e6), silent=st.floats(0, 1e7))
def test_health_report_is_valid_for_its_time_and_silence_means_hung(
    sentence: str, ready: bool, lasts: float, silent: float
) -> None:
    how = status_of(LoopReport(sentence, ready, 0.0, lasts), silent)
    assert how.alive == (silent <= lasts)
    assert how.ready == (ready and how.alive)
    assert sentence in how.sentence


def test_progress_report_keeps_the_last_status() -> None:
    clock = Clock()
    health = Health(clock)
    clock.now = START_SECONDS
    assert health.status.alive and not health.status.ready
    health.report("serves")
    for _ in range(3):
        clock.now += HUNG_SECONDS
        assert health.status.ready and health.status.sentence == "serves"
        health.report_progress()
    clock.now += HUNG_SECONDS + 1
    assert not health.status.alive and "serves" in health.status.sentence


def test_repeatedly_restarting_process_is_not_ready() -> None:
    clock = Clock()
    health = Health(clock)
    for times in range(1, RESTART_LIMIT + 1):
        health.report_restart("the topic refuses it")
        assert not health.status.ready
        assert "the topic refuses it" in health.status.sentence
        health.report("owns homes")
        assert health.status.ready == (times < RESTART_LIMIT), "leaders may move"
    assert health.status.alive, "to start it again would not mend it"
    assert f"restarted {RESTART_LIMIT} times" in health.status.sentence
    assert "the topic refuses it" in health.status.sentence
    clock.now += RESTART_WINDOW_SECONDS + 1
    health.report("owns homes")
    assert health.status.ready
    assert health.status.sentence == "owns homes"


@pytest.mark.parametrize(
    ("version", "newest", "refused", "paused", "ready", "words"),
    [
        (-1, -1, "", "", False, "waits for a first policy version"),
        (7, 7, "", "", True, "serves version 7"),
        (7, 8, "", "", True, "serves version 7"),
        (7, 9, "", "", False, "the newest on the log is 9"),
        (7, 8, "a digest is wrong", "", False, "refuses version 8: a digest is wrong"),
        (7, 7, "", "a grant parked it", False, "takes no turns: a grant parked it"),
    ],
)
def test_executor_with_the_current_policy_and_an_open_gate_is_ready(
    version: int, newest: int, refused: str, paused: str, ready: bool, words: str
) -> None:
    sentence, is_ready = health_summary(version, newest, refused, pause_reason=paused)
    assert is_ready == ready and words in sentence


def test_http_and_command_distinguish_alive_ready_and_hung(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    health = Health(clock)
    address = f"127.0.0.1:{serve_health('127.0.0.1', 0, health)}"

    def response_of(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    assert response_of("/healthz") == (200, "starting\n")
    assert response_of("/readyz") == (503, "starting\n")
    print_health(Common(), address, live=True)
    with pytest.raises(ProcessUnhealthy, match="starting"):
        print_health(Common(), address, live=False)
    health.report("serves")
    assert response_of("/readyz") == (200, "serves\n")
    print_health(Common(), address, live=False)
    assert capsys.readouterr().out == "starting\nserves\n"
    assert response_of("/metrics")[1].startswith("# HELP")
    assert response_of("/../etc/passwd")[0] == 404
    clock.now += HUNG_SECONDS + 1
    assert {response_of("/healthz")[0], response_of("/readyz")[0]} == {503}
    with pytest.raises(ProcessUnhealthy, match="hangs"):
        print_health(Common(), address, live=True)


def test_health_server_bounds_connections_and_answers_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health_over_http._Handler, "timeout", 600.0)
    health = Health()
    health.report("serves")
    port = serve_health("127.0.0.1", 0, health)
    lines = [socket.create_connection(("127.0.0.1", port), 60) for _ in range(MOST_LINES)]
    for line in lines:
        line.sendall(b"GET /rea")
    print_health(Common(), f"127.0.0.1:{port}", live=False)
    assert lines[0].recv(1) == b"", "the one that lasted longest made room"
    lines[-1].sendall(b"dyz HTTP/1.0\r\n\r\n")
    assert b" 200 " in lines[-1].recv(100), "the others are still heard"
    for line in lines:
        line.close()


def unused() -> str:
    with socket.socket() as spare:
        spare.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{spare.getsockname()[1]}"


@pytest.mark.parametrize(
    ("address", "refusal", "words"),
    [
        (unused, ProcessUnhealthy, "nothing answers at 127.0.0.1"),
        (lambda: "router", UsageError, "no HOST:PORT"),
        (lambda: "router:http", UsageError, "no HOST:PORT"),
        (lambda: "router:70000", UsageError, "no HOST:PORT"),
        (lambda: "router:\u00b2", UsageError, "no HOST:PORT"),
        (lambda: f"router:{'9' * 5000}", UsageError, "no HOST:PORT"),
        (lambda: "a..b:9464", UsageError, "no HOST:PORT"),
        (lambda: "a b:9464", UsageError, "no HOST:PORT"),
        (lambda: None, UsageError, "metrics.port"),
    ],
)
def test_health_command_without_a_server_reports_that(
    address: Callable[[], str | None], refusal: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROSE_METRICS__PORT", raising=False)
    with pytest.raises(refusal, match=words):
        print_health(Common(), address(), live=False)


@pytest.mark.parametrize(("host", "port"), [("a..b", 9464), ("127.0.0.1", 70_000), ("127.0.0.1", -1)])
def test_health_server_that_cannot_listen_reports_that(host: str, port: int) -> None:
    with pytest.raises(UsageError, match=f"metrics cannot be served on {host}:{port} .*: choose another"):
        serve_health(host, port)


def test_health_port_in_a_container_comes_from_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    health = Health()
    health.report("serves")
    monkeypatch.setenv("ROSE_METRICS__PORT", str(serve_health("127.0.0.1", 0, health)))
    print_health(Common(), None, live=False)
    assert capsys.readouterr().out == "serves\n"


def replying(*pieces: bytes) -> str:
    """Run a server that sends these bytes to every client and then nothing; yield its address."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve_one() -> None:
        line, _ = server.accept()
        line.recv(1000)
        for piece in pieces:
            line.sendall(piece)
        line.recv(1000)  # until the client disconnects
        line.close()
        server.close()

    threading.Thread(target=serve_one, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("of_type", [b"Content-Type: text/html\r\n", b""])
def test_foreign_server_on_the_port_is_not_a_healthy_process(of_type: bytes) -> None:
    address = replying(b"HTTP/1.1 200 OK\r\n", of_type, b"Content-Length: 7\r\n\r\nwelcome")
    with pytest.raises(ProcessUnhealthy, match="is no process of ROSE"):
        print_health(Common(), address, live=False)


def test_endless_health_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_over_http, "ASK_SECONDS", 600.0)
    monkeypatch.setattr(health_over_http, "ANSWER_SECONDS", 0.05)
    with pytest.raises(ProcessUnhealthy, match="nothing answers at"):
        print_health(Common(), replying(b"HTTP/1.1"), live=False)

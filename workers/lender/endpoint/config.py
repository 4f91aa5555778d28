"""Settings of an endpoint that lends by requests."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rose.schemas.errors import UsageError
from rose.schemas.setting_bounds import YEAR_SECONDS, check_bounds, is_http_server

MIN_PROMISE_SECONDS = 1e-6
"""Lower bound of the latency promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """A vLLM server that serves the policy's model and lends by requests.

    The lender keeps the server's latency targets. Limits on turns are those of the section `executor`.
    """

    url: str = ""
    """URL of the server, `http://host:port`; `rose lend --endpoint` sets it. Heartbeats and logs contain it."""
    model: str = ""
    """Name under which the server serves the policy; empty: the only model that it serves."""
    folder: Path = Path("runs/endpoint")
    """Folder in which policy versions are written for the server. The server must see it under the same path."""
    ttft_seconds: float = 1.0
    """Latency target: time from a request to its first token."""
    tpot_seconds: float = 0.1
    """Latency target: mean time from one token of a request to the next."""

    def __post_init__(self) -> None:
        if self.url and not is_http_server(self.url):
            raise UsageError("endpoint.url is http://host:port, with no password in it: logs name it")
        check_bounds(
            self,
            {"ttft_seconds": (MIN_PROMISE_SECONDS, YEAR_SECONDS), "tpot_seconds": (MIN_PROMISE_SECONDS, YEAR_SECONDS)},
        )

    @property
    def folder_name(self) -> str:
        """Host and port of the endpoint as a folder name, the same for every lender of the endpoint."""
        return urlsplit(self.url).netloc.replace(":", "-")

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
    """A vLLM server of the policy's model, whose latency this lender keeps. What it takes on is the executor's."""

    url: str = ""
    """`http://host:port`, where its API is; `rose lend --endpoint` says it. Heartbeats and logs name it."""
    model: str = ""
    """The name under which it serves the policy; empty: the only one that it has."""
    folder: Path = Path("runs/endpoint")
    """Where policy versions are written for it to load, in a folder of its own there: its machine sees that under the
    same path."""
    ttft_seconds: float = 1.0
    """Its promise: from a request to its first token."""
    tpot_seconds: float = 0.1
    """Its promise: from one token of a request to the next, in the mean."""

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

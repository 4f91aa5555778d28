"""Settings of `rose lend`: of a server, of an endpoint that lends by requests, and the file that `ROSE_LEND` names."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from rose.schemas.errors import UsageError
from rose.schemas.setting_bounds import YEAR_SECONDS, check_bounds, is_http_server
from rose.workers.lender.admission import Promise


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """How serving's KV memory is shared with the guest."""

    headroom: float = 0.2
    """Share of serving's KV memory that the guest's growth leaves free; it is cut when serving eats half of that."""
    quiet_seconds: float = 10.0
    """So long after a cut the guest may grow again, if no policy version came before; what serving needed and found in
    its prefix cache counts for one to two of them."""

    def __post_init__(self) -> None:
        check_bounds(self, {"headroom": (0, 1), "quiet_seconds": (0.001, YEAR_SECONDS)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LenderConfig:
    """A server that lends: what is promised to those whom it serves, and what it keeps for them."""

    promise: Promise = field(default_factory=Promise)
    """The dial from strict to slo, the two budgets, the yield bound."""
    stop_file: Path | None = None
    """While this file is there, nothing is lent: it stops within a second. Who ends a guest that hangs writes it, so
    put it where it outlives the server. Left out, `<executor.name>.stop` in the run's folder."""
    hang_seconds: float = 30.0
    """A guest that has had the serving thread for so long hangs, and its engine core is ended."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """What is left free of its KV memory, and for how long a cut lasts."""
    needs_grant: bool = False
    """Whether it lends nothing without a grant, of the control app or by hand; else it lends all until there is one."""

    def __post_init__(self) -> None:
        check_bounds(self, {"hang_seconds": (0.1, YEAR_SECONDS)})


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


class LendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON object. Sizes are the guest's own: serving's are the server's flags."""

    model_folder: str
    """Hugging Face folder of the rollout policy: its architecture; weights come from the sidecar."""
    socket: str
    """Path of the unix socket where the sidecar of the server knocks; for the server's user alone."""
    dtype: str = "float32"
    """What the guest computes in."""
    max_turns: Annotated[int, Meta(ge=1)] = 64
    """Turns of the guest in one step; more wait."""
    max_model_len: Annotated[int, Meta(ge=2)] = 1024
    """Longest context and output of one turn, in tokens."""
    kv_cache_bytes: Annotated[int, Meta(ge=1)] = 64 << 20
    """The most KV memory that the guest may ever hold; it comes out of serving's."""
    step_tokens: Annotated[int, Meta(ge=1)] = 256
    """Most tokens of one guest step, at least `max_turns`; `promise` makes it less."""
    promise: Promise = Promise()
    """What serving is promised while it lends."""
    memory: MemoryConfig = MemoryConfig()
    """How much of its KV memory it keeps."""
    piece_seconds: Annotated[float, Meta(gt=0)] = 0.002
    """How long a piece of building the guest runs before serving is asked for again."""
    heartbeat_seconds: Annotated[float, Meta(ge=0.01, le=0.2)] = 0.1
    """Time between two reports of how the guest stands, at most 0.2."""
    pulse: str = ""
    """Path of the page that is shared with the watchdog (`rose.workers.lender.watchdog_page`); empty: nobody watches
    for a hang.
    """
    observe: bool = False
    """Whether there is no guest, and what could be lent is measured."""


def read_config(file: Path) -> LendConfig:
    """Read and validate the configuration of the engine core's guest. Raises UsageError if `file` is invalid."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=LendConfig)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{file} is no configuration of a lender: {error}") from None

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
    """How the KV memory of serving is shared with the guest."""

    headroom: float = 0.2
    """Share of serving's KV memory that the guest's growth leaves free. The guest's memory is cut when serving uses
    half of this share."""
    quiet_seconds: float = 10.0
    """Time after a cut before the guest may grow again, unless a policy version comes earlier. Memory that serving
    needed, or found in its prefix cache, stays reserved for one to two times this long."""

    def __post_init__(self) -> None:
        check_bounds(self, {"headroom": (0, 1), "quiet_seconds": (0.001, YEAR_SECONDS)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LenderConfig:
    """A lending server: its latency targets and the memory that it keeps."""

    promise: Promise = field(default_factory=Promise)
    """The dial from strict to slo, the latency budgets and the yield bound."""
    stop_file: Path | None = None
    """Nothing is lent while this file exists; lending stops within a second. The watchdog writes the file when a guest
    hangs, so use a path that outlives the server. Unset: `<executor.name>.stop` in the run's folder."""
    hang_seconds: float = 30.0
    """Time that a guest may keep the serving thread. Then the guest counts as hung, and its engine core is ended."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """The KV memory that is left free, and for how long a cut lasts."""
    needs_grant: bool = False
    """Whether a server without a grant lends nothing; otherwise it lends everything until there is a grant."""
    untried_devices: bool = False
    """Whether a server on a CUDA GPU may lend, which was never tried. An error of a guest's kernel ends the server, and
    the guest's memory comes on top of `--gpu-memory-utilization`. Only for tests without users."""

    def __post_init__(self) -> None:
        check_bounds(self, {"hang_seconds": (0.1, YEAR_SECONDS)})


MIN_PROMISE_SECONDS = 1e-6
"""Lower bound of the latency promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """A vLLM server of the policy's model that runs elsewhere. The lender keeps the latency targets of the server."""

    url: str = ""
    """URL of the server's API, `http://host:port`; `rose lend --endpoint` sets it. Heartbeats and logs contain the
    URL."""
    model: str = ""
    """Name of the policy's model on the server; empty: the only model of the server."""
    folder: Path = Path("runs/endpoint")
    """Folder to which policy versions are written, in a subfolder for each server. The server loads them, so its
    machine must have the folder under the same path."""
    ttft_seconds: float = 1.0
    """Latency target of the server: time from a request to its first token."""
    tpot_seconds: float = 0.1
    """Latency target of the server: mean time from one token of a request to the next."""

    def __post_init__(self) -> None:
        if self.url and not is_http_server(self.url):
            raise UsageError("endpoint.url must be http://host:port without a password: logs contain the URL")
        check_bounds(
            self,
            {"ttft_seconds": (MIN_PROMISE_SECONDS, YEAR_SECONDS), "tpot_seconds": (MIN_PROMISE_SECONDS, YEAR_SECONDS)},
        )

    @property
    def folder_name(self) -> str:
        """Host and port of the endpoint as a folder name, the same for every lender of the endpoint."""
        return urlsplit(self.url).netloc.replace(":", "-")


class LendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of a guest, a JSON object.

    Sizes are those of the guest: serving's sizes are flags of the server.
    """

    model_folder: str
    """Hugging Face folder with the architecture of the rollout policy; weights come from the sidecar."""
    socket: str
    """Path of the unix socket to which the sidecar connects; only the server's user may connect."""
    dtype: str = "float32"
    """Element type in which the guest computes."""
    max_turns: Annotated[int, Meta(ge=1)] = 64
    """Most turns of the guest in one step; further turns wait."""
    max_model_len: Annotated[int, Meta(ge=2)] = 1024
    """Longest context and output of one turn, in tokens."""
    kv_cache_bytes: Annotated[int, Meta(ge=1)] = 64 << 20
    """Most of serving's KV memory that the guest may ever hold; size of the cache of a guest that cannot share it."""
    step_tokens: Annotated[int, Meta(ge=1)] = 256
    """Most tokens of one guest step, at least `max_turns`; `promise` may reduce it."""
    promise: Promise = Promise()
    """Latency targets of serving while it lends."""
    memory: MemoryConfig = MemoryConfig()
    """How much of its KV memory the server keeps."""
    piece_seconds: Annotated[float, Meta(gt=0)] = 0.002
    """Longest piece of building the guest between two looks for requests of serving."""
    heartbeat_seconds: Annotated[float, Meta(ge=0.01, le=0.2)] = 0.1
    """Time between two status reports of the guest."""
    pulse: str = ""
    """Path of the status page that is shared with the watchdog (`rose.workers.lender.watchdog`); empty: no
    watchdog."""
    untried_devices: bool = False
    """Whether a guest may run on a CUDA GPU, where none was tried."""
    observe: bool = False
    """Whether the server is only observed: there is no guest, and what could be lent is measured."""


def read_config(file: Path) -> LendConfig:
    """Read and validate the configuration of the engine core's guest. Raises UsageError if `file` is invalid."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=LendConfig)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{file} is no configuration of a lender: {error}") from None

"""The interface of a server that lends by requests: what the lender needs of it, whatever kind of server it is.

A server of another kind is one class in a module beside `server_vllm`, which `main.open_server` chooses.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rose.schemas.errors import RoseError
from rose.schemas.prompts import Sampling

HEAD = "lm_head.weight"
"""Name of the head's tensor; a model without it ties the head to the embedding."""

VISIBILITY_TENSOR = "rose"
"""First part of the name of a tensor that no model has."""


TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference between two logprobs that count as equal, by element type of the endpoint."""

ANSWER_TOKENS = 32
"""Tokens that a probe samples, as many as a short turn."""


Logprobs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EndpointInfo:
    """Facts about a server that was checked."""

    model_folder: Path
    """Folder of the weights that the server was started with."""
    dtype: str
    """Element type of its computation, such as "float32"."""
    max_logprobs: int
    """Most tokens at each position of a probe whose logprobs it tells."""
    kv_tokens: int
    """Tokens that its KV cache holds; 0 if it does not say."""


class TurnChunk(NamedTuple):
    """A part of the answer to a turn."""

    tokens: Sequence[int]
    """New tokens."""
    logprobs: Sequence[float]
    """Logprob (natural logarithm) of each new token."""
    cached_tokens: int
    """Context tokens that were found in the prefix cache, as far as the server has reported."""
    finish_reason: str
    """`stop`, `length` or `abort`; empty before the end."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """An endpoint's answer to a probe."""

    context: Sequence[int]
    tokens: Sequence[int]
    top_logprobs: Sequence[Mapping[int, float]]
    """Logprobs by token id, for each position of the answer."""

    @property
    def logprobs(self) -> Logprobs:
        """All logprobs of the answer, position by position, as one flat array."""
        return np.array([logprob for place in self.top_logprobs for logprob in place.values()])


class LatencyHistograms(NamedTuple):
    """Latencies of all requests of a server so far: their cumulative number by upper bound in seconds.

    A histogram is empty if the server does not export it.
    """

    ttft: Mapping[float, float]
    """From a request to its first token."""
    tpot: Mapping[float, float]
    """From one token of a request to the next."""


class TurnLost(RoseError):
    """A turn did not start or did not end, while the endpoint may be healthy."""

    def __init__(self, reason: str, *, failed: bool) -> None:
        """`failed`: whether the endpoint failed at this turn, and may fail again; False if it had no room."""
        super().__init__(reason)
        self.failed = failed


class Endpoint(Protocol):
    """Client of one server. Every method but `aclose` raises EngineBroken if the server is unreachable or broken."""

    url: str
    model: str
    """The model's name at the server."""

    async def aclose(self) -> None:
        """Close all connections."""

    async def check(self, shapes: Mapping[str, Sequence[int]], max_model_len: int) -> EndpointInfo:
        """Check that the lender can use the server. `shapes`: tensor shapes of the policy.

        Raises EngineStartError if the lender cannot use the server.
        """

    async def check_alive(self) -> None:
        """Make the server's engine answer between two of its steps."""

    async def check_unchanged(self) -> None:
        """Check that the server answers and is the one that was checked: a lost turn may have been its end."""

    async def histograms(self) -> LatencyHistograms:
        """Return the latencies of all requests so far, those of other clients included."""

    def stream_turn(self, context: Sequence[int], sampling: Sampling, *, salt: str) -> AsyncIterator[TurnChunk]:
        """Run a turn. A caller that stops to iterate aborts the turn at the server.

        `salt`: cached KV is reused only under the same salt. Raises EngineRefusal if the server rejects the turn, and
        TurnLost if the stream ends early; `check_unchanged` then tells whether the server is still there.
        """

    async def probe(self, context: Sequence[int], *, salt: str, likeliest: int) -> ProbeAnswer:
        """Return the server's completion of a context, sampled as for a turn, with the `likeliest` tokens' logprobs.

        Raises SwapRefused if token ids or logprobs are missing.
        """

    async def can_read(self, folder: Path) -> bool:
        """Return whether the server can read `folder`, whose file has one tensor: the visibility tensor.

        The server's weights do not change.
        """

    async def load_weights(self, folder: Path) -> None:
        """Load the safetensors of `folder`. The server answers no request until `resume_serving`.

        Its running requests wait, and are computed again with the new weights. Raises SwapRefused.
        """

    async def resume_serving(self) -> None:
        """Make the server answer requests again. Raises SwapRefused."""

"""Cost model: the seconds of an engine's step, from a profile of one model on one kind of card.

Keeps true
- The seconds of a step never fall when a request, a context token or a prompt token is added.
- A step without prefill is linear in the context tokens, so that many such steps are summed in closed form.
- Every table of a profile names the source of its figures. An unknown or missing field is refused.
- A call costs at most two searches of a table with some dozens of points.

The seconds of a step are the sum of
- the host's work: `host.step_seconds`, and `host.sequence_seconds` for each request of the step;
- the linear layers and the all-reduces, by the tokens that the step computes;
- the output layer, by the requests of the step;
- attention of decoding requests: fixed seconds by their number, and seconds for each token of their contexts;
- attention of prefill chunks: seconds for each token, and for each pair of a token and an earlier token.

Pure. Example: 16 requests of 4,096 tokens on an H100 with Qwen3-8B take 12.3 ms for a step.
"""

import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rose.schemas.errors import UsageError

PROFILES = Path(__file__).parent / "profiles"
"""Folder of the profiles that ROSE ships."""

DENSE_DECODING = 1024
"""The terms of steps with up to this many decoding requests are looked up in a list."""

RATE_TOKENS = 2048
"""Length of the prompt whose rate `prefill_tokens_per_second` gives."""

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a profile."""

    source: Text
    """Where the figures come from."""


class Shape(Section, frozen=True):
    """Figures that follow from the shape of the model."""

    layers: Count
    kv_bytes_per_token: Count
    """Bytes of the KV cache for one token, all ranks together."""
    weight_bytes: Count
    """Bytes of the weights, all ranks together."""


class Memory(Section, frozen=True):
    """The KV cache of one engine."""

    kv_cache_tokens: Count
    block_tokens: Count


class Host(Section, frozen=True):
    """Work of the CPU: scheduler, sampler, detokeniser, HTTP."""

    step_seconds: NotNegative
    sequence_seconds: NotNegative
    """Seconds for each request of a step."""


class Curve(Section, frozen=True):
    """Seconds by a count: linear between two points, and beyond the last two; constant below the first."""

    counts: Annotated[tuple[Count, ...], msgspec.Meta(min_length=2)]
    seconds: Annotated[tuple[NotNegative, ...], msgspec.Meta(min_length=2)]

    def at(self, count: int) -> float:
        """Return the seconds at a count."""
        counts, seconds = self.counts, self.seconds
        place = bisect_right(counts, count)
        if place == 0:
            return seconds[0]
        low = min(place, len(counts) - 1) - 1
        slope = (seconds[low + 1] - seconds[low]) / (counts[low + 1] - counts[low])
        return seconds[low] + slope * (count - counts[low])


class DecodeAttention(Curve, frozen=True):
    """Attention of decoding requests; the curve is by their number."""

    context_token_seconds: NotNegative
    """Seconds for each token of the requests' contexts."""


class PrefillAttention(Section, frozen=True):
    """Attention of prefill chunks, beside the fixed seconds of one decoding request."""

    token_seconds: NotNegative
    pair_seconds: NotNegative
    """Seconds for each pair of a token of the chunk and a token before it."""


class Lifecycle(Section, frozen=True):
    """How long an engine takes to be ready."""

    wake_seconds: NotNegative
    """From a parked guest."""
    load_seconds: NotNegative
    """From no process."""


class Links(Section, frozen=True):
    """Bandwidth of one engine."""

    network_bytes_per_second: Positive
    """Bandwidth for new weights."""
    nvlink_bytes_per_second: NotNegative
    """Bandwidth of each card, both directions together; 0 without NVLink."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A profile as its file has it: the tables of one model on one kind of card."""

    name: Text
    model: Text
    card: Text
    tensor_parallel: Count
    shape: Shape
    memory: Memory
    host: Host
    linear: Curve
    """The linear layers of a step, by its tokens."""
    all_reduce: Curve | None = None
    """The all-reduces of a step, by its tokens; absent with one card."""
    output: Curve
    """The output layer, by the requests of the step."""
    decode_attention: DecodeAttention
    prefill_attention: PrefillAttention
    lifecycle: Lifecycle
    links: Links

    @property
    def curves(self) -> dict[str, Curve]:
        """The curves by the name of their table."""
        named = {
            "linear": self.linear,
            "all_reduce": self.all_reduce,
            "output": self.output,
            "decode_attention": self.decode_attention,
        }
        return {name: curve for name, curve in named.items() if curve is not None}


@dataclass(frozen=True)
class CostModel:
    """The seconds of the steps of one engine, and what else a simulation needs of the engine."""

    name: str
    model: str
    card: str
    tensor_parallel: int
    """Cards of one engine."""
    layers: int
    kv_bytes_per_token: int
    """Bytes of the KV cache for one token, all ranks together."""
    kv_cache_tokens: int
    """Tokens that fit into the KV memory of one engine."""
    block_tokens: int
    weight_bytes: int
    """Bytes of the weights, all ranks together."""
    wake_seconds: float
    """From a parked guest to one that decodes."""
    load_seconds: float
    """From no process to an engine that decodes."""
    network_bytes_per_second: float
    nvlink_bytes_per_second: float
    profile: Profile = field(repr=False)

    @classmethod
    def of(cls, profile: Profile) -> "CostModel":
        """Return the cost model of a profile."""
        return cls(
            name=profile.name,
            model=profile.model,
            card=profile.card,
            tensor_parallel=profile.tensor_parallel,
            layers=profile.shape.layers,
            kv_bytes_per_token=profile.shape.kv_bytes_per_token,
            kv_cache_tokens=profile.memory.kv_cache_tokens,
            block_tokens=profile.memory.block_tokens,
            weight_bytes=profile.shape.weight_bytes,
            wake_seconds=profile.lifecycle.wake_seconds,
            load_seconds=profile.lifecycle.load_seconds,
            network_bytes_per_second=profile.links.network_bytes_per_second,
            nvlink_bytes_per_second=profile.links.nvlink_bytes_per_second,
            profile=profile,
        )

    def decode_terms(self, decoding: int) -> tuple[float, float]:
        """Return the fixed seconds of a step that only decodes `decoding` requests, and the seconds a context token."""
        if decoding <= DENSE_DECODING:
            return self._decode_terms[decoding]
        return self._terms(decoding)

    def step_seconds(self, *, decoding: int, context_tokens: int, chunks: Sequence[tuple[int, int]] = ()) -> float:
        """Return the seconds of one step.

        Args:
            decoding: Requests that decode one token each.
            context_tokens: Tokens of the contexts of these requests, all together.
            chunks: For each prefill of the step, the prompt tokens that the step computes, and the tokens of the same
                context that were computed before.
        """
        if not chunks:
            fixed, token_seconds = self.decode_terms(decoding)
            return fixed + token_seconds * context_tokens
        profile = self.profile
        attention = profile.prefill_attention
        read_seconds = profile.decode_attention.context_token_seconds
        tokens = decoding
        seconds = read_seconds * context_tokens
        for new, before in chunks:
            tokens += new
            pair_seconds = new * attention.pair_seconds
            seconds += new * attention.token_seconds + 0.5 * new * pair_seconds
            seconds += before * max(
                pair_seconds, read_seconds
            )  # a short chunk waits for the memory, a long one computes
        return seconds + self._fixed(decoding, decoding + len(chunks), tokens)

    @property
    def prefill_tokens_per_second(self) -> float:
        """The rate at which a prompt of `RATE_TOKENS` tokens is computed alone."""
        return RATE_TOKENS / self.step_seconds(decoding=0, context_tokens=0, chunks=[(RATE_TOKENS, 0)])

    def decode_tokens_per_second(self, decoding: int, context_tokens: int = 0) -> float:
        """Return the decode rate of one request while `decoding` requests decode together."""
        return 1.0 / self.step_seconds(decoding=max(decoding, 1), context_tokens=context_tokens)

    @cached_property
    def _decode_terms(self) -> list[tuple[float, float]]:
        return [self._terms(decoding) for decoding in range(DENSE_DECODING + 1)]

    def _terms(self, decoding: int) -> tuple[float, float]:
        return self._fixed(decoding, decoding, decoding), self.profile.decode_attention.context_token_seconds

    def _fixed(self, decoding: int, sequences: int, tokens: int) -> float:
        """Seconds of a step but for the attention to contexts."""
        profile = self.profile
        seconds = profile.host.step_seconds + profile.host.sequence_seconds * sequences
        seconds += profile.linear.at(tokens) + profile.output.at(sequences) + profile.decode_attention.at(decoding)
        return seconds + profile.all_reduce.at(tokens) if profile.all_reduce else seconds


def linear_profile(
    source: str,
    *,
    card: str,
    kv_tokens: int,
    step_seconds: float,
    prefill_token_seconds: float,
    sequence_seconds: float = 0.0,
    context_token_seconds: float = 0.0,
    devices: int = 1,
    block_tokens: int = 1,
    kv_bytes_per_token: int = 1,
    weight_bytes: int = 1,
    wake_seconds: float = 0.0,
) -> Profile:
    """Return the profile of an engine whose step is a sum of four terms: fixed, by request, context and prompt token.

    `source`: where the figures come from. `wake_seconds`: until an engine decodes, parked or not loaded.
    """
    nothing = Curve(source=source, counts=(1, 2), seconds=(0.0, 0.0))
    return Profile(
        name=card,
        model=source,
        card=card,
        tensor_parallel=devices,
        shape=Shape(source=source, layers=1, kv_bytes_per_token=kv_bytes_per_token, weight_bytes=weight_bytes),
        memory=Memory(source=source, kv_cache_tokens=kv_tokens, block_tokens=block_tokens),
        host=Host(source=source, step_seconds=step_seconds, sequence_seconds=sequence_seconds),
        linear=nothing,
        output=nothing,
        decode_attention=DecodeAttention(
            source=source, counts=(1, 2), seconds=(0.0, 0.0), context_token_seconds=context_token_seconds
        ),
        prefill_attention=PrefillAttention(source=source, token_seconds=prefill_token_seconds, pair_seconds=0.0),
        lifecycle=Lifecycle(source=source, wake_seconds=wake_seconds, load_seconds=wake_seconds),
        links=Links(source=source, network_bytes_per_second=NETWORK_BYTES_PER_SECOND, nvlink_bytes_per_second=0.0),
    )


NETWORK_BYTES_PER_SECOND = 1e9
"""Bandwidth in a linear profile, which simulations do not read: scenarios state the link."""


def profile_names() -> list[str]:
    """Return the names of the profiles that ROSE ships."""
    return sorted(file.stem for file in PROFILES.glob("*.toml"))


def load_profile(name_or_path: str | Path) -> CostModel:
    """Return the cost model of a shipped profile, or of a file.

    Raises:
        UsageError: There is no such profile, or a field of the profile is unknown, missing or invalid.
    """
    return CostModel.of(read_profile(name_or_path))


def read_profile(name_or_path: str | Path) -> Profile:
    """Return a shipped profile, or one of a file. Raises UsageError as `load_profile` does."""
    if str(name_or_path) in profile_names():
        path = PROFILES / f"{name_or_path}.toml"
    else:
        path = Path(name_or_path)
        if path.suffix != ".toml":
            raise UsageError(
                f"there is no profile {name_or_path}: name a .toml file or one of {', '.join(profile_names())}"
            )
    try:
        return parse_profile(tomllib.loads(path.read_text(encoding="utf-8")), str(name_or_path))
    except OSError as error:
        raise UsageError(f"the profile {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the profile {path} is not TOML: {error}") from None


def parse_profile(tables: Mapping[str, Any], name: str) -> Profile:
    """Return the profile that the tables hold. Raises UsageError, which calls the profile `name`."""
    try:
        profile = msgspec.convert(tables, Profile)
    except msgspec.ValidationError as error:
        raise UsageError(f"the profile {name} is refused: {error}") from None
    for table, curve in profile.curves.items():
        if len(curve.counts) != len(curve.seconds):
            raise UsageError(f"the profile {name} is refused: {table} needs as many seconds as counts")
        if any(a >= b for a, b in pairwise(curve.counts)) or any(a > b for a, b in pairwise(curve.seconds)):
            raise UsageError(
                f"the profile {name} is refused: the counts of {table} must rise, its seconds must not fall"
            )
    return profile


def write_profile(profile: Profile) -> str:
    """Return the text of a profile's file."""
    tables = msgspec.to_builtins(profile)
    lines = [f"{key} = {_toml(value)}" for key, value in tables.items() if not isinstance(value, dict | None)]
    for table, values in tables.items():
        if isinstance(values, dict):
            lines += ["", f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """Return a string, number or list of numbers in TOML; numbers have five significant digits."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f"{value:.5g}" if isinstance(value, float) else msgspec.json.encode(value).decode()

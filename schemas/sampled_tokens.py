"""Sampled tokens: token ids, with a logprob and a policy version for each token.

One struct carries these values from the engine to the sample. `FinishedTurn` and a trajectory hold it, `Part` extends
it, and the records `TurnResult` and `Sample` have its fields under the same names: `from_record` and `record_fields`
are the only copies between a record and this struct. A further value per token is a field here and in these two
records.

Keeps true
- Every array has one entry per token. Spans lie in order, and cover the sampled tokens and no others.
- Concatenation is associative, so the parts of a preempted turn make the same turn as without preemption.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from rose.schemas.arrays import ITEM_BYTES, count, logprob_error, pack_logprobs, pack_tokens, unpack_logprobs
from rose.schemas.limits import MAX_SPANS, Count, Logprobs, Tokens, Version


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) were sampled under policy `version`."""

    start: Count
    end: Count
    version: Version


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a turn, or of a trajectory with its observations."""

    tokens: Tokens
    logprobs: Logprobs
    """Logprob of each token under the distribution that it was drawn from."""
    spans: Annotated[tuple[VersionSpan, ...], Meta(max_length=MAX_SPANS)]
    """Policy versions over `tokens`, in order, without gaps."""

    @classmethod
    def from_record(cls, record: object) -> Self:
        """Return the fields of this struct from a record that has fields of the same names."""
        return cls(**{name: getattr(record, name) for name in cls.__struct_fields__})

    def record_fields(self) -> dict[str, Any]:
        """Return the fields by name, as arguments for a record that has fields of the same names."""
        return msgspec.structs.asdict(self)

    def followed_by(self, later: "SampledTokens") -> Self:
        """Return these tokens, then `later`. Adjacent spans of one version become one span."""
        return msgspec.structs.replace(
            self,
            tokens=self.tokens + later.tokens,
            logprobs=self.logprobs + later.logprobs,
            spans=_concatenate_spans(self.spans, later.spans, count(self.tokens)),
        )

    def with_observation(self, observation: bytes) -> Self:
        """Return these tokens, then packed tokens that no policy sampled.

        The logprobs of the latter are 0, and no span covers them.
        """
        return msgspec.structs.replace(
            self, tokens=self.tokens + observation, logprobs=self.logprobs + bytes(len(observation))
        )

    @property
    def loss_mask(self) -> bytes:
        """One byte a token: 1 if a policy sampled the token, 0 for an observation."""
        mask = bytearray(count(self.tokens))
        for span in self.spans:
            mask[span.start : span.end] = b"\x01" * (span.end - span.start)
        return bytes(mask)

    @property
    def validation_error(self) -> str | None:
        """Why no executor can continue from these tokens of a turn; None if they are valid."""
        sampled = count(self.tokens)
        if len(self.tokens) % ITEM_BYTES or not sampled:
            return f"{len(self.tokens)} bytes of tokens are no whole number of tokens above 0"
        if len(self.logprobs) != len(self.tokens):
            return f"{len(self.logprobs)} bytes of logprobs for {len(self.tokens)} bytes of tokens"
        if impossible := logprob_error(unpack_logprobs(self.logprobs)):
            return impossible
        at = 0
        for span in self.spans:
            if span.start != at or span.end <= at or span.version < 0:
                return f"version spans do not follow on one another at token {at}"
            at = span.end
        return None if at == sampled else f"version spans cover {at} of {sampled} tokens"


NOTHING_SAMPLED = SampledTokens(tokens=b"", logprobs=b"", spans=())


@dataclass(slots=True)
class SampledTokensBuilder:
    """Collects the tokens of a turn while an engine samples them."""

    tokens: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _spans: list[VersionSpan] = field(default_factory=list)

    def append(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Add newly sampled tokens, with one logprob for each."""
        self.tokens += tokens
        self._logprobs += logprobs

    def end_span(self, version: int) -> None:
        """Record that `version` sampled the tokens since the last span. Call it before another version serves."""
        start = self._spans[-1].end if self._spans else 0
        if len(self.tokens) > start:
            self._spans.append(VersionSpan(start, len(self.tokens), version))

    def build(self, version: int) -> SampledTokens:
        """Return the tokens so far; `version` sampled the tokens since the last span."""
        self.end_span(version)
        return SampledTokens(
            tokens=pack_tokens(self.tokens), logprobs=pack_logprobs(self._logprobs), spans=tuple(self._spans)
        )


def _concatenate_spans(
    first: tuple[VersionSpan, ...], later: tuple[VersionSpan, ...], tokens: int
) -> tuple[VersionSpan, ...]:
    moved = [VersionSpan(span.start + tokens, span.end + tokens, span.version) for span in later]
    if first and moved and first[-1].end == moved[0].start and first[-1].version == moved[0].version:
        moved[0] = VersionSpan(first[-1].start, moved[0].end, moved[0].version)
        first = first[:-1]
    return (*first, *moved)

"""The policy versions of an endpoint: written to a folder that it reads, loaded by its API, and proven.

Keeps true
- If a loaded version is not proven, the weights before are loaded again and proven in the same way.
- A file is complete before the endpoint is asked to load it, and stays until another version is proven. The file of a
  refused version is deleted.
- A file exists while the endpoint is paused for a load. If the lender is killed, the next lender resumes the endpoint.
- An answer that lacks a token or a logprob proves nothing.
- Logprobs that differ by more than the tolerance of the element type do not prove a version.
- Logprobs that are closer to the weights before than to the new weights do not prove a version, however close the two
  versions are.

For a proof the endpoint completes a random context like a turn, and returns the likeliest tokens with their logprobs at
each position. A reference model of the transformers library computes logprobs of the same tokens after the same
context, with the new weights and with the weights before. A probe only proves what it can measure: if two versions
differ by less than rounding, the newer version is refused about half of the time.
"""

import asyncio
import random
import secrets
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rose.schemas.errors import UsageError
from rose.workers.engine_layers import replace_unlike_layers
from rose.workers.executor.vllm.types import EngineBroken, SwapRefused
from rose.workers.lender.endpoint.server_interface import (
    ANSWER_TOKENS,
    HEAD,
    TOLERANCES,
    VISIBILITY_TENSOR,
    Endpoint,
    EndpointInfo,
    Logprobs,
    ProbeAnswer,
)
from rose.workers.model_config import match_engine_numerics

CONTEXT_TOKENS = 32
"""Tokens of a probe's context."""

FILE = "model.safetensors"

PAUSED = "paused"
"""Name of the file that exists while the endpoint is paused for a load."""

EMBEDDING = "model.embed_tokens.weight"
"""The tensor that a tied head shares."""

log = structlog.get_logger("endpoint")


def probe_context(vocabulary: int, seed: int) -> list[int]:
    """Return random token ids below `vocabulary`, the same for the same seed."""
    return random.Random(seed).choices(range(vocabulary), k=CONTEXT_TOKENS)


def probe_error(probed: ProbeAnswer, vocabulary: int) -> str | None:
    """Return why a probe's answer is incomplete or invalid; None if it can prove a version."""
    tokens, likeliest = probed.tokens, probed.top_logprobs
    if len(tokens) != ANSWER_TOKENS or len(likeliest) != ANSWER_TOKENS:
        return f"a probe for {ANSWER_TOKENS} tokens is answered with {len(tokens)}, and logprobs of {len(likeliest)}"
    if not all(token in place for token, place in zip(tokens, likeliest, strict=True)):
        return "a probe is answered with tokens without logprobs"
    if not all(0 <= token < vocabulary for place in likeliest for token in place):
        return f"a probe is answered with tokens outside the vocabulary of {vocabulary}"
    return None


def proof_error(given: Logprobs, new: Logprobs, before: Logprobs | None, tolerance: float) -> str | None:
    """Return why the logprobs `given` do not prove the new weights; None if they do.

    `new`, `before`: the reference model's logprobs of the same tokens with the new weights and the weights before;
    `before` is None if those weights are not known.
    """
    off = float(np.max(np.abs(given - new), initial=0.0))
    if not off <= tolerance:
        return f"logprobs of a probe are off by {off:.2g}, more than {tolerance:g}"
    if before is not None:
        moved = new - before
        if moved.any() and float((given - before) @ moved) < 0.5 * float(moved @ moved):
            return "a probe is answered as by the version before"
    return None


class ReferenceModel:
    """The policy's model in transformers, which computes the expected logprobs on the host in float32."""

    def __init__(self, folder: Path) -> None:
        """Import transformers, which takes seconds. Raises UsageError if it has no such model."""
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # there would be one for each version that is loaded
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            match_engine_numerics(config)
            with torch.random.fork_rng():
                self._kind: Any = type(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
        except (ValueError, KeyError, OSError) as error:
            raise UsageError(f"transformers makes no model of {folder}, so no version can be proven: {error}") from None
        self._config = config

    def logprobs(self, tensors: Mapping[str, Any], probed: ProbeAnswer) -> Logprobs:
        """Return the logprobs of the probe's tokens with these weights, by Hugging Face name.

        The order is that of `ProbeAnswer.logprobs`.
        """
        # `from_pretrained` maps names of files, which need not be the model's own names.
        model = self._kind.from_pretrained(None, config=self._config, state_dict=dict(tensors), dtype=torch.float32)
        replace_unlike_layers(model)
        with torch.no_grad():
            ids = torch.tensor([[*probed.context, *probed.tokens]])
            logits = model.eval()(input_ids=ids).logits[0, len(probed.context) - 1 : -1]
            expected = torch.log_softmax(logits.double(), -1)
        return np.array(
            [expected[place, token] for place, tokens in enumerate(probed.top_logprobs) for token in tokens]
        )


@dataclass(frozen=True, slots=True)
class EndpointWeights:
    """A version that the endpoint can load from a folder."""

    version: int
    folder: Path
    tensors: Mapping[str, Tensor] | None = None
    """None for the weights that the endpoint was started with, which cannot be proven."""


class EndpointVersions:
    """The versions of one endpoint, for one incarnation of an executor."""

    def __init__(
        self, endpoint: Endpoint, info: EndpointInfo, vocabulary: int, expected: ReferenceModel, folder: Path
    ) -> None:
        """`info`: the result of `endpoint.check`. `folder`: the folder of versions, which is emptied."""
        self._endpoint = endpoint
        self._info = info
        self._vocabulary = vocabulary
        self._expected = expected
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)  # files of an earlier incarnation
        self._active = EndpointWeights(-1, info.model_folder)
        self._staged: EndpointWeights | None = None
        self.salt = ""
        """Cache salt of the loaded weights: cached KV is reused only under the same salt."""
        self.loads = 0
        """Counts the starts and ends of loads: odd during a load, when the endpoint answers no request."""

    @property
    def version(self) -> int:
        """The version that serves; -1 if no version is proven."""
        return self._active.version

    async def stage(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a version to the folder that the endpoint reads. Raises SwapRefused or EngineBroken."""
        weights = EndpointWeights(version, self._folder / f"version-{version}", tensors)
        if self._staged is not None:  # a staged version that was never activated
            _delete(self._staged)
            self._staged = None
        with ExitStack() as undo:
            undo.callback(_delete, weights)
            await self._write(weights)
            undo.pop_all()
        self._staged = weights

    async def _write(self, weights: EndpointWeights) -> None:
        assert weights.tensors is not None
        seen = self._folder / "seen"
        try:
            await asyncio.to_thread(_save, seen, {f"{VISIBILITY_TENSOR}.seen": torch.zeros(1)})
            if not await self._endpoint.can_read(seen):
                raise SwapRefused(f"{self._endpoint.url} cannot read {self._folder}, where versions are written for it")
            await asyncio.to_thread(_save, weights.folder, _with_head(weights.tensors))
        except (OSError, SafetensorError) as error:
            raise SwapRefused(f"{weights.folder} cannot be written: {error}") from None

    async def activate(self) -> None:
        """Load the staged version and prove it.

        Raises SwapRefused if the weights before continue to serve, EngineBroken if they are not proven either.
        """
        weights, self._staged = self._staged, None
        if weights is None:
            raise SwapRefused("nothing is prepared")
        self.loads += 1
        try:
            sentence = await self._load(weights)
            if not sentence:
                weights, self._active = self._active, weights
                return
            log.error("version_not_proven", version=weights.version, reason=sentence)
            worse = await self._load(self._active)
            if worse:
                raise EngineBroken(f"{self._endpoint.url} does not take back what it served: {worse}")
            raise SwapRefused(sentence)
        finally:
            self.loads += 1
            _delete(weights)

    async def _load(self, weights: EndpointWeights) -> str | None:
        """Load weights. Return why they are not proven; None if they are, or cannot be."""
        self.salt = f"rose-{weights.version}-{secrets.token_hex(8)}"
        try:
            await self._load_and_resume(weights.folder)
            if weights.tensors is None:
                return None
            most = min(self._info.max_logprobs, self._vocabulary)
            context = probe_context(self._vocabulary, weights.version)
            probed = await self._endpoint.probe(context, salt=self.salt, likeliest=most)
        except SwapRefused as refusal:
            return str(refusal)
        if lacking := probe_error(probed, self._vocabulary):
            return lacking
        new = await asyncio.to_thread(self._expected.logprobs, weights.tensors, probed)
        known, before = self._active.tensors, None
        if known is not None and known is not weights.tensors:
            before = await asyncio.to_thread(self._expected.logprobs, known, probed)
        return proof_error(probed.logprobs, new, before, TOLERANCES[self._info.dtype])

    async def _load_and_resume(self, folder: Path) -> None:
        """Make the endpoint load `folder`, and resume it in any case. Raises SwapRefused or EngineBroken."""
        paused = self._folder / PAUSED
        try:
            paused.touch()
        except OSError as error:
            raise SwapRefused(f"{paused} cannot be written: {error.strerror}") from None
        try:
            await self._endpoint.load_weights(folder)
        finally:
            await self._endpoint.resume_serving()
            paused.unlink(missing_ok=True)


async def resume_paused(endpoint: Endpoint, folder: Path) -> None:
    """Resume an endpoint whose lender was killed during a load. Raises EngineBroken."""
    paused = folder / PAUSED
    if paused.exists():
        log.warning("endpoint_resumed", url=endpoint.url)
        with suppress(SwapRefused):  # `check` finds what is wrong with the endpoint
            await endpoint.resume_serving()
            paused.unlink(missing_ok=True)


def _with_head(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add a tied head as a tensor, for a model with a separate head; a model with a tied head ignores the tensor."""
    return {HEAD: tensors[EMBEDDING].clone(), **tensors} if EMBEDDING in tensors else dict(tensors)


def _save(folder: Path, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def _delete(weights: EndpointWeights) -> None:
    """Delete the files of a version, but not the files that the endpoint was started with."""
    if weights.tensors is not None:
        shutil.rmtree(weights.folder, ignore_errors=True)

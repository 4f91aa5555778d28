"""The policy versions of an endpoint: written to a folder that it reads, loaded by its API, and proven.

Keeps true
- If a loaded version is not proven, the weights before are loaded again and proven in the same way.
- A file is complete before the endpoint is asked to load it, and stays until another version is proven. The file of a
  refused version is deleted.
- A file exists while the endpoint is paused for a load. If the lender is killed, the next lender resumes the endpoint.
"""

import asyncio
import secrets
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rose.workers.executor.vllm.types import EngineBroken, SwapRefused
from rose.workers.lender.endpoint.protocol import HEAD, VISIBILITY_TENSOR, Endpoint, EndpointInfo
from rose.workers.lender.endpoint.weights_proof import (
    TOLERANCES,
    ReferenceModel,
    probe_context,
    probe_error,
    proof_error,
)

FILE = "model.safetensors"

PAUSED = "paused"
"""Name of the file that exists while the endpoint is paused for a load."""

EMBEDDING = "model.embed_tokens.weight"
"""The tensor that a tied head shares."""

log = structlog.get_logger("endpoint")


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

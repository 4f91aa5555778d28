"""Fakes of KV transfers between machines or devices, which need hardware that tests do not have.

A server loads them by its `--kv-transfer-config`. Connector and scheduler are those of vLLM; faked is the copy. A copy
takes `SECONDS` and reads its blocks at the end of this time, so that a block that changes meanwhile is noticed.

- `FakeRemoteConnector` stands in for the connector of a server that only prefills or only decodes. A request with
  `kv_transfer_params={"send": true}` keeps its blocks after its end until they are sent. A request with the same prompt
  and `{"receive": true}` waits until they have arrived in its own blocks.
- `FakeCopySpec` lets vLLM's OffloadingConnector run on a CPU, where vLLM has no worker for it. The connector frees the
  blocks of an ended request before their copy is made.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

SECONDS = 0.2
"""Time that a copy takes."""

Prompt = tuple[int, ...]
"""Token ids of a prompt."""


@dataclass
class Transfers(KVConnectorMetadata):  # type: ignore[misc]
    """The transfers that begin in one step: request, prompt, and blocks."""

    sends: list[tuple[str, Prompt, list[int]]] = field(default_factory=list)
    receives: list[tuple[str, Prompt, list[int]]] = field(default_factory=list)


class FakeRemoteConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Both sides of transfers of whole blocks, over a dictionary instead of a network."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._next = Transfers()
        self._block_tokens = self._vllm_config.cache_config.block_size
        self._caches: list[Tensor] = []
        self._sent: dict[Prompt, Future[list[Tensor]]] = {}
        """The newest transfer of each prompt, with the blocks by layer."""
        self._threads = ThreadPoolExecutor(16)
        self._sending: dict[str, Future[list[Tensor]]] = {}
        self._receiving: dict[str, Future[None]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if "receive" not in (request.kv_transfer_params or {}):
            return 0, False
        whole = (request.num_prompt_tokens - 1) // self._block_tokens * self._block_tokens
        return whole - num_computed_tokens, whole > num_computed_tokens

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            numbers = blocks.get_block_ids()[0]
            self._next.receives.append((request.request_id, tuple(request.prompt_token_ids), numbers))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        sends = "send" in (request.kv_transfer_params or {})
        if sends:
            self._next.sends.append((request.request_id, tuple(request.prompt_token_ids), block_ids))
        return sends, None

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        begun, self._next = self._next, Transfers()
        return begun

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        assert not self._caches, "a guest has no connector"
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        begun = self._get_connector_metadata()
        for request, prompt, numbers in begun.sends:
            sent = self._threads.submit(self._send, numbers, self._read(numbers))
            self._sending[request] = self._sent[prompt] = sent
        for request, prompt, numbers in begun.receives:
            self._receiving[request] = self._threads.submit(self._receive, self._sent[prompt], numbers)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return _take_done(self._sending), _take_done(self._receiving)

    def _read(self, numbers: list[int]) -> list[Tensor]:
        return [cache[numbers].clone() for cache in self._caches]

    def _send(self, numbers: list[int], at_first: list[Tensor]) -> list[Tensor]:
        time.sleep(SECONDS)
        sent = self._read(numbers)
        assert all(map(torch.equal, at_first, sent)), "a block was changed while it was sent"
        return sent

    def _receive(self, transfer: "Future[list[Tensor]]", numbers: list[int]) -> None:
        sent = [blocks[: len(numbers)] for blocks in transfer.result()]
        for cache, blocks in zip(self._caches, sent, strict=True):
            cache[numbers] = blocks
        time.sleep(SECONDS)
        assert all(map(torch.equal, sent, self._read(numbers))), "a block was changed while it was received"

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests wait for their transfers."""

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        """Do nothing: blocks are sent after the end of a request."""

    def wait_for_save(self) -> None:
        """Do nothing, as above."""


def _take_done(transfers: "dict[str, Future[Any]]") -> set[str]:
    """Remove the ended transfers and return their requests. Raises what a transfer raised."""
    done = {request for request, future in transfers.items() if future.done()}
    for request in done:
        transfers.pop(request).result()
    return done


class FakeCopySpec(CPUOffloadingSpec):  # type: ignore[misc]
    """Offloads blocks to the memory of the CPU on which the model itself runs."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return _FakeCopyWorker(kv_caches, self.num_chunks)


class _FakeCopyWorker(OffloadingWorker):  # type: ignore[misc]
    def __init__(self, caches: CanonicalKVCaches, chunks: int) -> None:
        self._pairs = [
            (cache.tensor, torch.zeros((chunks, *cache.tensor.shape[1:]), dtype=cache.tensor.dtype))
            for cache in caches.tensors
        ]
        self._threads = ThreadPoolExecutor(4)
        self._jobs: dict[int, Future[None]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = self._threads.submit(self._copy, src_spec.block_ids, dst_spec.block_ids, store=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = self._threads.submit(self._copy, dst_spec.block_ids, src_spec.block_ids, store=False)
        return True

    def _copy(self, blocks: Any, chunks: Any, *, store: bool) -> None:
        time.sleep(SECONDS)
        for cache, offloaded in self._pairs:
            if store:
                offloaded[chunks] = cache[blocks]
            else:
                cache[blocks] = offloaded[chunks]

    def get_finished(self) -> list[TransferResult]:
        done = [job for job, future in self._jobs.items() if future.done()]
        for job in done:
            self._jobs.pop(job).result()
        return [TransferResult(job, success=True) for job in done]

    def wait(self, job_ids: set[int]) -> None:
        wait([self._jobs[job] for job in job_ids if job in self._jobs])

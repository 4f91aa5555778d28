"""The contexts of the turns that an executor runs: cached from earlier turns, or read back from the log.

Keeps true
- Every context that is returned has the digest of its request. A context that cannot be restored is reported as
  `ContextMissing`; no context is guessed.
- The executor's loop does not wait for the log. A context that must be read back is returned later by `take_found`,
  and other turns continue meanwhile.
- The cache holds at most MAX_CACHE_BYTES. It evicts the least recently used trajectory first.
- Reads from an unreachable broker are repeated until the broker answers. A context is missing only if the log does not
  hold it. A home whose leader is unreachable delays the contexts of other homes by one failed read, not until the
  leader is back.
"""

import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing
from queue import Empty, Queue, SimpleQueue
from threading import Event, Thread

import msgspec
import structlog

from rose.schemas.arrays import count
from rose.schemas.errors import RoseError
from rose.schemas.turns import ContextMissing, TurnDispatch, TurnKey, TurnRequest, assemble_context, matches_context
from rose.topics.catalog import REQUESTED
from rose.topics.log_reader import RecordFetch
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import BusSettings
from rose.workers.executor import metrics

MAX_CACHE_BYTES = 256 * 1024 * 1024
"""Size limit of the cache: about 2,000 contexts of 32,768 tokens."""

ENTRY_BYTES = 256
"""Overhead that is counted for each cached context. Without it the number of short or empty contexts has no bound."""

STOP_POLL_SECONDS = 0.2
"""Longest time until the thread notices a stop."""

RETRY_SECONDS = 1.0
"""Wait after a failed read before the next read."""

SPARSE_FETCH_SETTINGS = {"fetch.message.max.bytes": "131072"}
"""Fetches are small because few of the records after a needed record are needed."""

SEEK_GAP_RECORDS = 100
"""Longer gaps, in records, are skipped by a seek. A seek takes a few milliseconds, as reading 200 requests does."""

CLOSE_SECONDS = 5.0
"""Longest wait in `ContextStore.close` for the thread to end."""

log = structlog.get_logger("executor")


class ContextCache:
    """LRU cache of the newest context of each trajectory that was served by this executor. Pure."""

    def __init__(self, most_bytes: int = MAX_CACHE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._contexts: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._contexts)

    @property
    def size(self) -> int:
        """Bytes of all cached contexts, ENTRY_BYTES for each context included."""
        return self._size

    def lookup(self, dispatch: TurnDispatch) -> bytes | None:
        """Return the dispatch's context (packed tokens) from the cache and the tokens that the dispatch carries.

        Return None if no combination of them has the digest of the request.
        """
        request = dispatch.request
        cached = self._contexts.get(request.trajectory_id, b"")
        ways = [cached]  # complete if an earlier attempt of the same turn was here
        if not dispatch.cut:
            ways.append(request.appended if request.is_anchor else cached + request.appended)
        for context in ways:
            if matches_context(request, context):
                self.store(request.trajectory_id, context)
                return context
        return None

    def store(self, trajectory_id: str, context: bytes) -> None:
        """Cache a trajectory's newest context, and evict the least recently used ones above the size limit."""
        if (former := self._contexts.pop(trajectory_id, None)) is not None:
            self._size -= ENTRY_BYTES + len(former)
        self._contexts[trajectory_id] = context
        self._size += ENTRY_BYTES + len(context)
        while self._size > self._most_bytes:
            _, longest_unused = self._contexts.popitem(last=False)
            self._size -= ENTRY_BYTES + len(longest_unused)


class ContextStore:
    """The context cache, and a thread that reads the other contexts back from the log. Call `close` at the end."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        self._settings = (
            settings if settings.embedded else settings.for_bounded_reads().with_defaults(SPARSE_FETCH_SETTINGS)
        )
        self._name = name
        self._cache = ContextCache()
        self._reading: dict[TurnKey, float] = {}
        """Turns whose contexts are read back, with the time of the request in monotonic seconds."""
        # A SimpleQueue is not used: a signal during its timed wait can make the wait endless.
        self._requested: Queue[TurnDispatch] = Queue()
        self._answers: SimpleQueue[tuple[TurnDispatch, bytes | ContextMissing]] = SimpleQueue()
        self._stopping = Event()
        self._thread: Thread | None = None

    @property
    def is_reading(self) -> bool:
        """Whether a context is being read back."""
        return bool(self._reading)

    def find(self, dispatch: TurnDispatch) -> bytes | None:
        """Return the packed tokens of the dispatch's context, or None and start to read the context back.

        A context that is read back is returned by `take_found`.
        """
        context = self._cache.lookup(dispatch)
        if context is not None:
            metrics.CONTEXTS.labels("kept" if dispatch.cut or dispatch.request.chain else "carried").inc()
            return context
        if self._thread is None:
            self._thread = Thread(target=self._run, name=f"{self._name}-contexts", daemon=True)
            self._thread.start()
        self._reading[dispatch.key] = time.monotonic()
        self._requested.put(dispatch)
        return None

    def take_found(self) -> Iterator[tuple[TurnDispatch, bytes | ContextMissing, float]]:
        """Yield each turn whose read has ended: its dispatch, its context or why the context is missing, and seconds.

        The seconds are the time from `find` until now.
        """
        while self._reading:
            try:
                dispatch, context = self._answers.get_nowait()
            except Empty:
                return
            since = self._reading.pop(dispatch.key, None)
            if since is None:  # `cancel_all` has cancelled the read
                continue
            seconds = time.monotonic() - since
            metrics.READ_BACK_SECONDS.observe(seconds)
            metrics.CONTEXTS.labels("torn" if isinstance(context, ContextMissing) else "read back").inc()
            if not isinstance(context, ContextMissing):
                self._cache.store(dispatch.request.trajectory_id, context)
            yield dispatch, context, seconds

    def cancel(self, key: TurnKey) -> bool:
        """Cancel the read of one turn's context. Return whether there was one."""
        return self._reading.pop(key, None) is not None

    def cancel_all(self) -> list[TurnKey]:
        """Cancel all reads. Return the keys of their turns."""
        keys = list(self._reading)
        self._reading.clear()
        return keys

    def close(self) -> None:
        """End the thread. Waits at most CLOSE_SECONDS, which a thread with an unreachable broker may exceed."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        left: dict[int, list[TurnDispatch]] = {}
        while not self._stopping.is_set():
            try:
                with closing(Reader(self._settings, f"{self._name}-contexts", report_ends=True)) as reader:
                    while not self._stopping.is_set():
                        self._read_next(reader, left)
            except RoseError as error:
                log.warning("reader_restarting", worker=self._name, reason=str(error))
                self._stopping.wait(RETRY_SECONDS)

    def _read_next(self, reader: Reader, left: dict[int, list[TurnDispatch]]) -> None:
        """Read the contexts that are requested by now, and those of one home of `left`.

        `left`: by home, dispatches whose reads have failed. The home that was not tried for the longest time is first.
        """
        together: list[TurnDispatch] = []
        for dispatch in self._next_dispatches(0.0 if left else STOP_POLL_SECONDS):
            left.get(dispatch.home, together).append(dispatch)
        self._try(reader, together, left)
        if left:
            self._try(reader, left.pop(next(iter(left))), left)

    def _try(self, reader: Reader, dispatches: Sequence[TurnDispatch], left: dict[int, list[TurnDispatch]]) -> None:
        """Read the contexts of `dispatches`. Raises RoseError; all of `dispatches` are in `left` then."""
        try:
            self._read(reader, dispatches)
        except RoseError:
            for dispatch in dispatches:
                left.setdefault(dispatch.home, []).append(dispatch)
            raise

    def _next_dispatches(self, seconds: float) -> list[TurnDispatch]:
        """Return all dispatches in the queue. Waits up to `seconds` for the first one."""
        dispatches: list[TurnDispatch] = []
        try:
            dispatches.append(self._requested.get(timeout=seconds))
            while True:
                dispatches.append(self._requested.get_nowait())
        except Empty:
            return dispatches

    def _read(self, reader: Reader, dispatches: Sequence[TurnDispatch]) -> None:
        """Read the contexts of `dispatches` and queue the answers. Raises TopicMissing, BusError or FetchStalled."""
        if not dispatches:
            return
        found = [ContextReadBack(dispatch) for dispatch in dispatches]
        offsets_by_place: dict[Place, list[int]] = {}
        goes_to: dict[tuple[int, int], list[ContextReadBack]] = {}
        for each in found:
            home = each.dispatch.home
            for offset in each.offsets:
                offsets_by_place.setdefault((REQUESTED, home), []).append(offset)
                goes_to.setdefault((home, offset), []).append(each)
        # The embedded broker answers a fetch with the whole rest of a partition, so seeks cost more than they save.
        far = sys.maxsize if self._settings.embedded else SEEK_GAP_RECORDS
        for envelope in RecordFetch(reader, offsets_by_place, jump_records=far, should_stop=self._stopping.is_set):
            if isinstance(envelope.record, TurnRequest):
                for each in goes_to[envelope.partition, envelope.offset]:
                    each.on_request(envelope.offset, envelope.record)
        if not self._stopping.is_set():
            for each in found:
                self._answers.put((each.dispatch, each.context()))


class ContextReadBack:
    """Assembles a dispatch's context from requests on the log. Pure.

    Holds at most as many tokens as the context has.
    """

    def __init__(self, dispatch: TurnDispatch) -> None:
        self.dispatch = dispatch
        self._found: dict[int, TurnRequest] = {}
        self._tokens = 0
        """Number of tokens in all requests that were found."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets, in the dispatch's home, of the requests that the context is assembled from."""
        dispatch = self.dispatch
        return (*dispatch.request.chain, dispatch.offset) if dispatch.cut else dispatch.request.chain

    def on_request(self, offset: int, request: TurnRequest) -> None:
        """Take in a request that was read at `offset`. A request of another trajectory is ignored."""
        request_wanted = self.dispatch.request
        if request.trajectory_id != request_wanted.trajectory_id:
            return
        self._tokens += count(request.appended)
        self._found[offset] = request
        if self._tokens > request_wanted.context_tokens:
            self._found.clear()

    def context(self) -> bytes | ContextMissing:
        """Return the packed tokens, or why the context is missing. Call it after all `offsets` were read."""
        request, offset = self.dispatch.request, self.dispatch.offset
        if self._tokens > request.context_tokens:
            return ContextMissing(
                f"what turn {request.turn} goes on from is more than its {request.context_tokens} tokens"
            )
        if self.dispatch.cut:
            own = self._found.get(offset)
            if own is None or own.turn != request.turn:
                return ContextMissing(
                    f"the request of turn {request.turn} is not on the log at offset {offset} any more"
                )
            request = msgspec.structs.replace(request, appended=own.appended)
        try:
            return assemble_context(request, self._found)
        except ContextMissing as torn:
            return torn

"""The contexts of the turns that an executor runs: kept from the turn before, or read back from the log.

Keeps true
- What is handed out has the digest that its request says. What cannot be had so is told as torn, never guessed.
- Nobody waits for the log: what has to be read back comes later, through `found`, and other turns go on meanwhile.
- At most MOST_BYTES are kept, those of the trajectories that were served last.
- A broker that is away is asked again until it answers: only what the log does not hold is torn. A home whose leader is
  away keeps the others' contexts waiting for one question, not until it is back.
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
from rose.schemas.contexts import ContextMissing, assemble_context, matches_context
from rose.schemas.errors import RoseError
from rose.schemas.turns import TurnDispatch, TurnKey, TurnRequest
from rose.topics.catalog import REQUESTED
from rose.topics.fetch import RecordFetch
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import BusSettings
from rose.workers.executor import metrics

MAX_CACHE_BYTES = 256 * 1024 * 1024
"""Of contexts kept: some 2,000 of 32,768 tokens."""

ENTRY_BYTES = 256
"""That one which is kept takes beside its tokens: else there were no bound to those that have few, or none."""

STOP_POLL_SECONDS = 0.2
"""How soon the thread notices that it is to stop."""

RETRY_SECONDS = 1.0
"""Before the broker is asked anew after trouble."""

SPARSE_FETCH_SETTINGS = {"fetch.message.max.bytes": "131072"}
"""Of what lies behind what is wanted little is of use."""

SEEK_GAP_RECORDS = 100
"""A gap of more records than this is jumped over: that takes a few milliseconds, as reading some 200 requests does."""

CLOSE_SECONDS = 5.0
"""How long its end is waited for."""

log = structlog.get_logger("executor")


class ContextCache:
    """The newest context of each trajectory that was served here. Pure."""

    def __init__(self, most_bytes: int = MAX_CACHE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._contexts: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._contexts)

    @property
    def size(self) -> int:
        """Bytes of all that is kept, ENTRY_BYTES for each among them."""
        return self._size

    def lookup(self, dispatch: TurnDispatch) -> bytes | None:
        """The dispatch's context, as far as it follows from what is kept and what it carries itself."""
        request = dispatch.request
        cached = self._contexts.get(request.trajectory_id, b"")
        ways = [cached]  # of a turn that was here before
        if not dispatch.cut:
            ways.append(request.appended if request.is_anchor else cached + request.appended)
        for context in ways:
            if matches_context(request, context):
                self.store(request.trajectory_id, context)
                return context
        return None

    def store(self, trajectory_id: str, context: bytes) -> None:
        """The newest of its trajectory."""
        if (former := self._contexts.pop(trajectory_id, None)) is not None:
            self._size -= ENTRY_BYTES + len(former)
        self._contexts[trajectory_id] = context
        self._size += ENTRY_BYTES + len(context)
        while self._size > self._most_bytes:
            _, longest_unused = self._contexts.popitem(last=False)
            self._size -= ENTRY_BYTES + len(longest_unused)


class ContextStore:
    """Kept ones, and a thread that reads the others back. `close` it."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        self._settings = (
            settings if settings.embedded else settings.for_bounded_reads().with_defaults(SPARSE_FETCH_SETTINGS)
        )
        self._name = name
        self._cache = ContextCache()
        self._reading: dict[TurnKey, float] = {}
        """Since when, in monotonic seconds."""
        self._asked: Queue[TurnDispatch] = Queue()  # no SimpleQueue: a signal amid its wait can make that endless
        self._answers: SimpleQueue[tuple[TurnDispatch, bytes | ContextMissing]] = SimpleQueue()
        self._stopping = Event()
        self._thread: Thread | None = None

    @property
    def is_reading(self) -> bool:
        """Whether any is awaited."""
        return bool(self._reading)

    def find(self, dispatch: TurnDispatch) -> bytes | None:
        """The packed tokens that its request goes on from; None: they will come through `found`."""
        context = self._cache.lookup(dispatch)
        if context is not None:
            metrics.CONTEXTS.labels("kept" if dispatch.cut or dispatch.request.chain else "carried").inc()
            return context
        if self._thread is None:
            self._thread = Thread(target=self._run, name=f"{self._name}-contexts", daemon=True)
            self._thread.start()
        self._reading[dispatch.key] = time.monotonic()
        self._asked.put(dispatch)
        return None

    def take_found(self) -> Iterator[tuple[TurnDispatch, bytes | ContextMissing, float]]:
        """What was read back since, or why it cannot be; and the seconds that took."""
        while self._reading:
            try:
                dispatch, context = self._answers.get_nowait()
            except Empty:
                return
            since = self._reading.pop(dispatch.key, None)
            if since is None:  # it was given up meanwhile
                continue
            seconds = time.monotonic() - since
            metrics.READ_BACK_SECONDS.observe(seconds)
            metrics.CONTEXTS.labels("torn" if isinstance(context, ContextMissing) else "read back").inc()
            if not isinstance(context, ContextMissing):
                self._cache.store(dispatch.request.trajectory_id, context)
            yield dispatch, context, seconds

    def cancel_all(self) -> list[TurnKey]:
        """Those that are being read back, which are not awaited any more."""
        keys = list(self._reading)
        self._reading.clear()
        return keys

    def close(self) -> None:
        """End the thread; with a broker that is away it is not waited for to the end."""
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
                log.warning("reading contexts back anew", worker=self._name, reason=str(error))
                self._stopping.wait(RETRY_SECONDS)

    def _read_next(self, reader: Reader, left: dict[int, list[TurnDispatch]]) -> None:
        """What is asked for by now, and one home of what is `left` from trouble, the longest untried first."""
        together: list[TurnDispatch] = []
        for dispatch in self._next_dispatches(0.0 if left else STOP_POLL_SECONDS):
            left.get(dispatch.home, together).append(dispatch)
        self._try(reader, together, left)
        if left:
            self._try(reader, left.pop(next(iter(left))), left)

    def _try(self, reader: Reader, asked: Sequence[TurnDispatch], left: dict[int, list[TurnDispatch]]) -> None:
        """Raises RoseError; nothing of it was read then."""
        try:
            self._read(reader, asked)
        except RoseError:
            for dispatch in asked:
                left.setdefault(dispatch.home, []).append(dispatch)
            raise

    def _next_dispatches(self, seconds: float) -> list[TurnDispatch]:
        """All that are asked for by now, waiting so long for the first."""
        dispatches: list[TurnDispatch] = []
        try:
            dispatches.append(self._asked.get(timeout=seconds))
            while True:
                dispatches.append(self._asked.get_nowait())
        except Empty:
            return dispatches

    def _read(self, reader: Reader, asked: Sequence[TurnDispatch]) -> None:
        """Raises TopicMissing, BusError or FetchStalled."""
        if not asked:
            return
        found = [ContextReadBack(dispatch) for dispatch in asked]
        offsets_by_place: dict[Place, list[int]] = {}
        goes_to: dict[tuple[int, int], list[ContextReadBack]] = {}
        for each in found:
            home = each.dispatch.home
            for offset in each.offsets:
                offsets_by_place.setdefault((REQUESTED, home), []).append(offset)
                goes_to.setdefault((home, offset), []).append(each)
        # The embedded broker answers a fetch with all the rest of a partition: there jumps cost more than they save.
        far = sys.maxsize if self._settings.embedded else SEEK_GAP_RECORDS
        for envelope in RecordFetch(reader, offsets_by_place, jump_records=far, should_stop=self._stopping.is_set):
            if isinstance(envelope.record, TurnRequest):
                for each in goes_to[envelope.partition, envelope.offset]:
                    each.on_request(envelope.offset, envelope.record)
        if not self._stopping.is_set():
            for each in found:
                self._answers.put((each.dispatch, each.context()))


class ContextReadBack:
    """A dispatch's context from what is read of the log. Pure. Of that no more is held than the context has tokens."""

    def __init__(self, dispatch: TurnDispatch) -> None:
        self.dispatch = dispatch
        self._found: dict[int, TurnRequest] = {}
        self._tokens = 0
        """Of all that was found."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of the requests, in its home, that the context is read back from."""
        dispatch = self.dispatch
        return (*dispatch.request.chain, dispatch.offset) if dispatch.cut else dispatch.request.chain

    def on_request(self, offset: int, request: TurnRequest) -> None:
        """One of them was read."""
        request_wanted = self.dispatch.request
        if request.trajectory_id != request_wanted.trajectory_id:
            return
        self._tokens += count(request.appended)
        self._found[offset] = request
        if self._tokens > request_wanted.context_tokens:
            self._found.clear()

    def context(self) -> bytes | ContextMissing:
        """The packed tokens, once all that is there was read."""
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

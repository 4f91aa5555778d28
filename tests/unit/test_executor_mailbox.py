"""An inbox that several executors share: each executor takes its own dispatches and no others."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.routing.cell_session import valid_dispatches
from rose.schemas.turns import FENCING_KEY, TurnDispatch
from rose.topics.catalog import DISPATCHED
from rose.topics.records import Envelope, RawMessage
from rose.workers.executor.inbox import Inbox, InboxAction
from tests.support.routing_fixtures import dispatched, request

WORKERS = 3
MUCH = 2**40


@dataclass
class Reader:
    """One incarnation of an executor, and its action for each dispatch."""

    box: Inbox
    actions: dict[int, InboxAction] = field(default_factory=dict)


@dataclass
class Mailbox:
    """A log of one partition and all its readers; a replaced reader does not learn of its replacement."""

    log: list[Envelope] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    """Start of the newest incarnation in the log, by worker."""
    claims: list[int] = field(default_factory=lambda: [0])

    def put(self, record: TurnDispatch | None, key: str) -> int:
        at = len(self.log)
        self.log.append(Envelope(record, DISPATCHED, 0, at, key, 0.0, RawMessage(None, None)))
        for reader in self.readers:
            if record is not None:
                reader.actions[at] = reader.box.on_dispatch(record, 0, offset=at).action
            elif key == FENCING_KEY:
                reader.box.on_claim(at)
        return at

    def start(self, worker: int) -> None:
        self.starts[worker] = self.put(None, f"w{worker}")
        self.readers.append(Reader(Inbox(f"w{worker}", self.starts[worker], max_turns=MUCH, token_budget=MUCH)))

    def send(self, worker: int, starts_ago: int, claims_ago: int) -> None:
        """Write a dispatch of a router that knows an older incarnation, or has an older fencing token."""
        mine = [each.box.incarnation for each in self.readers if each.box.worker == f"w{worker}"] or [0]
        incarnation = mine[max(0, len(mine) - 1 - starts_ago)]
        claim = self.claims[max(0, len(self.claims) - 1 - claims_ago)]
        turn_request = request(f"g{len(self.log)}:0")
        self.put(
            dispatched(turn_request, worker, slot=0, incarnation=incarnation, claim=claim), turn_request.trajectory_id
        )


MOVES = st.one_of(
    st.tuples(st.just("start"), st.integers(0, WORKERS - 1)),
    st.tuples(st.just("claim")),
    st.tuples(st.just("send"), st.integers(0, WORKERS - 1), st.integers(0, 1), st.integers(0, 1)),
)


@given(st.lists(MOVES, max_size=60))
def test_valid_dispatch_is_taken_once_by_its_addressee_only(
    history: list[tuple[object, ...]],
) -> None:
    mail = Mailbox()
    for move, *actions in history:
        if move == "start":
            mail.start(*actions)  # type: ignore[arg-type]
        elif move == "claim":
            mail.claims.append(mail.put(None, FENCING_KEY))
        else:
            mail.send(*actions)  # type: ignore[arg-type]
    accepted = {id(record) for record in valid_dispatches(mail.log)}
    for at, envelope in enumerate(mail.log):
        if (record := envelope.record) is None:
            continue
        assert isinstance(record, TurnDispatch)
        read = [each for each in mail.readers if at in each.actions]
        assert all(each.actions[at] is InboxAction.IGNORE for each in read if each.box.worker != record.worker)
        own = [each for each in read if each.box.worker == record.worker]
        assert all(each.actions[at] is not InboxAction.IGNORE for each in own)
        taken = [each.box.incarnation for each in own if each.actions[at] is InboxAction.ACCEPT]
        assert taken in ([], [record.incarnation])
        if id(record) in accepted and any(each.box.incarnation == record.incarnation for each in own):
            assert taken, "a router that is restored believes that it is there"


@given(st.lists(MOVES, max_size=60), st.integers(0, WORKERS - 1))
def test_other_executors_in_an_inbox_change_nothing_given_the_fencing_tokens(
    history: list[tuple[object, ...]], worker: int
) -> None:
    mail, alone = Mailbox(), Inbox(f"w{worker}", 0, max_turns=MUCH, token_budget=MUCH)
    mail.start(worker)
    (reader,) = mail.readers
    for move, *actions in history:
        if move == "claim":
            mail.claims.append(mail.put(None, FENCING_KEY))
            alone.on_claim(mail.claims[-1])
        elif move == "start" and actions != [worker]:
            mail.start(*actions)  # type: ignore[arg-type]
        elif move == "send":
            mail.send(*actions)  # type: ignore[arg-type]
            record = mail.log[-1].record
            if actions[0] == worker and isinstance(record, TurnDispatch):
                assert (
                    alone.on_dispatch(record, 0, offset=len(mail.log) - 1).action is reader.actions[len(mail.log) - 1]
                )
    assert alone.listed_hashes == reader.box.listed_hashes

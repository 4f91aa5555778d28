"""The reference of log events: calls from the syntax trees of the product code, meanings and actions of an operator.

Keeps true
- Event, level and fields come from the call that logs; the meaning comes from `MEANINGS`.
- An event without a meaning and a meaning without an event are refused.
- Every event is a literal in snake_case, and so is every field.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rose.pipeline.observability.reference import Page, code, page, table

NOTHING = "Nothing."
WATCH = "Nothing, unless it repeats: then see `reason`."


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of one log event."""

    sentence: str
    action: str = NOTHING
    """Action of an operator."""
    more_fields: tuple[str, ...] = ()
    """Fields that the code passes as a mapping, so that they are not in the syntax tree of the call."""


MEANINGS = {
    "best_exported": Meaning("The policy of the best version so far is exported."),
    "broker_error": Meaning("The Kafka client reports an error of the broker.", "Check that the broker answers."),
    "call_waits_for_broker": Meaning(
        "A Kafka call has not returned, and the broker answers no other client either.",
        "Check that the broker answers.",
    ),
    "cell_ownership_lost": Meaning("The router lost its cells in a rebalance, and takes the cells that it gets next."),
    "cell_session_ended": Meaning("The router has given up a cell and committed its low water."),
    "cell_session_started": Meaning("The router has restored a cell from the log and serves the cell."),
    "checkpoint_skipped": Meaning(
        "A checkpoint is damaged or of another policy. The trainer tries the checkpoint before it.",
        "Check the disk of the run folder.",
    ),
    "chunks_kept": Meaning(
        "Weight chunks are kept because another run, which writes nothing any more, may still need them.",
        "If that run has ended for good, delete its manifests.",
    ),
    "client_not_freed": Meaning(
        "A closed Kafka client stays in memory, because the system starts no further thread.",
        "Raise the limit of processes and threads (pids.max, ulimit -u), or end what holds them.",
    ),
    "clock_set_back": Meaning(
        "The clock of this host was set back. Kafka clients of this process may stand still for as long as the step.",
        "Kill the roles of this host, start them again, and let NTP slew the clock from now on.",
    ),
    "clock_skew_detected": Meaning(
        "The clock of an executor differs from the router's clock.",
        "Synchronize the clocks of both machines (NTP); if one is stepped back, restart the roles of its host.",
    ),
    "connection_rejected": Meaning(
        "A process that is no sidecar of this release connected to the server's socket.",
        "Run server and sidecar as one user and from one release.",
    ),
    "context_missing": Meaning(
        "No executor can read the context of a turn back from the log. The turn is requested again with its context.",
        "If it repeats, see the alert RoseContextsTorn: something deletes or changes requests.",
    ),
    "dead_lettered": Meaning(
        "A message cannot be used, and is stored in the dead letter queue of its topic.",
        "Look at it with `rose dlq show`, mend its writer, send it back with `rose dlq retry`.",
    ),
    "early_gradients_dropped": Meaning(
        "Gradients that were computed while a step waited for groups are not used. The step computes all groups again.",
        "Nothing, unless it repeats: then see `reason`, and set trainer.stream_gradients to false.",
    ),
    "endpoint_found": Meaning("The endpoint answers and has the expected model."),
    "endpoint_resumed": Meaning("The endpoint was paused by a lender that ended during a load, and is resumed."),
    "endpoint_unreachable": Meaning("The endpoint does not answer. The lender waits.", "Start the endpoint's server."),
    "engine_core_orphaned": Meaning("A lending server was killed, so its engine core is ended too."),
    "environment_close_failed": Meaning(
        "`close` of an environment raised or took too long. Its trajectory had ended before.", "Mend the environment."
    ),
    "environment_failed": Meaning(
        "An environment raised, took too long or broke its protocol. The trajectory ends as failed.",
        "Mend the environment.",
    ),
    "environment_isolated": Meaning(
        "One job blocks a runner. The runner is left to that job, and its other jobs start again elsewhere.",
        "Mend the environment: a step must not block its thread.",
    ),
    "environment_runner_blocked": Meaning(
        "A process or thread of environments was given up because a job blocked it.",
        "Mend the environment that `trajectory` names.",
    ),
    "environment_runner_ended": Meaning(
        "A process or thread of environments ended or was replaced; `reason` says why. Its jobs start again.",
        "Mend the environment that `trajectory` names.",
    ),
    "environment_runner_not_started": Meaning(
        "No process or thread for environments could be started. The worker tries again after `retry_seconds`.",
        "Check memory and the limits on processes, threads and open files.",
    ),
    "environment_threads_left": Meaning(
        "Environments have left threads behind, and the worker ends without them.",
        "End all threads in `close` of the environment.",
    ),
    "environment_threads_stuck": Meaning(
        "A process of environments has too many calls that never return, and is replaced.", "Mend the environment."
    ),
    "environments_loading": Meaning(
        "The worker imports the environments of its configuration, and joins the others after that."
    ),
    "environments_not_closed": Meaning(
        "An environment blocked its thread when the worker ended, and was left behind.", "Mend the environment."
    ),
    "epoch_started": Meaning(
        "The trainer cannot continue the versions on the log, so it starts a new epoch of policy versions.",
        "Check that the trainer has the checkpoints and the namespace that it should have.",
    ),
    "evaluation_completed": Meaning("A version has been evaluated, and its result is on the log."),
    "evaluation_incomplete": Meaning(
        "An evaluation has ended without all of its samples, and has no scores.",
        "See `reason`: repair what failed, or raise `evaluation.hold_seconds` if a newer version came too early.",
    ),
    "evaluation_not_awaited": Meaning(
        "The trainer has held a version back for `evaluation.hold_seconds`, and goes on without the evaluation.",
        "Start `rose evaluator`, or raise `evaluation.hold_seconds`.",
    ),
    "evaluation_prompt_ignored": Meaning(
        "A message of the topic of evaluations is no prompt of an evaluation, and is ignored.",
        "Find its producer: only `rose evaluator` writes this topic.",
    ),
    "evaluation_started": Meaning("The evaluator asks for samples of a version."),
    "executor_ignored": Meaning(
        "An executor sends heartbeats for an inbox that its cell does not have.",
        "Correct `executor.slot`, or add inboxes with `rose topics create`.",
    ),
    "executor_started": Meaning("The executor has entered its inbox and takes turns."),
    "foreign_group_member": Meaning(
        "Another program is a member of the consumer group of environment workers. The worker owns no homes and waits.",
        "Stop the program of the listed client ids, or give it another `group.id`.",
    ),
    "gpu_encoding_stopped": Meaning(
        "The trainer collects the changes of versions on the CPU from now on; versions are published as before.",
        "See `reason`: `weights.encode_on_gpu` needs Triton, a C compiler and GPU memory.",
    ),
    "grant_changed": Meaning("The executor has read a new grant, or the grant was deleted."),
    "group_failed": Meaning(
        "Training on this group raises. The group is left out and its samples have the outcome `failed`.",
        "See `reason`, and the samples of the group (`rose replay`).",
    ),
    "group_not_left": Meaning(
        "The consumer group did not answer in time when the process left. The group waits for the end of the session."
    ),
    "groups_skipped": Meaning(
        "The gradients of these groups are not finite, and the groups are left out.",
        "If it repeats, lower `trainer.learning_rate`.",
    ),
    "guest_built": Meaning(
        "The guest engine is built. `kv_cache` is `shared` if the guest's KV cache is a view of serving's, else `own`."
    ),
    "guest_cache_not_shared": Meaning(
        "The guest has a KV cache of its own, of `kv_bytes`, beside serving's. Serving cannot take these bytes back.",
        "Check that the server's memory has room for it, or follow `reason`.",
    ),
    "guest_dropped": Meaning(
        "The guest engine failed and was removed. Serving continues; another guest is built after `retry_seconds`.",
        WATCH,
    ),
    "guest_hung": Meaning(
        "A guest step did not return, so the watchdog ends the engine core. Its stacks are in the server's log. The "
        "stop file keeps the restarted server from lending.",
        "Report the stacks, then delete `stop_file` to lend again.",
    ),
    "guest_parameters_loaded": Meaning(
        "The guest has loaded its parameters; `rank_parameters` counts them on each rank."
    ),
    "guest_suspended": Meaning("The guest has returned its turns and its memory; `reason` says why."),
    "homes_recovered": Meaning("The environment worker has rebuilt its homes from the log."),
    "http_engine_failed": Meaning(
        "An unexpected error ended the client of the endpoint; the lender restarts.", "Report the traceback."
    ),
    "idle_capacity_observed": Meaning(
        "The capacity that an observed server could have lent so far.",
        more_fields=("observed", "idle", "stretches", "serving_kv_most", "stretch_p*"),
    ),
    "inbox_changed": Meaning("The executor has moved to an inbox of another cell."),
    "inboxes_added": Meaning("The router has found new inboxes of its cell."),
    "inputs_deleted_unread": Meaning(
        "The broker deleted prompts or results before a worker had read them. Live trajectories fail if results went.",
        "Submit the prompts again. Look at the retention of the topic, and at commands that delete records.",
    ),
    "intake_closed": Meaning("The executor takes no turns; `reason` says why."),
    "intake_opened": Meaning("The executor takes turns."),
    "join_retried": Meaning("The broker has not answered a request to join a group; the client asks again."),
    "journal_ended": Meaning(
        "The inputs of a router or control app are not recorded any more. Only `rose replay --from` misses them.",
        "See `reason`; after an upgrade, run `rose topics create`, and give the right to write the journal.",
    ),
    "lend_granted": Meaning("The control app tells a lender to lend."),
    "lending_disabled": Meaning(
        "An unexpected error ended lending in this server until its restart. Serving continues.",
        "Report the traceback and restart the server when it suits.",
    ),
    "lending_enabled": Meaning("The server lends to the sidecar that connects to this socket."),
    "lending_failed": Meaning("An unexpected error at the start: the server does not lend.", "Report the traceback."),
    "lending_refused": Meaning("The server cannot lend; serving continues.", "Follow `reason`."),
    "load_started": Meaning("The load generator starts to send requests."),
    "model_folder_not_checked": Meaning(
        "A checkpoint of an older ROSE does not say with which model folder its run began.",
        "Check that `model.folder` is the folder that the run began with.",
    ),
    "most_samples_may_be_stale": Meaning(
        "`trainer.max_staleness` is 0, which loses a quarter of the samples or more as `stale`.",
        "Set `trainer.max_staleness` to 1 or more.",
    ),
    "move_granted": Meaning("The control app tells a worker to move to another cell."),
    "observation_enabled": Meaning("The server is observed and lends nothing."),
    "offsets_held_back": Meaning(
        "The broker holds committed offsets back because of a transaction; the process ends it."
    ),
    "offsets_not_committed": Meaning(
        "Offsets were not committed. The process continues; a restart reads more.", "Check that the broker answers."
    ),
    "offsets_not_used": Meaning(
        "Another program, or an earlier version of ROSE, committed these offsets. The worker begins where its own "
        "records on the log say.",
        "Nothing after an upgrade. Otherwise find what moves the offsets of environment workers.",
    ),
    "outcomes_expired": Meaning(
        "Outcomes were deleted by time before they were read. A trainer may train groups again that it has settled.",
        "Do not stop a run for longer than outcomes are kept.",
    ),
    "park_granted": Meaning("The control app tells a lender to stop lending."),
    "part_not_published": Meaning(
        "A rank of the trainer could not put its part of a version, so the job ends.",
        "Mend the reason, then start the job again: nothing is lost.",
    ),
    "passes_padded": Meaning(
        "The trainer cannot pack the sequences of this model into one row, and pads them instead: passes take longer.",
    ),
    "prompt_refused": Meaning(
        "A prompt cannot be used and is a dead letter.",
        "Mend the prompt and send it back with `rose dlq retry`.",
    ),
    "rank_failed": Meaning(
        "A rank of the trainer failed, or lost another rank. The job ends.",
        "Look for the first rank that ended. Start the job again: it resumes.",
    ),
    "ranks_awaited": Meaning(
        "A rank of the trainer waits for the other ranks.",
        "If it waits for minutes, start as many ranks as WORLD_SIZE says.",
    ),
    "reader_restarting": Meaning("A background reader failed; it reads again after a pause.", WATCH),
    "records_deleted": Meaning("Old records that are not needed were deleted; `begins` are the first offsets left."),
    "records_not_deleted": Meaning(
        "Old records that are not needed could not be deleted; the process tries again later.", WATCH
    ),
    "request_failed": Meaning("A request of the load generator failed."),
    "restarting": Meaning(
        "The role failed, discards its state and starts again in the same process.",
        "See `reason`; `rose status` says whether it repeats.",
    ),
    "run_completed": Meaning(
        "The run has trained on all of its groups, or an evaluation has ended it (early stop); the policy is exported."
    ),
    "run_resumed": Meaning("The trainer continues from a checkpoint."),
    "sample_dropped": Meaning("A sample came a second time and is ignored."),
    "samples_lost": Meaning(
        "The broker deleted samples before they were trained on.",
        "Correct the retention of the topic (`rose topics check`).",
    ),
    "sandbox_not_saved": Meaning(
        "A checkpoint of a sandbox could not be written. The sandbox is saved after its next change.",
        "Make room in `environment.sandbox_store`, and give the worker the right to write there.",
    ),
    "settle_request_without_effect": Meaning(
        "`rose settle` names a trajectory that has ended and has no outcome yet.",
        "If `samples_lost` names its partition, its group stays open: raise `environment.window_groups`.",
    ),
    "sidecar_disconnected": Meaning("The sidecar's connection was closed because of an error during a build.", WATCH),
    "sidecar_exited": Meaning(
        "The sidecar ended; the watchdog starts another after `retry_seconds`.",
        "Nothing, unless it repeats: then see the lines before it.",
    ),
    "sidecar_not_started": Meaning("The sidecar cannot be started.", "Check memory and the limit of processes."),
    "spans_dropped": Meaning("Spans were not sent before the process ended.", "Check the trace collector."),
    "start_not_announced": Meaning("The process could not write that it has started. Only `rose status` misses it."),
    "step_failed": Meaning("A training step raised; the trainer looks for the group that causes it.", "See `reason`."),
    "step_finished": Meaning("One optimizer step is trained, saved and published."),
    "stop_file_not_written": Meaning(
        "The watchdog could not write the stop file, so the restarted server lends again.",
        "Make the folder of `lender.stop_file` writable.",
    ),
    "traces_not_exported": Meaning("OpenTelemetry is not installed, so no traces are exported.", "Follow `reason`."),
    "trajectory_broken": Meaning(
        "The log does not hold what a trajectory needs to continue. The trajectory ends as failed.",
        "Check the retention of the topics (`rose topics check`).",
    ),
    "trajectory_overdue": Meaning(
        "A trajectory had not ended by its deadline. It ends as failed.",
        "Find out whether its environment or its turns are slow (`rose replay TRAJECTORY`); raise "
        "`environment.trajectory_deadline_seconds` if it needs the time.",
    ),
    "trajectory_settled_by_hand": Meaning("A trajectory ended because of `rose settle`."),
    "transaction_given_up": Meaning(
        "The outcome of a transaction is unknown; it is checked and, if needed, repeated.", WATCH
    ),
    "transaction_retried": Meaning("A transaction was aborted and is repeated.", WATCH),
    "turn_failed": Meaning("The router gives a turn up: attempts or patience ran out.", "See `reason`."),
    "turn_refused": Meaning("The executor returns a turn to the router without a result."),
    "version_activated": Meaning("The engine serves this policy version."),
    "version_not_activated": Meaning(
        "The engine refused a version and continues to serve the old one.", "See `reason`."
    ),
    "version_not_proven": Meaning(
        "The endpoint's logprobs do not prove the loaded version, so the version before is loaded again.",
        "Check that nothing else loads weights into the endpoint.",
    ),
    "version_refused": Meaning("A policy version failed its checks and is not used.", "See `reason`."),
    "version_staged": Meaning("A policy version is received, checked and ready to be activated."),
    "version_unreadable": Meaning("An unexpected error while a version was read.", "Report the traceback."),
    "version_untrusted": Meaning("A manifest is not of this run or not signed by its key.", "See `reason`."),
}
"""Meanings by event, in alphabetical order."""


ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds the packages: a checkout, or the installed package `rose`."""

PACKAGES = ("schemas", "topics", "workers", "pipeline")

EXECUTORS, TRAINER = "Executor and lender", "Trainer"

ROLES = (
    ("topics/", "Every role"),
    ("pipeline/cli/roles.py", "Every role"),
    ("pipeline/clock.py", "Every role"),
    ("workers/environments/", "Environment worker"),
    ("pipeline/routing/", "Router"),
    ("pipeline/control/", "Control app"),
    ("pipeline/journal.py", "Router and control app"),
    ("workers/executor/", EXECUTORS),
    ("workers/weights/receive.py", EXECUTORS),
    ("workers/lender/endpoint/", "Lender of an endpoint"),
    ("workers/lender/sidecar.py", "Sidecar of a lending server"),
    ("workers/lender/observe.py", "Sidecar of a lending server"),
    ("workers/lender/watchdog.py", "Watchdog of a lending server"),
    ("workers/lender/", "Lending server"),
    ("workers/trainer/", TRAINER),
    ("workers/weights/", TRAINER),
    ("workers/evaluator/", "Evaluator"),
    ("workers/loadgen/", "Load generator"),
)
"""Role by the beginning of a module's path, in the order of the page; the first match counts."""

LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "exception": "error"}
"""Level by method of a logger."""

TRACEBACK = "exception"
"""The field in which structlog writes a traceback."""

EVENT = re.compile(r"[a-z][a-z0-9_]*")
SERVER_EVENT = re.compile(r"rose: ([a-z0-9_]+)((?: [a-z0-9_]+=%[.0-9]*[a-z])*)")
"""An event in the log of a vLLM server, whose logger is Python's own."""


class UnclearLogEvent(Exception):
    """A log call whose event or fields cannot be documented."""


@dataclass(frozen=True, slots=True)
class LogEvent:
    """A call that logs one event."""

    name: str
    level: str
    fields: tuple[str, ...]
    path: str
    """Module, relative to the folder of the packages."""

    @property
    def role(self) -> str:
        """The role whose log has the event. Raises UnclearLogEvent for a module of no role."""
        for beginning, role in ROLES:
            if self.path.startswith(beginning):
                return role
        raise UnclearLogEvent(f"{self.path} logs {self.name}: add the module to log_events.ROLES")


def log_events(meanings: Mapping[str, Meaning] = MEANINGS) -> list[LogEvent]:
    """Return every log call of the product code.

    Raises UnclearLogEvent for an event or field that is not snake_case, an event that is no literal, an event without a
    meaning and a meaning without an event.
    """
    found = [
        event
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        for event in events_in(file.read_text(encoding="utf-8"), file.relative_to(ROOT).as_posix(), meanings)
    ]
    if unused := meanings.keys() - {event.name for event in found}:
        raise UnclearLogEvent(f"nothing logs {', '.join(sorted(unused))}: remove the meaning")
    return found


def events_in(source: str, path: str, meanings: Mapping[str, Meaning]) -> Iterator[LogEvent]:
    """Yield the log calls of one module. Raises UnclearLogEvent, as `log_events` does."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    bound = tuple(keyword.arg for call in calls if _is_bind(call) for keyword in call.keywords if keyword.arg)
    for call in calls:
        if not isinstance(call.func, ast.Attribute) or not _is_logger(call.func.value) or call.func.attr not in LEVELS:
            continue
        place, with_traceback = f"{path}:{call.lineno}", call.func.attr == "exception"
        for text in _literals(call, place):
            name, fields = text, bound
            if (server := SERVER_EVENT.fullmatch(text)) is not None:
                name, fields = server[1], tuple(field.partition("=")[0] for field in server[2].split())
            if name not in meanings:
                raise UnclearLogEvent(f"{place} logs {name}: write its meaning in log_events.MEANINGS")
            for keyword in call.keywords:
                fields += meanings[name].more_fields if keyword.arg is None else (keyword.arg,)
            if with_traceback and server is None:
                fields += (TRACEBACK,)
            if not all(EVENT.fullmatch(each.rstrip("*")) for each in (name, *fields)):
                raise UnclearLogEvent(f"{place} logs {name} with {', '.join(fields)}: name all in snake_case")
            yield LogEvent(name, LEVELS[call.func.attr], fields, path)


def _is_logger(value: ast.expr) -> bool:
    """Whether an expression is a logger: `log`, `LOG`, `self._log` or `structlog.get_logger(...)`."""
    match value:
        case ast.Name(id="log" | "LOG") | ast.Attribute(attr="_log"):
            return True
        case ast.Call(func=ast.Attribute(attr="get_logger")):
            return True
    return False


def _is_bind(call: ast.Call) -> bool:
    """Whether a call adds fields to all events of a logger."""
    return isinstance(call.func, ast.Attribute) and call.func.attr == "bind" and _is_logger(call.func.value)


def _literals(call: ast.Call, place: str) -> list[str]:
    """The events that a call may log. Raises UnclearLogEvent for an event that is no literal."""
    match call.args[:1]:
        case [ast.Constant(value=str(text))]:
            return [text]
        case [ast.IfExp(body=ast.Constant(value=str(one)), orelse=ast.Constant(value=str(other)))]:
            return [one, other]
    raise UnclearLogEvent(f"{place}: the event is no literal: name it, and write facts as fields")


def log_events_page() -> str:
    """Return the page of the log events: one table for each role. Raises UnclearLogEvent, as `log_events` does."""
    found = log_events()
    sections = []
    for role in dict.fromkeys(role for _, role in ROLES):
        own = [event for event in found if event.role == role]
        rows = [_row([event for event in own if event.name == name]) for name in sorted({each.name for each in own})]
        sections.append(f"## {role}\n\n{table(('event', 'level', 'fields', 'meaning', 'what to do'), rows)}")
    return page(Page.LOG_EVENTS, INTRODUCTION, sections)


def _row(same: list[LogEvent]) -> list[str]:
    """One row: the calls of one role that log the same event."""
    levels = ", ".join(dict.fromkeys(event.level for event in same))
    fields = ", ".join(code(field) for field in dict.fromkeys(field for event in same for field in event.fields))
    meaning = MEANINGS[same[0].name]
    return [code(same[0].name), levels, fields, meaning.sentence, meaning.action]


INTRODUCTION = """Every role logs to standard error, one event a line. On a terminal the lines are coloured. Everywhere
else a line has `key=value` pairs: `timestamp`, `level`, `event` and the fields of the event.

- An event is a stable `snake_case` name: search for `event=guest_hung`.
- The field `reason` holds a sentence for people; `exception` holds a traceback.
- A lending server logs in vLLM's own log, as `rose: EVENT field=value ... reason=SENTENCE`.
- An event with several levels is logged at several places; not every line has all fields of the table."""

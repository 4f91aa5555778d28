"""Prometheus metrics of an environment worker. Every label has a small, fixed set of values."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rose.schemas.samples import Ending
from rose.workers.environments.trajectory import ResultVerdict

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Buckets from a calculator's step to a test suite's."""

ENVIRONMENT = CollectorRegistry()
"""Metrics of an environment worker, exported once it has started."""

_counter, _gauge = partial(Counter, registry=ENVIRONMENT), partial(Gauge, registry=ENVIRONMENT)
_histogram = partial(Histogram, buckets=SECONDS, registry=ENVIRONMENT)

HOMES = _gauge("rose_environment_homes", "Home partitions that this worker owns.")
TRAJECTORIES = _gauge("rose_environment_trajectories", "Open trajectories.")
UNSETTLED = _gauge("rose_environment_unsettled_groups", "Open groups of which at least one trajectory has no outcome.")
DEFERRED = _gauge("rose_environment_deferred_groups", "Open groups whose turns are on hold until a later round.")
LIVE = _gauge("rose_environment_live_environments", "Environments that are held or stepped.")
RECOVERIES = _counter("rose_environment_recoveries_total", "Times that the homes were recovered from the log.")
OPENED = _counter("rose_environment_trajectories_opened_total", "Trajectories opened.")
ENDED = _counter("rose_environment_trajectories_ended_total", "Trajectories ended, by ending.", ["ending"])
REFUSED = _counter("rose_environment_prompts_refused_total", "Prompts that became dead letters.")
APPLIED = _counter("rose_environment_turns_applied_total", "Results applied.")
DROPPED = _counter("rose_environment_results_dropped_total", "Results that were not applied, by reason.", ["reason"])
TORN = _counter(
    "rose_environment_contexts_torn_total",
    "Turns requested again with their whole context, because no executor could read it back.",
)
STEP_SECONDS = _histogram("rose_environment_step_seconds", "Time that an environment's own step took.")
TRANSACTION_SECONDS = _histogram(
    "rose_environment_transaction_seconds", "Time of a transaction from its begin to its commit."
)
SNAPSHOT_BYTES = _counter("rose_environment_snapshot_bytes_total", "Bytes of environment state written.")
FORWARDED = _counter("rose_environment_prompts_forwarded_total", "Prompts forwarded to the home of their group.")
SPOILED = _counter("rose_environment_results_spoiled_total", "Results that became dead letters.")
RECOVERY_SECONDS = _histogram("rose_environment_recovery_seconds", "Time to recover the homes from the log.")
RECOVERY_READ = _counter("rose_environment_recovery_records_total", "Records read to recover the homes.")
BLOCKED = _counter(
    "rose_environment_blocked_threads_total", "Threads and processes abandoned because an environment blocked them."
)
PROCESSES_ENDED = _counter(
    "rose_environment_processes_ended_total", "Processes of environments that ended by themselves."
)
STUCK = _gauge("rose_environment_stuck_threads", "Threads of environments in which an abandoned call still runs.")

for _ending in Ending:
    if _ending is not Ending.UNKNOWN:
        ENDED.labels(_ending.value)
for _verdict in ResultVerdict:
    if _verdict not in (ResultVerdict.APPLY, ResultVerdict.FAIL, ResultVerdict.ANCHOR):
        DROPPED.labels(_verdict.value)

"""Prometheus metrics of an environment worker. Every label has a small, fixed set of values."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rose.schemas.samples import Ending
from rose.workers.environments.trajectory import ResultVerdict

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Buckets from a calculator's step to a test suite's."""

ENVIRONMENT = CollectorRegistry()
"""Metrics of an environment worker, exported once it has started."""

HOMES = Gauge("rose_environment_homes", "Home partitions that this worker owns.", registry=ENVIRONMENT)
TRAJECTORIES = Gauge("rose_environment_trajectories", "Open trajectories.", registry=ENVIRONMENT)
UNSETTLED = Gauge(
    "rose_environment_unsettled_groups",
    "Open groups of which at least one trajectory has no outcome.",
    registry=ENVIRONMENT,
)
LIVE = Gauge("rose_environment_live_environments", "Environments that are held or stepped.", registry=ENVIRONMENT)
RECOVERIES = Counter(
    "rose_environment_recoveries_total", "Times that the homes were recovered from the log.", registry=ENVIRONMENT
)
OPENED = Counter("rose_environment_trajectories_opened_total", "Trajectories opened.", registry=ENVIRONMENT)
ENDED = Counter(
    "rose_environment_trajectories_ended_total", "Trajectories ended, by ending.", ["ending"], registry=ENVIRONMENT
)
REFUSED = Counter("rose_environment_prompts_refused_total", "Prompts that became dead letters.", registry=ENVIRONMENT)
APPLIED = Counter("rose_environment_turns_applied_total", "Results applied.", registry=ENVIRONMENT)
DROPPED = Counter(
    "rose_environment_results_dropped_total",
    "Results that were not applied, by reason.",
    ["reason"],
    registry=ENVIRONMENT,
)
TORN = Counter(
    "rose_environment_contexts_torn_total",
    "Turns requested again with their whole context, because no executor could read it back.",
    registry=ENVIRONMENT,
)
STEP_SECONDS = Histogram(
    "rose_environment_step_seconds",
    "Time that an environment's own step took.",
    buckets=SECONDS,
    registry=ENVIRONMENT,
)
TRANSACTION_SECONDS = Histogram(
    "rose_environment_transaction_seconds",
    "Time of a transaction from its begin to its commit.",
    buckets=SECONDS,
    registry=ENVIRONMENT,
)
SNAPSHOT_BYTES = Counter(
    "rose_environment_snapshot_bytes_total", "Bytes of environment state written.", registry=ENVIRONMENT
)
FORWARDED = Counter(
    "rose_environment_prompts_forwarded_total", "Prompts forwarded to the home of their group.", registry=ENVIRONMENT
)
SPOILED = Counter("rose_environment_results_spoiled_total", "Results that became dead letters.", registry=ENVIRONMENT)
RECOVERY_SECONDS = Histogram(
    "rose_environment_recovery_seconds",
    "Time to recover the homes from the log.",
    buckets=SECONDS,
    registry=ENVIRONMENT,
)
RECOVERY_READ = Counter(
    "rose_environment_recovery_records_total", "Records read to recover the homes.", registry=ENVIRONMENT
)
BLOCKED = Counter(
    "rose_environment_blocked_threads_total",
    "Threads and processes abandoned because an environment blocked them.",
    registry=ENVIRONMENT,
)
PROCESSES_ENDED = Counter(
    "rose_environment_processes_ended_total",
    "Processes of environments that ended by themselves.",
    registry=ENVIRONMENT,
)
STUCK = Gauge(
    "rose_environment_stuck_threads",
    "Threads of environments in which an abandoned call still runs.",
    registry=ENVIRONMENT,
)

for _ending in Ending:
    if _ending is not Ending.UNKNOWN:
        ENDED.labels(_ending.value)
for _verdict in ResultVerdict:
    if _verdict not in (ResultVerdict.APPLY, ResultVerdict.FAIL, ResultVerdict.ANCHOR):
        DROPPED.labels(_verdict.value)

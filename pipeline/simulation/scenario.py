"""Scenarios: what a simulation simulates, read from a TOML file.

Keeps true
- An unknown or contradictory field is refused in one sentence that names it. Nothing is ignored.
- A scenario with its seed determines a simulation: the same file gives the same bytes.

An **arm** is the scenario with some fields replaced, for example without lenders. The first arm is compared with all
others.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rose.pipeline.accounting.prices import Prices
from rose.pipeline.control.config import ControlConfig
from rose.pipeline.simulation.cost_model import load_profile
from rose.schemas.errors import UsageError
from rose.schemas.grants import MAX_LEASE_SECONDS
from rose.schemas.limits import MAX_CONTEXT_TOKENS, MAX_GROUP_SIZE, MAX_TURN_TOKENS, MAX_TURNS
from rose.schemas.setting_bounds import YEAR_SECONDS
from rose.workers.lender.recording import read_recording

Count = Annotated[int, Meta(ge=0, le=1_000_000)]
Positive = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Spread = Annotated[float, Meta(ge=0, le=4)]
"""Standard deviation of a logarithm."""

PAPER_LATENCIES = frozenset({"ttft_p99", "tpot_p99"})
"""Keys of `paper` that are no arms."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts of a scenario."""


class Pool(Part, frozen=True, kw_only=True):
    """Equal engines that belong to the rollouts."""

    profile: str
    count: Count
    max_turns: Annotated[int, Meta(ge=1, le=4096)] = 16
    """Most turns that an engine holds at once (ROSE's paper: 16 for Qwen3 at 32k)."""
    step_tokens: Positive = 8192


class Lending(Part, frozen=True, kw_only=True):
    """Serving engines that lend, or could."""

    serving_profile: str
    guest_profile: str
    count: Count
    max_turns: Annotated[int, Meta(ge=1, le=4096)] = 16
    step_tokens: Positive = 512
    """Most tokens of a guest step (ROSE's paper: rollout prefill in chunks of 512)."""
    serving_step_tokens: Positive = 8192
    serving_max_running: Positive = 256
    dial: Share = 0.0
    """0: strict."""
    ttft_seconds: Annotated[float, Meta(gt=0, le=3600)] = 0.5
    tpot_seconds: Annotated[float, Meta(gt=0, le=3600)] = 0.15
    yield_seconds: Annotated[float, Meta(gt=0, le=60)] = 0.02


class Spike(Part, frozen=True, kw_only=True):
    """A time in which the users send more."""

    at_seconds: Seconds
    for_seconds: Seconds
    factor: Annotated[float, Meta(gt=0, le=1000)]
    """Rate in this time relative to what it would be."""


MINUTE_PEAK = 1.7


class Users(Part, frozen=True, kw_only=True):
    """The users of the serving engines: arrivals by a Poisson process whose rate changes by minute and by second.

    Give either `busy` or `recording`.
    """

    busy: Annotated[float, Meta(ge=0, lt=1)] | None = None
    """Share of the time in which an engine that only serves computes, on average."""
    recording: tuple[str, ...] = ()
    """One file or several of `rose lend --observe --record`, relative to the scenario: each minute is as busy as there,
    and after the last minute the first comes again."""
    minute_peak: Annotated[float, Meta(ge=1, le=9.5)] = MINUTE_PEAK
    """Largest rate of a minute relative to the mean, once in 10 minutes; not with a recording, whose minutes have their
    own rates."""
    second_peak: Annotated[float, Meta(ge=1, le=20)] = 4.2
    """Largest rate of a second relative to the mean, not below `minute_peak`."""
    prompt_tokens: Positive = 1020
    """Median tokens of a prompt."""
    prompt_spread: Spread = 0.9
    max_prompt_tokens: Positive = 16_384
    """Prompts are cut off at this length, and at half of the engine's KV memory."""
    new_tokens: Positive = 129
    """Median tokens of an answer."""
    new_spread: Spread = 0.8
    max_new_tokens: Positive = 4096
    """Answers are cut off at this length, and at a quarter of the engine's KV memory."""
    spikes: tuple[Spike, ...] = ()

    def __post_init__(self) -> None:
        if (self.busy is None) == (not self.recording):
            raise ValueError("`[users]` needs either `busy` or `recording`")
        if self.recording and self.minute_peak != MINUTE_PEAK:
            raise ValueError("`minute_peak` contradicts `recording`, whose minutes have rates of their own")
        if self.second_peak < self.minute_peak:
            raise ValueError("`second_peak` is less than `minute_peak`: the largest second is part of a minute")
        if self.prompt_tokens > self.max_prompt_tokens or self.new_tokens > self.max_new_tokens:
            raise ValueError("a median of the users exceeds `max_prompt_tokens` or `max_new_tokens`")


def longest_requests(kv_tokens: int) -> tuple[int, int]:
    """Return the most tokens of a prompt and of an answer that an engine takes: a half and a quarter of its memory."""
    return max(1, kv_tokens // 2), max(1, kv_tokens // 4)


class TaskKind(Part, frozen=True, kw_only=True):
    """The trajectories of one kind of task. Lengths are log-normal around a median, cut off at the limits."""

    prompt_tokens: Positive = 1000
    """Tokens of the first observation, which a group shares."""
    observation_tokens: Count = 200
    """Median tokens of each later observation."""
    observation_spread: Spread = 0.5
    turns: Annotated[int, Meta(ge=1, le=MAX_TURNS)] = 6
    """Median turns of a trajectory."""
    turns_spread: Spread = 0.6
    max_turns: Annotated[int, Meta(ge=1, le=MAX_TURNS)] = 30
    new_tokens: Annotated[int, Meta(ge=1, le=MAX_TURN_TOKENS)] = 300
    """Median tokens that a turn samples."""
    trajectory_spread: Spread = 0.6
    """Between trajectories: some think longer in every turn."""
    turn_spread: Spread = 0.5
    max_turn_tokens: Annotated[int, Meta(ge=1, le=MAX_TURN_TOKENS)] = 4096
    context_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)] = 32768
    environment_seconds: Seconds = 0.5
    """Median time of an environment's step."""
    environment_spread: Spread = 0.5
    reset_seconds: Seconds = 1.0
    solved: Share = 0.5
    """Mean probability of success of a trajectory."""
    hardness: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """How much tasks differ: `solved` of a group is drawn from a Beta distribution with this sum of parameters."""


class Tasks(TaskKind, frozen=True, kw_only=True):
    """The groups of a training step, and what their trajectories do."""

    groups: Positive
    """Groups that one training step trains on."""
    group_size: Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE)] = 16
    members_ratio: Annotated[float, Meta(ge=1, le=4)] = 1.0
    """Trajectories with which a group is opened, relative to its size: the first to end are the group, the others are
    surplus."""
    kinds: tuple[TaskKind, ...] = ()
    """Kinds of tasks, which take turns from group to group. A field that a kind does not name is that of `[tasks]`."""


class Training(Part, frozen=True, kw_only=True):
    """The trainer."""

    steps: Annotated[int, Meta(ge=1, le=100_000)] = 3
    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    max_staleness: Annotated[int, Meta(ge=0, le=1000)] = 1
    """In versions; a synchronous trainer trains on the newest version only."""
    window_groups: Count = 0
    """Groups that are open or wait for the trainer at once, which a new version makes room for; 0: those of one step,
    and of `max_staleness` further steps with an asynchronous trainer."""
    algorithm: Literal["grpo", "dapo"] = "grpo"
    """`dapo` samples dynamically: a group whose rewards are all equal is replaced by another group."""
    colocated: bool = False
    """Whether a synchronous trainer computes on the GPUs of the dedicated engines, so that their time costs once."""
    parameters: Annotated[float, Meta(gt=0, le=1e13)] = 8e9
    gpus: Positive = 16
    flops_per_gpu: Annotated[float, Meta(gt=0, le=1e17)] = 989e12
    flops_share: Annotated[float, Meta(gt=0, le=1)] = 0.4
    """Share of the peak that training reaches."""
    fixed_seconds: Seconds = 5.0
    """Time of a training step apart from its tokens."""
    delta_bytes_share: Share = 0.05
    """Bytes of a version relative to the weights."""
    link_bytes_per_second: Annotated[float, Meta(gt=0, le=1e13)] = 2.5e9
    """Bandwidth of an engine's link, shared with nobody (ROSE's paper: 20 Gbit/s)."""
    swap_seconds: Seconds = 0.5
    lends_gpus: Count = 0
    """Engines on the trainer's GPUs that run rollouts while the trainer waits."""
    toggle_seconds: Seconds = 6.3
    """Time until such an engine is ready (PEARL: 6.3 s)."""

    def __post_init__(self) -> None:
        if self.colocated and self.mode != "synchronous":
            raise ValueError("`colocated` contradicts an asynchronous trainer: rollouts run while it trains")
        if self.colocated and self.lends_gpus:
            raise ValueError("`lends_gpus` contradicts `colocated`, whose trainer has no GPUs of its own")


class Elastic(Part, frozen=True, kw_only=True):
    """How serving engines come to the rollouts."""

    how: Literal["none", "lend", "whole"] = "lend"
    """`none`: never. `lend`: turn by turn. `whole`: an allocator moves whole engines."""
    allocation_seconds: Seconds = 60.0
    """Time until a moved engine takes turns, with `whole`."""
    engine_requests: Count = 0
    """Concurrent requests for which an engine is provisioned, with `whole`; 0: as many as an engine with users of its
    own has at most."""


CONTROL = ControlConfig()


class Control(Part, frozen=True, kw_only=True):
    """Settings of the control app, as in `[control]` of a run's configuration."""

    most_lenders: Count = CONTROL.most_lenders
    """Most engines that lend at once; 0 sets no limit."""
    lease_seconds: Annotated[float, Meta(ge=1, le=MAX_LEASE_SECONDS)] = CONTROL.lease_seconds
    margin_seconds: Annotated[float, Meta(ge=0.001, le=YEAR_SECONDS)] = CONTROL.margin_seconds
    """Seconds of work before the waiting work is done, for which a lender is woken."""
    min_gain: Annotated[float, Meta(ge=0.01, le=1)] = CONTROL.min_gain
    """Least share of an executor's work that a woken lender adds to held turns."""
    dwell_seconds: Annotated[float, Meta(ge=0, le=YEAR_SECONDS)] = CONTROL.dwell_seconds
    """Least time between two changes of one lender."""
    idle_seconds: Annotated[float, Meta(ge=0, le=YEAR_SECONDS)] = CONTROL.idle_seconds
    """Time without use after which a lender is parked."""
    known_wake_seconds: Seconds | None = None
    """Time in which a woken lender takes turns, as measured before; None: the control app has woken none."""


ROSE = "rose"
"""The policy of the production router."""


class Routing(Part, frozen=True, kw_only=True):
    """How turns are placed."""

    policy: Literal["rose", "round_robin", "session", "least_load"] = "rose"
    """`rose`: the production router. The others are what it is compared with: with them there is no control app, and
    servers that lend do so whenever their users allow."""
    max_lag_versions: Count | None = None
    """Versions that an executor of the production router may lag behind; None: as many as the trainer is asynchronous.
    The other policies set no limit."""


class Failure(Part, frozen=True, kw_only=True):
    """Something that fails once."""

    what: Literal["executors_die", "lenders_leave", "heartbeats_stop", "router_freezes", "router_dies", "link_slow"]
    """`router_dies`: after `for_seconds` another router takes over and reads the log back."""
    at_seconds: Seconds
    share: Share = 0.5
    """Share of the engines that are affected."""
    for_seconds: Seconds = 30.0
    """Time until what has failed is back."""
    recovers_within_seconds: Seconds = 60.0
    """The run may end later than a run without failures by `for_seconds` and this time."""


class PriceList(Part, frozen=True, kw_only=True):
    """Prices of one device for one hour."""

    currency: str
    dedicated: Seconds
    borrowed: Seconds
    trainer: Seconds
    dedicated_by_device: dict[str, Seconds] = {}
    borrowed_by_device: dict[str, Seconds] = {}

    def __post_init__(self) -> None:
        Prices(**msgspec.structs.asdict(self))  # refuses what the configuration of a run refuses


class Scenario(Part, frozen=True, kw_only=True):
    """A fleet, its users, tasks and trainer."""

    name: str
    """If absent, the name of the file without its ending."""
    about: str = ""
    """One sentence, for the results."""
    seed: int = 0
    dedicated: tuple[Pool, ...]
    lending: Lending | None = None
    users: Users | None = None
    tasks: Tasks
    training: Training = Training()
    elastic: Elastic = Elastic()
    control: Control = Control()
    routing: Routing = Routing()
    cells: Annotated[int, Meta(ge=1, le=64)] = 1
    hop_seconds: Seconds = 0.01
    """Time of a record on the bus."""
    heartbeat_seconds: Annotated[float, Meta(gt=0, le=1)] = 0.2
    prices: PriceList | None = None
    """None: costs are in device time only."""
    failures: tuple[Failure, ...] = ()
    most_seconds: Annotated[float, Meta(gt=0, le=1e9)] = 200_000.0
    """Simulated seconds after which the run counts as stalled."""
    paper: dict[str, Annotated[float, Meta(gt=0, le=1000)]] = {}
    """Ratios that a paper reports. By arm: how many times the throughput of that arm, or, if that arm moves whole
    engines, how many times shorter the rollouts. `ttft_p99`, `tpot_p99`: latency relative to serving alone."""

    @property
    def window_groups(self) -> int:
        """Groups that are open or wait for the trainer at once."""
        training = self.training
        ahead = 0 if training.mode == "synchronous" else training.max_staleness
        return training.window_groups or (1 + ahead) * self.tasks.groups

    @property
    def open_steps(self) -> int:
        """Training steps whose groups are open or wait for the trainer at once."""
        return -(-self.window_groups // self.tasks.groups)

    def __post_init__(self) -> None:
        if self.elastic.how != "none" and self.lending is None:
            raise ValueError("`elastic.how` needs a `[lending]` part, or is `none`")
        if self.users is not None and self.lending is None:
            raise ValueError("`[users]` needs a `[lending]` part: the users' requests are served there")
        if not self.dedicated and (self.lending is None or self.elastic.how == "none"):
            raise ValueError("no engine ever takes a turn: give `[[dedicated]]` or `[lending]`")
        if self.elastic.how == "whole" and self.lending is not None and not self.lending.count:
            raise ValueError("`elastic.how` is `whole`, and `lending.count` is 0: there is no engine to move")
        if self.training.lends_gpus and not self.dedicated:
            raise ValueError(
                "`training.lends_gpus` needs `[[dedicated]]`: engines on the trainer's GPUs are like those"
            )
        if 0 < self.training.window_groups < self.tasks.groups:
            raise ValueError("`training.window_groups` is less than `tasks.groups`: no step would have all its groups")
        for kind in self.tasks.kinds or (self.tasks,):
            most = kind.prompt_tokens + kind.max_turn_tokens
            if most > kind.context_tokens:
                raise ValueError(f"`tasks.context_tokens` has no room for a prompt and a turn of {most} tokens")


def load_scenario(path: Path) -> dict[str, Scenario]:
    """Read a scenario; return it by the name of each arm, first the arm that the others are compared with.

    Raises UsageError.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the scenario {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the scenario {path} is no TOML: {error}") from error
    arms = fields.pop("arms", {})
    if not isinstance(arms, dict) or not all(isinstance(changes, dict) for changes in arms.values()):
        raise UsageError(f"the scenario {path}: each arm is a table, such as [arms.fixed]")
    fields.setdefault("name", path.stem)
    named = {"rose": {}, **arms} if "rose" not in arms else arms
    found = {arm: _scenario(path, arm, merged(fields, changes)) for arm, changes in named.items()}
    for arm, scenario in found.items():
        if unknown := sorted(scenario.paper.keys() - found.keys() - PAPER_LATENCIES):
            raise UsageError(f"the scenario {path}, arm {arm}: `paper.{unknown[0]}` names no arm")
    return found


def merged(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with `changes`; tables are merged, everything else is replaced."""
    found = dict(fields)
    for name, change in changes.items():
        before = found.get(name)
        found[name] = merged(before, change) if isinstance(before, dict) and isinstance(change, dict) else change
    return found


def _scenario(path: Path, arm: str, fields: Mapping[str, Any]) -> Scenario:
    try:
        scenario = msgspec.convert(_with_recordings(path, _with_whole_kinds(fields)), Scenario, strict=True)
        _check_sizes(scenario)
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"the scenario {path}, arm {arm}: {error}") from error
    return scenario


def _check_sizes(scenario: Scenario) -> None:
    """Raise UsageError for a profile that cannot be read, or for what does not fit on its GPUs or in its memory."""
    training, lending = scenario.training, scenario.lending
    pools = [(pool.count, load_profile(pool.profile)) for pool in scenario.dedicated]
    gpus = sum(count * cost.tensor_parallel for count, cost in pools)
    if training.colocated and training.gpus > gpus:
        raise UsageError(f"`training.colocated` with {training.gpus} GPUs, and the dedicated engines have {gpus}")
    if training.lends_gpus and training.lends_gpus * pools[0][1].tensor_parallel > training.gpus:
        raise UsageError(
            f"`training.lends_gpus`: {training.lends_gpus} engines need "
            f"{training.lends_gpus * pools[0][1].tensor_parallel} GPUs, and the trainer has {training.gpus}"
        )
    room = [cost.kv_cache_tokens for count, cost in pools if count]
    if lending is not None:
        serving, guest = load_profile(lending.serving_profile), load_profile(lending.guest_profile)
        users = scenario.users
        prompt, new = longest_requests(serving.kv_cache_tokens)
        if users is not None and (users.prompt_tokens > prompt or users.new_tokens > new):
            raise UsageError(
                f"`users.prompt_tokens` or `users.new_tokens` exceeds what the KV memory of {lending.serving_profile} "
                f"has room for, {prompt} and {new} tokens"
            )
        if lending.count and scenario.elastic.how != "none":
            room.append(guest.kv_cache_tokens)
    if not room:
        raise UsageError("no engine ever takes a turn: every `count` is 0")
    longest = max(kind.context_tokens for kind in scenario.tasks.kinds or (scenario.tasks,))
    if longest > max(room):
        raise UsageError(f"`tasks.context_tokens` is {longest}, and no engine has KV memory for more than {max(room)}")


def _with_whole_kinds(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with kinds of tasks that have all fields of `[tasks]`."""
    tasks = fields.get("tasks")
    kinds = tasks.get("kinds") if isinstance(tasks, dict) else None
    if not isinstance(tasks, dict) or not isinstance(kinds, list):
        return dict(fields)
    common = {name: value for name, value in tasks.items() if name in TaskKind.__struct_fields__}
    whole = [merged(common, kind) if isinstance(kind, dict) else kind for kind in kinds]
    return {**fields, "tasks": {**tasks, "kinds": whole}}


def _with_recordings(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with the paths of recordings relative to the scenario's folder. Raises UsageError."""
    users = fields.get("users")
    given = users.get("recording") if isinstance(users, dict) else None
    names = [given] if isinstance(given, str) else given
    if not isinstance(users, dict) or not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        return dict(fields)
    files = [path.parent / name for name in names]
    for file in files:
        read_recording(file)
    return {**fields, "users": {**users, "recording": [str(file) for file in files]}}

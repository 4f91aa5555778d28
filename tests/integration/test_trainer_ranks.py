"""A trainer of several ranks: learns what one process learns, publishes shards, and resumes what any number saved."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from rose.pipeline.audit import audit_log
from rose.schemas.samples import Outcome
from rose.topics.local_broker import free_ports
from rose.topics.settings import BusSettings
from rose.workers.trainer.checkpoint import Checkpoints
from rose.workers.trainer.learner import Learner
from rose.workers.trainer.main import run_trainer
from rose.workers.trainer.metrics import read_step_log
from rose.workers.trainer.replica import Replica
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.receive import WeightReceiver
from rose.workers.weights.trust import make_trust
from tests.support.brokers import AnyBroker, flags
from tests.support.trainer_fixtures import (
    GROUP_SIZE,
    PRELOADED,
    STEPS,
    Result,
    config_of,
    log_with_samples,
    make_policy,
    make_samples,
    result_of,
)
from tests.support.waiting import WAIT_SECONDS

pytestmark = pytest.mark.slow

JOIN_SECONDS = 300.0
"""Time for the ranks of a run on a busy machine."""

RAISING = """
import torch
from rose.workers.trainer.algorithms import TokenBatch, TokenLoss
from rose.workers.trainer.algorithms.combined import Combined

class Own(Combined):
    def loss(self, batch: TokenBatch) -> TokenLoss:
        if (batch.advantages.abs() == 7.0).any():
            raise ValueError("no loss for seven")
        return super().loss(batch)

    def advantages(self, group):
        if len(group[0].tokens) == {length} and group[0].tokens[2] == {token}:
            return [7.0] * len(group)
        return super().advantages(group)
"""


class Fault(NamedTuple):
    """A fault of one rank."""

    kind: str
    """`kill` or `freeze` instead of saving the version, or `raise` amid a pass of the step after it."""
    rank: int
    version: int


def train_on_ranks(
    settings: BusSettings,
    model_folder: Path,
    run_folder: Path,
    size: int,
    *,
    fault: Fault | None = None,
    weights: WeightsConfig | None = None,
    others: Mapping[str, Any] | None = None,
    **change: Any,
) -> list[int | None]:
    """Train with this many ranks; returns their exit statuses. `others`: different settings of the last rank."""
    change = {"model_folder": model_folder, "run_folder": run_folder, "microbatch_tokens": 40, **change}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, __name__])
    port = free_ports(1)[0]
    processes = [
        context.Process(target=_run_rank, args=(settings, own, rank, size, port, fault, weights))
        for rank, own in enumerate([change] * (size - 1) + [{**change, **(others or {})}])
    ]
    for process in processes:
        process.start()
    frozen = processes[fault.rank] if fault is not None and fault.kind == "freeze" else None
    try:
        for process in processes:
            if process is not frozen:
                process.join(JOIN_SECONDS)
        if frozen is not None:
            frozen.kill()
            frozen.join()
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def _run_rank(
    settings: BusSettings,
    change: dict[str, Any],
    rank: int,
    size: int,
    port: int,
    fault: Fault | None,
    weights: WeightsConfig | None,
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if fault is not None and fault.rank == rank:
        _arm(fault)
    run_trainer(settings, config_of(**change), Event(), weights=weights)


def _arm(fault: Fault) -> None:
    """Make this process have the fault."""
    save: Callable[..., None] = Replica.save

    def armed(self: Replica, checkpoints: Checkpoints, progress: Any) -> None:
        if progress.version == fault.version and fault.kind != "raise":
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        save(self, checkpoints, progress)
        if progress.version == fault.version:
            self.model.model.layers[1].register_forward_pre_hook(_raise)

    Replica.save = armed  # type: ignore[method-assign]


def _raise(*_arguments: object) -> None:
    raise ValueError("a kernel fails")


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    return log_with_samples(broker, namespace)


@pytest.fixture(scope="module")
def alone(
    broker: AnyBroker, policy_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Result, Path]]:
    """The run of one process."""
    settings = log_with_samples(broker, f"alone-{tmp_path_factory.getbasetemp().name}-{id(broker)}.")
    run_folder = tmp_path_factory.mktemp("alone") / "run"
    run_trainer(settings, config_of(policy_folder, run_folder), Event())
    yield result_of(settings), run_folder


@pytest.fixture(scope="module")
def together(
    broker: AnyBroker, policy_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Result, Path, BusSettings]:
    """The run of two ranks."""
    settings = log_with_samples(broker, f"together-{tmp_path_factory.getbasetemp().name}-{id(broker)}.")
    run_folder = tmp_path_factory.mktemp("together") / "run"
    assert train_on_ranks(settings, policy_folder, run_folder, 2) == [0, 0]
    return result_of(settings), run_folder, settings


def exported(run_folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(run_folder / "model" / "model.safetensors")
    return tensors


def assert_close(run_folder: Path, other: Path) -> None:
    """Assert the same steps and policies, but for the rounding of sums that are added in another order."""
    for mine, theirs in zip(read_step_log(run_folder), read_step_log(other), strict=True):
        for name in ("tokens", "groups", "outcomes", "skipped_minibatches"):
            assert mine[name] == theirs[name]
        for name in ("loss", "gradient_norm", "importance_mean", "kl_behaviour", "clipped_share"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    weights, expected = exported(run_folder), exported(other)
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-4), name


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_learn_what_one_process_learns(
    settings: BusSettings, policy_folder: Path, alone: tuple[Result, Path], tmp_path: Path, size: int
) -> None:
    run_folder = tmp_path / "run"
    assert train_on_ranks(settings, policy_folder, run_folder, size, recompute_activations=size == 4) == [0] * size
    assert_close(run_folder, alone[1])
    assert {line["devices"] for line in read_step_log(run_folder)} == {size}
    assert result_of(settings).outcomes == alone[0].outcomes
    assert audit_log(settings).clean


def test_ranks_learn_what_one_process_learns_with_other_policies_and_advantages_over_the_step(
    broker: AnyBroker, namespace: str, policy_folder: Path, tmp_path: Path
) -> None:
    """The loss reads logprobs under the policy at the step's start and under a reference policy, which is sharded."""
    change: dict[str, Any] = {
        "algorithm": "decoupled_ppo",
        "advantages": "reinforce_plus_plus_baseline",
        "aggregation": "sequence",
        "kl_coefficient": 0.1,
    }
    one, two = (log_with_samples(broker, f"{namespace}{name}.") for name in ("one", "two"))
    run_trainer(one, config_of(policy_folder, tmp_path / "one", **change), Event())
    assert train_on_ranks(two, policy_folder, tmp_path / "two", 2, **change) == [0, 0]
    assert_close(tmp_path / "two", tmp_path / "one")
    assert result_of(two).outcomes == result_of(one).outcomes


def test_published_shards_are_the_exported_policy_bit_for_bit(
    together: tuple[Result, Path, BusSettings], policy_folder: Path
) -> None:
    _, run_folder, settings = together
    weights = exported(run_folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    receiver = WeightReceiver(settings, make_trust(settings, "policy", WeightsConfig()), shapes=shapes)
    receiver.start()
    try:
        staged = receiver.staged(WAIT_SECONDS)
    finally:
        receiver.stop()
    assert staged is not None and staged.version == STEPS
    assert len(staged.manifest.slices) > len(weights), "each rank publishes its own rows"
    assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_ends_the_job_and_a_restart_resumes_exactly(
    settings: BusSettings,
    policy_folder: Path,
    together: tuple[Result, Path, BusSettings],
    tmp_path: Path,
    rank: int,
) -> None:
    run_folder = tmp_path / "run"
    ended = train_on_ranks(settings, policy_folder, run_folder, 2, fault=Fault("kill", rank, 2))
    assert ended[rank] == -signal.SIGKILL and ended[1 - rank] not in (0, None)
    assert train_on_ranks(settings, policy_folder, run_folder, 2) == [0, 0]
    assert result_of(settings) == together[0]
    weights, expected = exported(run_folder), exported(together[1])
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert audit_log(settings).clean


def test_any_number_of_ranks_resumes_what_another_saved(
    settings: BusSettings, policy_folder: Path, alone: tuple[Result, Path], tmp_path: Path
) -> None:
    """Three ranks have uneven shards."""
    run_folder = tmp_path / "run"
    train_on_ranks(settings, policy_folder, run_folder, 2, fault=Fault("kill", 1, 2))
    train_on_ranks(settings, policy_folder, run_folder, 3, fault=Fault("kill", 2, 4))
    run_trainer(settings, config_of(policy_folder, run_folder), Event())
    assert audit_log(settings).clean
    weights, expected = exported(run_folder), exported(alone[1])
    assert all(torch.allclose(weights[name], expected[name], rtol=0, atol=1e-4) for name in expected)


def test_checkpoint_of_ranks_has_the_weights_that_they_published(
    together: tuple[Result, Path, BusSettings], policy_folder: Path
) -> None:
    """The optimizer's state is read back too: one more step of the restored learner is a step from this policy."""
    _, run_folder, _ = together
    config = config_of(policy_folder, run_folder)
    learner, checkpoints = Learner(config), Checkpoints(config.checkpoints, None)
    learner.restore(checkpoints, next(checkpoints.newest_first()))
    weights = exported(run_folder)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in learner.model.named_parameters())
    assert all(state["exp_avg_sq"].abs().sum() > 0 for state in learner.optimizer.state.values())


@pytest.mark.parametrize("streamed", [False, True])
def test_group_that_fails_on_one_rank_is_settled_as_failed_and_training_continues(
    settings: BusSettings, policy_folder: Path, tmp_path: Path, streamed: bool
) -> None:
    first = min((one for one in make_samples() if one.group_id == "g04"), key=lambda one: one.trajectory_id)
    tokens = memoryview(first.tokens).cast("I")
    code = RAISING.replace("{length}", str(len(tokens))).replace("{token}", str(tokens[2]))
    (tmp_path / "raises_on_seven.py").write_text(code)
    run_folder = tmp_path / "run"
    own: dict[str, Any] = {"algorithm": "raises_on_seven:Own", "import_paths": (tmp_path,)}
    ended = train_on_ranks(settings, policy_folder, run_folder, 2, stream_gradients=streamed, **own)
    assert ended == [0, 0]
    failed = {name for name, outcome, _ in result_of(settings).outcomes if outcome is Outcome.INFRA_FAILED}
    assert failed == {f"g04:{index}" for index in range(GROUP_SIZE)} | {"g05:0"}
    assert audit_log(settings).clean


@pytest.mark.parametrize("other", ["model_folder", "learning_rate_decay_steps"])
def test_rank_with_another_folder_or_setting_trains_nothing(
    settings: BusSettings, policy_folder: Path, tmp_path: Path, other: str
) -> None:
    change = {"model_folder": make_policy(tmp_path / "other", seed=12), "learning_rate_decay_steps": 1_000}
    ended = train_on_ranks(settings, policy_folder, tmp_path / "run", 2, others={other: change[other]})
    assert 0 not in ended and None not in ended
    assert result_of(settings).digests == {}


@pytest.mark.long
def test_torchrun_starts_the_command_on_two_ranks(
    settings: BusSettings, policy_folder: Path, alone: tuple[Result, Path], tmp_path: Path
) -> None:
    config = config_of(policy_folder, tmp_path / "runs" / "run")
    names = ["groups_per_step", "total_groups", "max_staleness", "max_logprob_difference", "learning_rate"]
    names += ["learning_rate_warmup_steps", "learning_rate_schedule", "learning_rate_decay_steps"]
    changes = {f"trainer.{name}": getattr(config, name) for name in names}
    changes |= {"model.folder": policy_folder, "run.folder": tmp_path / "runs", "run.name": "run"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = [sys.executable, *launcher, sys.executable, "-P", "-m", "rose.pipeline.cli.main", "trainer"]
    pairs = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    done = subprocess.run([*command, *pairs, *flags(settings)], capture_output=True, text=True, timeout=JOIN_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_close(config.run_folder, alone[1])
    assert audit_log(settings).clean


def test_bfloat16_trains_with_float32_master_weights_on_one_rank(
    settings: BusSettings, policy_folder: Path, alone: tuple[Result, Path], tmp_path: Path
) -> None:
    run_folder = tmp_path / "run"
    store = WeightsConfig(store=str(tmp_path / "store"), store_above_bytes=0)
    ended = train_on_ranks(settings, policy_folder, run_folder, 1, weights=store, compute_dtype="bfloat16")
    assert ended == [0]
    weights, expected = exported(run_folder), exported(alone[1])
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    change = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    assert 0 < change < 1e-2
    assert list((tmp_path / "store").iterdir())


@pytest.mark.long
def test_frozen_rank_ends_the_job_and_a_restart_resumes_exactly(
    settings: BusSettings, policy_folder: Path, together: tuple[Result, Path, BusSettings], tmp_path: Path
) -> None:
    run_folder = tmp_path / "run"
    ended = train_on_ranks(settings, policy_folder, run_folder, 2, fault=Fault("freeze", 1, 2), hung_seconds=30.0)
    assert ended == [1, -signal.SIGKILL]
    assert train_on_ranks(settings, policy_folder, run_folder, 2) == [0, 0]
    assert result_of(settings) == together[0]
    assert audit_log(settings).clean


@pytest.mark.long
def test_fault_amid_a_pass_of_sharded_weights_ends_the_job_and_a_restart_resumes_exactly(
    settings: BusSettings, policy_folder: Path, broker: AnyBroker, tmp_path: Path
) -> None:
    """Such a fault leaves the weights of a layer whole, so nothing may be undone in this process."""
    whole = log_with_samples(broker, f"whole-{settings.namespace}")
    assert train_on_ranks(whole, policy_folder, tmp_path / "whole", 1, compute_dtype="bfloat16") == [0]
    fault = Fault("raise", 0, 2)
    assert train_on_ranks(settings, policy_folder, tmp_path / "run", 1, compute_dtype="bfloat16", fault=fault) == [1]
    assert train_on_ranks(settings, policy_folder, tmp_path / "run", 1, compute_dtype="bfloat16") == [0]
    assert result_of(settings) == result_of(whole)

"""Gradients of a step that waits for groups, with real trainer processes: done before the last group comes, and lost
without a trace with the process."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file

from rose.pipeline.audit import audit_log
from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.topics.local_broker import free_ports
from rose.topics.settings import BusSettings
from rose.workers.trainer.groups import CompleteGroup
from rose.workers.trainer.main import run_trainer
from rose.workers.trainer.metrics import read_step_log
from rose.workers.trainer.stream import SampleStream
from tests.support.brokers import AnyBroker, any_broker, flags
from tests.support.trainer_fixtures import (
    GROUP_SIZE,
    config_of,
    group_name,
    make_samples,
    result_of,
    write_prompts,
    write_samples,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EARLY, LAST = (0, 1), 3
"""Groups of the only step: the first two, and the last one."""

SETTINGS = {"groups_per_step": 3, "total_groups": 3, "minibatches": 1, "microbatch_tokens": 1}


def sampled(groups: Sequence[int]) -> int:
    return sum(sum(sample.loss_mask) for sample in make_samples(groups=groups))


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    """A log without samples."""
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=2))
    write_prompts(settings, [*EARLY, LAST])
    return settings


@contextmanager
def trainer(
    settings: BusSettings, model_folder: Path, run_folder: Path, port: int, ranks: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the ranks of a trainer, and wait until the first groups are computed. Rank 0 serves metrics on the port."""
    config = config_of(model_folder, run_folder, stream_gradients=True, **SETTINGS)
    names = ["max_staleness", "max_logprob_difference", "learning_rate", "learning_rate_warmup_steps"]
    names += ["learning_rate_schedule", "learning_rate_decay_steps", "stream_gradients", *SETTINGS]
    changes = {f"trainer.{name}": str(getattr(config, name)).lower() for name in names}
    changes |= {"model.folder": str(model_folder), "run.folder": str(run_folder.parent), "run.name": run_folder.name}
    common = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-P", "-m", "rose.pipeline.cli.main", "trainer", *common, *flags(settings)]
    launched = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    with ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **launched} if ranks > 1 else {}
            served = ["--set", f"metrics.trainer={port}"] if rank == 0 else []
            process = subprocess.Popen([*command, *served], env={**os.environ, **own})
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        until(lambda: early_tokens(port) == sampled(EARLY) or any(one.poll() is not None for one in processes))
        assert early_tokens(port) == sampled(EARLY)
        yield processes
        assert [process.wait(600) for process in processes] in ([0] * ranks, [-signal.SIGKILL] * ranks)


def early_tokens(port: int) -> float:
    """Return the tokens of the step to come whose gradient a trainer says to have computed; -1 before it serves."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
    except OSError:
        return -1
    return next((one.samples[0].value for one in families if one.name == "rose_trainer_early_tokens"), -1)


def exported(run_folder: Path) -> torch.Tensor:
    tensors = load_file(run_folder / "model" / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


@any_broker
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_a_step_are_computed_before_its_last_group_comes(
    broker: AnyBroker, settings: BusSettings, policy_folder: Path, tmp_path: Path, ranks: int
) -> None:
    """Killed before the last group, a second trainer ends with the same policy as one that was not killed."""
    write_samples(settings, make_samples(groups=EARLY))
    run_folder, [port] = tmp_path / "runs" / "run", free_ports(1)
    with trainer(settings, policy_folder, run_folder, port, ranks) as processes:
        assert result_of(settings).outcomes == [] and set(result_of(settings).digests) <= {0}
        for process in processes:
            process.kill()
    with trainer(settings, policy_folder, run_folder, port, ranks):
        write_samples(settings, make_samples(groups=[LAST]))
    [line] = read_step_log(run_folder)
    assert (line["streamed_tokens"], line["tokens"]) == (sampled(EARLY), sampled(EARLY) + sampled([LAST]))
    assert line["groups"] == 3 and line["waiting_seconds"] >= 0
    assert len(result_of(settings).outcomes) == 3 * GROUP_SIZE and audit_log(settings).clean

    whole, batch = broker.settings(f"{settings.namespace}whole."), tmp_path / "whole"
    create_topics(whole, Partitions(home=1, slots=1, samples=1, chunks=2))
    write_prompts(whole, [*EARLY, LAST])
    write_samples(whole, make_samples(groups=EARLY))
    write_samples(whole, make_samples(groups=[LAST]))
    run_trainer(whole, config_of(policy_folder, batch / "streamed", stream_gradients=True, **SETTINGS), Event())
    assert read_step_log(batch / "streamed")[0]["streamed_tokens"] == 0
    assert torch.allclose(exported(run_folder), exported(batch / "streamed"), rtol=0, atol=0 if ranks == 1 else 1e-4)
    assert result_of(whole).outcomes == result_of(settings).outcomes


@any_broker
def test_stream_shows_groups_of_a_step_before_the_last_one_in_the_order_of_the_step(settings: BusSettings) -> None:
    seen: list[str] = []

    def on_complete(group: CompleteGroup) -> None:
        """Write the next group once the one before it was shown."""
        seen.append(group.group_id)
        write_samples(settings, make_samples(groups=[len(seen)]))

    write_samples(settings, make_samples(groups=[0]))
    with SampleStream(settings, "policy") as stream:
        first = [group.group_id for group in stream.take(4, on_complete=on_complete)]
        assert first == [group_name(number) for number in range(4)]
        assert seen == first[:3]
        write_samples(settings, make_samples(groups=[8]))
        assert [group.group_id for group in stream.take(1, on_complete=on_complete)] == [group_name(8)]
        assert len(seen) == 3


@any_broker
def test_stop_amid_a_step_leaves_its_groups_to_the_next_stream(settings: BusSettings) -> None:
    stop = Event()
    write_samples(settings, make_samples(groups=EARLY))
    with SampleStream(settings, "policy", stop=stop) as stream:
        assert stream.take(3, on_complete=lambda _: stop.set()) == ()
    with SampleStream(settings, "policy") as stream:
        assert {group.group_id for group in stream.take(2)} == set(map(group_name, EARLY))

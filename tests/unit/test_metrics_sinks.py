"""Sinks of step metrics."""

from pathlib import Path

from rose.schemas.samples import Outcome
from rose.workers.trainer.metrics import STEP_LOG, TRAINER, StepLine, StepReporter, decode_line, encode_line


def line_of(step: int) -> StepLine:
    return StepLine(
        step=step,
        version=step,
        groups=1,
        groups_filtered=0,
        outcomes={Outcome.TRAINED.value: 4},
        reward_mean=0.5,
        success_rate=None,
        staleness_mean=0.0,
        staleness_max=0,
        learning_rate=0.25 / step,
    )


def value_of(name: str) -> float:
    return TRAINER.get_sample_value(name) or 0.0


def test_each_step_reaches_every_sink_once_also_after_a_restart(tmp_path: Path) -> None:
    steps = value_of("rose_trainer_steps_total")
    reporter = StepReporter(tmp_path)
    for step in (1, 2, 2):
        reporter.report(line_of(step))
    reporter.close()
    again = StepReporter(tmp_path)
    for step in (2, 3):
        again.report(line_of(step))
    lines = [decode_line(line) for line in (tmp_path / STEP_LOG).read_bytes().splitlines()]
    assert lines == [line_of(step) for step in (1, 2, 3)]
    assert value_of("rose_trainer_steps_total") == steps + 3
    assert value_of("rose_trainer_learning_rate") == 0.25 / 3


def test_step_missing_from_the_step_log_after_a_kill_is_sent_again_to_every_sink(tmp_path: Path) -> None:
    StepReporter(tmp_path).report(line_of(1))
    (tmp_path / STEP_LOG).write_bytes(encode_line(line_of(1)) + b"\n" + encode_line(line_of(2))[:20])
    steps = value_of("rose_trainer_steps_total")
    StepReporter(tmp_path).report(line_of(2))
    assert [decode_line(line).step for line in (tmp_path / STEP_LOG).read_bytes().splitlines()] == [1, 2]
    assert value_of("rose_trainer_steps_total") == steps + 1

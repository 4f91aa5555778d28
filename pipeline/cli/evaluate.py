"""`rose evaluate`: held-out success of a model folder."""

import sys
from pathlib import Path

import msgspec

from rose.pipeline.config.load import Config, load
from rose.pipeline.config.options import Common, is_writable
from rose.schemas.errors import RoseError, UsageError
from rose.schemas.prompts import Sampling
from rose.workers.evaluate import Evaluation, evaluate_policy
from rose.workers.executor.vllm.types import EngineConfig


def evaluate_folder(common: Common, model: Path | None, output: Path | None) -> None:
    """Play the held-out tasks, print the success, and write it to the file `output` if given.

    `model` is the model folder; if None, the folder of the configuration. Raises UsageError, EnvironmentFailed or
    NotWritten.
    """
    if output is not None and not is_writable(output):
        raise UsageError(
            f"--json {output} cannot be written: name a file, in a folder that is there and may be written"
        )
    config = load(common)
    sys.path[:0] = config.import_paths()
    evaluation = held_out(config, model or config.settings.model.folder)
    sys.stdout.write(
        f"{evaluation.success:.4f} of {evaluation.tasks} held-out tasks solved, sampled at temperature 1, "
        f"{evaluation.turns / evaluation.tasks:.1f} turns a task\n"
    )
    if output is not None:
        try:
            output.write_bytes(msgspec.json.encode(evaluation))
        except OSError as error:
            raise NotWritten(f"{output} cannot be written ({error.strerror}): the figures are above") from None


def held_out(config: Config, model_folder: Path) -> Evaluation:
    """Play the held-out tasks of the configuration with the policy in `model_folder`, at temperature 1."""
    settings = config.settings
    tasks, executor, environment = settings.tasks, settings.executor, settings.environment
    return evaluate_policy(
        EngineConfig(
            model_folder=model_folder,
            dtype=executor.dtype,
            max_model_len=executor.max_model_len,
            max_running=executor.max_turns,
            kv_cache_bytes=executor.kv_cache_bytes,
            step_tokens=executor.step_tokens,
            seed=0,
        ),
        environment=tasks.environment,
        arguments=tasks.arguments,
        seeds=range(tasks.held_out_seed, tasks.held_out_seed + tasks.held_out),
        sampling=Sampling(temperature=1.0, max_tokens=environment.max_turn_tokens),
        max_turns=tasks.max_turns,
        max_context_tokens=environment.max_context_tokens,
        step_timeout_seconds=environment.step_timeout_seconds,
    )


class NotWritten(RoseError):
    """The evaluation is done, but its result could not be written to the file."""

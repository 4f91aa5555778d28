"""The prompts of evaluations during training, from a file or from the held-out tasks of the configuration."""

from rose.pipeline.config.load import Config
from rose.pipeline.local.submit import read_prompts
from rose.schemas.errors import UsageError
from rose.workers.evaluator.evaluation import EvaluationSet, held_out_prompts


def evaluation_set(config: Config) -> EvaluationSet:
    """Return the set that the configuration describes. Raises BadPrompts or UsageError."""
    evaluation, tasks = config.settings.evaluation, config.settings.tasks
    if not evaluation.every_versions:
        raise UsageError(
            "evaluation.every_versions is 0, so no version is evaluated: set how many versions lie between evaluations"
        )
    if evaluation.prompts is not None:
        prompts = read_prompts(evaluation.prompts, config.environments, trained=False)
    else:
        if tasks.environment not in config.environments:
            raise UsageError(
                f"tasks.environment ({tasks.environment}) is no environment of this configuration: name it in "
                "environment.environments, or give evaluation.prompts"
            )
        prompts = list(
            held_out_prompts(
                tasks.environment,
                tasks.arguments,
                first_seed=tasks.held_out_seed,
                count=evaluation.tasks,
                max_turns=tasks.max_turns,
            )
        )
    return EvaluationSet(evaluation.name, tuple(prompts), evaluation.samples)

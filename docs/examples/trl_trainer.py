"""TRL's GRPOTrainer on the bus: it computes loss and steps, ROSE brings the groups and takes outcomes and versions.

    accelerate launch docs/examples/trl_trainer.py --bootstrap-server broker:9092 --steps 100 MODEL_FOLDER

Keeps true
- One process, rank 0, talks to the bus; the others get their rows from it.
- The policy is on the log before the first group is waited for, and the version of each step is committed together with
  the outcomes of what it was made of.
- TRL weighs a token by the policy to the one that sampled it: the engine's logprobs are its "old" ones, at one
  temperature.
- Every member of a group has a row; one that cannot be learned from has no reward, which TRL keeps out of the baseline.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Annotated, Any

import torch
import typer
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rose.schemas.samples import Outcome, Sample
from rose.topics.settings import BusSettings
from rose.workers.trainer.algorithms import TrainingSample
from rose.workers.trainer.selection import SampleDecision, SelectedGroup, SelectionRules, outcomes_of, select_samples
from rose.workers.trainer.stream import SampleStream
from rose.workers.weights.folder_names import FolderTensors
from rose.workers.weights.publish import WeightPublisher

NOTHING = {"prompt_ids": [0], "completion_ids": [0], "logprobs": [0.0], "env_mask": [0], "reward": None}
"""The row of a sample that cannot be learned from."""


class Feed(TrainerCallback):
    """What rank 0 has to do with the bus."""

    def __init__(
        self,
        stream: SampleStream,
        publisher: WeightPublisher,
        tensors: FolderTensors,
        rules: SelectionRules,
        temperature: float,
    ) -> None:
        self._stream, self._publisher, self._tensors = stream, publisher, tensors
        self._rules, self._temperature = rules, temperature
        self._judged: list[SelectedGroup] = []
        self._version = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._version = self._stream.publish(self._publisher, self._tensors)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        outcomes = outcomes_of(self._judged, step=self._version + 1, policy_version=self._version, now=time.time())
        self._judged = []
        self._version = self._stream.publish(self._publisher, self._tensors, outcomes)

    def rows(self, count: int, group_size: int) -> list[dict[str, Any]]:
        """Of the next complete groups of that size; raises RuntimeError when the stream has been stopped before."""
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            groups = self._stream.take(1)
            if not groups:
                raise RuntimeError("there are no more groups: the run has ended, or was stopped")
            group = self._fitting(select_samples(groups[0], self._version, rules=self._rules), group_size)
            self._judged.append(group)
            if group.trained:
                learned = {sample.trajectory_id for sample in group.trained}
                rows += [row_of(one) if one.trajectory_id in learned else NOTHING for one in group.samples]
        return rows

    def _fitting(self, group: SelectedGroup, group_size: int) -> SelectedGroup:
        """TRL has one temperature and one size of groups: another group teaches it nothing, and is settled so."""
        drawn_at = {turn.sampling.temperature for sample in group.trained for turn in sample.turns}
        if drawn_at <= {self._temperature} and len(group.samples) == group_size:
            return group
        reason = f"{len(group.samples)} drawn at {sorted(drawn_at)}, the trainer takes {group_size}"
        other = SampleDecision(Outcome.FILTERED, f"{reason} at {self._temperature}")
        decisions = tuple(other if one.outcome is Outcome.TRAINED else one for one in group.decisions)
        return SelectedGroup(group.group_id, group.samples, decisions)


def row_of(sample: Sample) -> dict[str, Any]:
    """Up to the first sampled token it is TRL's prompt; what the environment says later is masked in the completion."""
    one = TrainingSample.of(sample)
    first = list(one.loss_mask).index(1)
    return {
        "prompt_ids": list(one.tokens[:first]),
        "completion_ids": list(one.tokens[first:]),
        "logprobs": list(one.behaviour_logprobs[first:]),
        "env_mask": list(one.loss_mask[first:]),
        "reward": one.reward,
    }


class BusGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPO whose completions come from the bus. `feed` on rank 0 only."""

    def __init__(self, *, feed: Feed | None, **arguments: Any) -> None:
        super().__init__(rollout_func=self._roll_out, reward_funcs=reward_of, **arguments)
        self._feed = feed
        if feed is not None:
            self.add_callback(feed)

    def _roll_out(self, prompts: Sequence[str], _trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """This rank's part of the step's rows."""
        everyone: list[Any] = [None]
        if self._feed is not None:
            everyone = [self._feed.rows(len(prompts) * self.accelerator.num_processes, self.num_generations)]
        broadcast_object_list(everyone)
        first = len(prompts) * self.accelerator.process_index
        mine = everyone[0][first : first + len(prompts)]
        return {name: [row[name] for row in mine] for name in NOTHING}

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
        return batch


def reward_of(completions: Sequence[str], reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """What the environment gave."""
    return list(reward)


def train(
    settings: BusSettings,
    model_folder: Path,
    *,
    run: str,
    steps: int,
    group_size: int,
    output: Path,
    groups_per_step: int = 4,
    temperature: float = 1.0,
    learning_rate: float = 1e-4,
    stop: Event | None = None,
) -> Any:
    """So many steps; returns the model."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, trust_remote_code=False)
    config = GRPOConfig(
        output_dir=str(output),
        max_steps=steps,
        num_generations=group_size,
        per_device_train_batch_size=group_size,
        gradient_accumulation_steps=groups_per_step,
        temperature=temperature,
        learning_rate=learning_rate,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        disable_dropout=True,  # the engines sample without
        report_to="none",
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    )
    rules = SelectionRules(
        max_staleness=4,
        vocabulary=model.config.vocab_size,
        context_tokens=model.config.max_position_embeddings,
    )
    arguments: dict[str, Any] = {
        "model": model,
        "args": config,
        "train_dataset": Dataset.from_dict({"prompt": [""] * groups_per_step}),  # the bus has the prompts
        "processing_class": AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False),
    }
    if config.process_index:
        BusGRPOTrainer(feed=None, **arguments).train()
        return model
    with (
        SampleStream(settings, "policy", stop=stop) as stream,
        WeightPublisher(settings, "policy", run=run) as publisher,
    ):
        tensors = FolderTensors(model, model_folder)
        BusGRPOTrainer(feed=Feed(stream, publisher, tensors, rules, temperature), **arguments).train()
    return model


def main(
    model_folder: Annotated[Path, typer.Argument(help="Hugging Face folder of the policy to begin with.")],
    bootstrap_server: Annotated[str, typer.Option(help="Address of the broker.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps.")],
    group_size: Annotated[int, typer.Option(help="Trajectories of each prompt.")] = 16,
    run: Annotated[str, typer.Option(help="The run's name, as the executors know it (`run.name`).")] = "run",
    output: Annotated[Path, typer.Option(help="TRL's own folder.")] = Path("trl"),
) -> None:
    """Train a policy with TRL on what the bus brings."""
    settings = BusSettings(bootstrap_server)
    train(settings, model_folder, run=run, steps=steps, group_size=group_size, output=output)


if __name__ == "__main__":
    typer.run(main)

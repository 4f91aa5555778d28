"""Measures how long an engine pauses for a new version: vLLM on SmolLM2-135M, swapped during generation.

The engine generates turns without interruption. Every few steps it activates the next version, forward and backward
between the two versions of the kept update (`bench.weights --only sizes`). The pause is the time of the swap, after
another thread has prepared the version. It is compared with the median decode step of the same turns in the same run.
"""

import statistics
from pathlib import Path

import torch

from bench.check import Check, Section
from bench.weight_speeds import kept
from rose.schemas.prompts import Sampling

TURNS = 4
"""Number of turns that generate at the same time."""

SWAPS = 20
STEPS_BETWEEN = 5
MOST_STEPS = 2.0


def pause(folder: Path) -> Section:
    """Measure the pause. Raises EngineStartError."""
    import rose.workers.executor.vllm.process_env  # noqa: F401
    from rose.workers.executor.vllm.engine import Engine
    from rose.workers.executor.vllm.types import EngineConfig

    versions = [
        {name: torch.from_numpy(words).view(torch.bfloat16) for name, words in version.items()}
        for version in kept(folder)
    ]
    engine = Engine(
        EngineConfig(
            model_folder=folder / "model",
            dtype="float32",
            max_model_len=1024,
            max_running=TURNS,
            kv_cache_bytes=512 << 20,
            step_tokens=256,
            policy_version=0,
        )
    )
    try:
        for turn in range(TURNS):
            sampling = Sampling(max_tokens=SWAPS * STEPS_BETWEEN + 50)
            engine.add(str(turn), list(range(100 + turn, 164 + turn)), sampling, policy_version=0)
        for _ in range(STEPS_BETWEEN):  # prefills and the engine's warm-up
            engine.step()
        steps: list[float] = []
        pauses: list[float] = []
        for version in range(1, SWAPS + 1):
            steps += [engine.step().seconds for _ in range(STEPS_BETWEEN)]
            for _ in engine.stage(versions[version % 2].items()):
                pass
            pauses.append(engine.activate(version))
    finally:
        engine.close()
    step, longest = statistics.median(steps), statistics.quantiles(pauses, n=100)[98]
    row: dict[str, float | str] = {
        "swaps": SWAPS,
        "pause_p50_ms": round(1000 * statistics.median(pauses), 1),
        "pause_p99_ms": round(1000 * longest, 1),
        "decode_step_ms": round(1000 * step, 1),
    }
    check = Check(
        name="pause_p99",
        value=round(longest / step, 3),
        unit="decode steps",
        bound=MOST_STEPS,
        direction="max",
        against=f"the median decode step of {TURNS} turns in the same run",
        details=dict(row),
    )
    return Section("pause", rows=[row], checks=[check])

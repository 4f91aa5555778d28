"""Plays environments of verifiers with its own interpreter, and prints what happened as JSON.

python -m tests.support.verifiers_episodes
"""

import asyncio
import json
import random
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from rose.workers.environments.protocol import FirstObservation

EXAMPLES = Path(__file__).parents[2] / "docs/examples/verifiers"


async def play(create: Callable[[], Any], seed: int, actions: list[str], **arguments: Any) -> dict[str, Any]:
    environment = create()
    try:
        first = await environment.reset(seed, arguments)
        steps = [await environment.step(action) for action in actions]
    except Exception as error:  # noqa: BLE001  it is the result
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        await environment.close()
    said = [each.content for each in first.messages] if isinstance(first, FirstObservation) else [first]
    return {"first": said, "steps": [[step.observation, step.reward, step.done, step.success] for step in steps]}


async def restored(create: Callable[[], Any], actions: list[str], *, digest: str = "") -> dict[str, Any]:
    """Return the step after some actions: of the same instance, and of one that is restored before it."""
    one, other = create(), create()
    try:
        await one.reset(1, {})
        for action in actions[:-1]:
            await one.step(action)
        state = json.loads(await one.snapshot())
        state["digest"] = digest or state["digest"]
        await other.restore(json.dumps(state).encode())
        steps = [await each.step(actions[-1]) for each in (one, other)]
        return {"equal": steps[0] == steps[1]}
    except Exception as error:  # noqa: BLE001  it is the result
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        await one.close()
        await other.close()


async def main() -> None:
    sys.path.insert(0, str(EXAMPLES))
    from rose.workers.environments.verifiers_adapter import Verifiers

    tasks: Any = import_module("verifiers_tasks")

    class Two(Verifiers):
        env = {"id": "agentic-judge", "taskset": {"id": "addition-v1"}}

    draw = random.Random(0)
    left, right = draw.randint(0, 99), draw.randint(0, 99)
    number = random.Random(0).randint(1, 100)
    hits = [str(number - 1), "a word", str(number)]
    found = {
        "sum": [left, right],
        "right": await play(tasks.Addition, 100, [str(left + right)]),
        "wrong": await play(tasks.Addition, 7, ["none"], index=0),
        "beyond": await play(tasks.Addition, 7, [], index=100),
        "unknown": await play(tasks.Addition, 7, [], difficulty=1),
        "guessed": await play(tasks.Guessing, 0, hits),
        "again": await restored(tasks.Guessing, ["0", "1", "2"]),
        "changed": await restored(tasks.Guessing, ["0", "1", "2"], digest="0" * 32),
        "two": await play(Two, 0, []),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())

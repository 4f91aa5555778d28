"""A taskset of verifiers: add two numbers."""

import random

import verifiers.v1 as vf

__all__ = ["AdditionTaskset"]


class AdditionData(vf.TaskData):
    answer: int


class AdditionTask(vf.Task[AdditionData]):
    @vf.reward
    async def exact_match(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))


class AdditionConfig(vf.TasksetConfig):
    num_tasks: int = 100


class AdditionTaskset(vf.Taskset[AdditionTask, AdditionConfig]):
    def load(self) -> list[AdditionTask]:
        draw = random.Random(0)
        pairs = [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(self.config.num_tasks)]
        return [
            AdditionTask(
                AdditionData(
                    prompt=f"{left}+{right}", system_prompt="Answer with the number alone.", answer=left + right
                ),
                self.config.task,
            )
            for left, right in pairs
        ]

"""An environment of verifiers with several turns: guess a number, with a hint after each guess."""

import random

import verifiers.v1 as vf

__all__ = ["GuessingEnv", "GuessingTaskset"]

MOST_GUESSES = 10


class GuessingData(vf.TaskData):
    number: int


class GuessingTask(vf.Task[GuessingData]):
    pass


class GuessingTaskset(vf.Taskset[GuessingTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        draw = random.Random(0)
        while True:
            yield GuessingTask(GuessingData(prompt="1 to 100", number=draw.randint(1, 100)), self.config.task)


class GuessingConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessingEnv(vf.Env[GuessingConfig]):
    async def run(self, task, agents):
        number, right = task.data.number, False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(MOST_GUESSES - 1):
                guess = segment.last_reply
                right = guess == str(number)
                if right or segment.terminated:
                    break
                known = guess.isdecimal() and len(guess) < 10
                hint = "?" if not known else "higher" if int(guess) < number else "lower"
                segment = await interaction.turn(hint)
            right = segment.last_reply == str(number)
        interaction.trace.record_reward("right", float(right))

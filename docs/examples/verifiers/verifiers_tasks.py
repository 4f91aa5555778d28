"""The tasksets of this folder as environments of ROSE."""

from rose.workers.environments.verifiers_adapter import Verifiers


class Addition(Verifiers):
    env = {"taskset": {"id": "addition-v1"}}


class Guessing(Verifiers):
    env = {"taskset": {"id": "guessing-v1"}}
    most_tasks = 1000

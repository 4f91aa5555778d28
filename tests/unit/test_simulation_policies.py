"""A policy router keeps every offer and loses no turn, whichever executors leave, are killed or fall silent."""

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.pipeline.simulation.policies import PolicyRouter
from rose.schemas.heartbeats import ExecutorState, SlackHeartbeat
from rose.schemas.turns import Refusal, TurnDispatch, TurnKey, TurnOutcome, TurnResult
from tests.support.routing_fixtures import completed, heartbeat, request

POLICIES = ["round_robin", "session", "least_load"]

"""Turns of the guest in the serving engine's loop. See `attach`."""

from logging import Logger
from pathlib import Path
from typing import Any

from vllm.v1.engine import EngineCoreRequestType

from workers.lender.config import LendConfig
from workers.lender.feeder import Feeder
from workers.lender.pulse import Pulse
from workers.lender.vllm.guest import Guest


def lend(core: Any, config: LendConfig, log: Logger) -> None:
    """Give a guest its turns in the loop of `core`, an EngineCoreProc. Raises UsageError."""
    process_input_queue, process_engine_step = core._process_input_queue, core._process_engine_step
    arrived = core.input_queue.queue
    """The queue's own deque: to ask it takes no lock."""

    def wake() -> None:
        core.process_input_queue_block = False  # first: the loop may be about to sleep
        core.input_queue.put((EngineCoreRequestType.WAKEUP, None))

    feeder = Feeder(Path(config.socket), wake, beat_seconds=config.heartbeat_seconds, log=log)
    guest = Guest(config, feeder, Pulse.of_core(config.pulse), log)

    def take_input() -> None:
        core.process_input_queue_block = idle = not guest.busy
        if idle:
            feeder.arm()
            if guest.busy:  # an order that came meanwhile has had its wake already
                core.process_input_queue_block = False
        process_input_queue()

    def step() -> bool:
        executed: bool = process_engine_step()
        held = bool(arrived) or core.scheduler.has_requests() or not core.is_running()
        if held or not guest.busy:
            guest.beat(held=held)
        else:
            guest.tick()
        return executed

    core._process_input_queue = take_input
    core._process_engine_step = step

"""The sandbox environment: a policy runs shell commands and Python programs until it submits.

Keeps true
- The state of a task is its files and its running processes. Each command begins in /workspace, in a shell of its own:
  no variable, working folder or interpreter is carried from one turn to the next.
- A restored sandbox has the files that were saved, by digest, and the processes, by command line; otherwise the
  restore fails. Actions that are repeated for that must leave the same files as before.
- A sandbox that has ended (its host was out of memory, its lease was lost) is made again from its state at the next
  turn. Its end is no result: a check during which it ends is repeated, and fails the trajectory the second time.
- No sandbox is made once the environment is closed, although a call that was given up may still run.
"""

import asyncio
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Annotated

import msgspec

from rose.workers.environments.protocol import EnvironmentArgumentError, JsonValue, LifeCycleError, SnapshotError, Step
from rose.workers.environments.sandbox.actions import Action, Tool, observation_of, parse_action
from rose.workers.environments.sandbox.checkpoints import Change, Checkpoints, Figures
from rose.workers.environments.sandbox.host import sandbox_host
from rose.workers.environments.sandbox.process import (
    PYTHON,
    SHELL,
    CommandResult,
    SandboxLimits,
    SandboxLost,
    SandboxProcess,
)
from rose.workers.environments.sandbox.state import SandboxState, decode_state
from rose.workers.environments.sandbox.store import contents
from rose.workers.environments.sandbox.tree import Chain, PackError, Tree, content_digest, tree_of_files, unpacked

MIB = 1 << 20

LOST = "[the command ended its sandbox: its changes are lost]"


class SandboxArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task, and the limits of its sandbox."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)] = "Solve the task in /workspace."
    """The first observation."""
    files: dict[str, str] = {}
    """Text files by path below /workspace."""
    setup: list[str] = []
    """Shell commands that prepare /workspace; the variable SEED has the prompt's seed."""
    check: str = ""
    """Shell command that runs once the policy submits; its exit status 0 is a reward of 1."""
    command_seconds: Annotated[float, msgspec.Meta(ge=0.1, le=45.0)] = 20.0
    """Longest time of a command; below `environment.step_timeout_seconds`."""
    output_bytes: Annotated[int, msgspec.Meta(ge=64, le=65_536)] = 4096
    """Most bytes of a command's output in an observation."""
    disk_mib: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    """Most MiB of files. They are in memory."""
    memory_mib: Annotated[int, msgspec.Meta(ge=64, le=65_536)] = 1024
    """Most MiB of address space of each process."""
    processes: Annotated[int, msgspec.Meta(ge=4, le=4096)] = 64
    """Most processes at once."""


def read_arguments(arguments: Mapping[str, JsonValue]) -> SandboxArguments:
    """The arguments of a prompt. Raises EnvironmentArgumentError."""
    try:
        given = msgspec.convert(dict(arguments), SandboxArguments)
    except msgspec.ValidationError as error:
        raise EnvironmentArgumentError(f"environment 'sandbox' does not take these arguments: {error}") from None
    for path in given.files:
        if path.startswith("/") or any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path:
            raise EnvironmentArgumentError(f"environment 'sandbox': files {path!r}: give a path below /workspace")
    return given


class SandboxEnvironment:
    """One task in one sandbox."""

    def __init__(self) -> None:
        self._host = sandbox_host()
        self._arguments = SandboxArguments()
        self._seed = 0
        self._lineage = ""
        self.sandbox: SandboxProcess | None = None
        self._checkpoints: Checkpoints | None = None
        self._state = b""
        self._is_done = False
        self._is_closed = False
        self._guard = threading.Lock()
        """Held to change `sandbox`: a call that was given up may run while the environment is closed."""
        self.figures = Figures()
        """Counts of turns and checkpoints; for people and benchmarks."""

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str:
        """Make the sandbox with the task's files. Raises EnvironmentArgumentError and NoSandbox."""
        self._arguments = read_arguments(arguments)
        self._seed, self._lineage = seed, uuid.uuid4().hex
        await asyncio.to_thread(self._reset, dict(arguments))
        return self._arguments.prompt

    async def step(self, action: str) -> Step:
        """Run the block of an action."""
        if self._checkpoints is None or self._is_done:
            raise LifeCycleError("step() needs a running task: call reset() or restore() first")
        asked = parse_action(action)
        if isinstance(asked, str):
            return Step(observation=asked, reward=0.0, done=False, info={"ending": "open", "changed": "nothing"})
        if asked.tool is Tool.SUBMIT:
            return await self._submit()
        observation, change = await asyncio.to_thread(self._act, action, asked)
        return Step(observation=observation, reward=0.0, done=False, info={"ending": "open", "changed": change.value})

    async def snapshot(self) -> bytes:
        """The sandbox's state. Raises LifeCycleError without a task."""
        if self._checkpoints is None:
            raise LifeCycleError("snapshot() needs a running task: call reset() or restore() first")
        self._state = await asyncio.to_thread(self._take_state, self._checkpoints)
        return self._state

    async def restore(self, state: bytes) -> None:
        """Make the sandbox of a state. Raises SnapshotError and NoSandbox."""
        await asyncio.to_thread(self._restore, state)

    async def close(self) -> None:
        """End the sandbox."""
        await asyncio.to_thread(self._close)

    async def _submit(self) -> Step:
        passed = None
        if self._arguments.check:
            passed = await asyncio.to_thread(self._check)
        self._is_done = True
        return Step(observation="", reward=float(bool(passed)), done=True, success=passed, info={"ending": "submitted"})

    def _reset(self, arguments: dict[str, JsonValue]) -> None:
        sandbox = self._made()
        try:
            self._set_up(sandbox)
            tree = sandbox.scan()
        except ValueError as error:
            raise EnvironmentArgumentError(f"environment 'sandbox': its files cannot be made: {error}") from None
        base = SandboxState(seed=self._seed, arguments=arguments, lineage=self._lineage, content=content_digest(tree))
        self._checkpoints = Checkpoints(self._host, base, Chain(), tree, self.figures)

    def _made(self) -> SandboxProcess:
        """A sandbox without files. The one before is closed. Raises NoSandbox and SandboxLost."""
        self._end_sandbox()
        given = self._arguments
        sandbox = SandboxProcess(
            SandboxLimits(
                disk_bytes=given.disk_mib * MIB,
                processes=given.processes,
                memory_bytes=given.memory_mib * MIB,
                output_bytes=given.output_bytes,
                command_seconds=given.command_seconds,
            )
        )
        with self._guard:
            if not self._is_closed:
                self._host.hold(self._lineage)
                self.sandbox = sandbox
                return sandbox
        sandbox.close()
        raise SandboxLost("the environment is closed")

    def _set_up(self, sandbox: SandboxProcess) -> None:
        """Make the files of the task. Raises SandboxLost, ValueError or EnvironmentArgumentError."""
        sandbox.load(*tree_of_files({path: text.encode() for path, text in self._arguments.files.items()}))
        for number, command in enumerate(self._arguments.setup):
            result = sandbox.run([*SHELL, command], {"SEED": str(self._seed)})
            if result.status or result.processes:
                said = observation_of(result, self._arguments.command_seconds)[-200:]
                must = "must end with status 0 and leave no process"
                raise EnvironmentArgumentError(f"environment 'sandbox': command {number} of setup {must}: {said}")

    def _act(self, action: str, asked: Action) -> tuple[str, Change]:
        checkpoints = self._checkpoints
        assert checkpoints is not None
        checkpoints.before_action()
        if self.sandbox is None or not self.sandbox.is_running:
            self._restore(self._state)
            checkpoints = self._checkpoints
            assert checkpoints is not None
        began = time.monotonic()
        try:
            result, tree, left = self._ran(asked)
        except SandboxLost:
            self._restore(self._state)
            return LOST, Change.NOTHING
        change = checkpoints.on_action(action, time.monotonic() - began, tree, left)
        return observation_of(result, self._arguments.command_seconds), change

    def _ran(self, asked: Action) -> tuple[CommandResult, Tree | str, list[str]]:
        """Run a block. Raises SandboxLost."""
        sandbox = self.sandbox
        assert sandbox is not None
        program = PYTHON if asked.tool is Tool.PYTHON else SHELL
        result = sandbox.run([*program, asked.text])
        try:
            return result, sandbox.scan(), result.processes
        except ValueError as error:
            return result, f"its files cannot be saved: {error}", result.processes

    def _close(self) -> None:
        with self._guard:
            self._is_closed = True
        self._end_sandbox()
        self._checkpoints = None

    def _end_sandbox(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
        with self._guard:
            ended, self.sandbox = self.sandbox, None
        if ended is not None:
            ended.close()
            self._host.let_go(self._lineage, ended=self._is_done)

    def _take_state(self, checkpoints: Checkpoints) -> bytes:
        assert self.sandbox is not None
        return checkpoints.state(self.sandbox)

    def _check(self) -> bool:
        if self.sandbox is None or not self.sandbox.is_running:
            self._restore(self._state)
        try:
            return self._passes()
        except SandboxLost:
            self._restore(self._state)
            return self._passes()

    def _passes(self) -> bool:
        """Run the check. Raises SandboxLost."""
        assert self.sandbox is not None and self._checkpoints is not None
        self._checkpoints.before_action()
        return self.sandbox.run([*SHELL, self._arguments.check], {"SEED": str(self._seed)}).status == 0

    def _newest(self, state: SandboxState) -> SandboxState:
        """The state with the packs that were stored after it was written, instead of the actions to repeat."""
        if self._host.store is None or state.processes or (state.packs and not state.pending):
            return state
        packs = self._host.store.noted(state.lineage, state.content)
        try:
            chain, _ = unpacked(contents(state.lineage, packs, self._host.store))
        except (PackError, SnapshotError):
            return state
        if content_digest(chain.tree) != state.content:
            return state
        return msgspec.structs.replace(state, packs=packs, pending=[])

    def _restore(self, content: bytes) -> None:
        state = decode_state(content)
        try:
            self._arguments = read_arguments(state.arguments)
        except EnvironmentArgumentError as error:
            raise SnapshotError(str(error)) from None
        self._seed, self._lineage = state.seed, state.lineage
        state = self._newest(state)
        sandbox = self._made()
        try:
            packs = contents(state.lineage, state.packs, self._host.store)
            chain, blocks = unpacked(packs)
            if packs:
                sandbox.load(chain.tree, blocks)
            else:
                self._set_up(sandbox)
            left: list[str] = []
            for each in state.pending:
                asked = parse_action(each.action)
                if isinstance(asked, Action):
                    left = self._ran(asked)[2]
            tree = sandbox.scan()
        except (SandboxLost, PackError, ValueError, EnvironmentArgumentError) as error:
            raise SnapshotError(f"the sandbox cannot be restored: {error}") from None
        if content_digest(tree) != state.content or left != state.processes:
            raise SnapshotError("the sandbox cannot be restored: its repeated actions had other results than before")
        self._checkpoints = Checkpoints(self._host, state, chain, tree, self.figures, content)
        self._state = content

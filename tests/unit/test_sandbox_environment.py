"""The sandbox environment: what a turn changes, what a snapshot gives back, what a command cannot do."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.workers.environments.protocol import EnvironmentArgumentError, SnapshotError
from rose.workers.environments.sandbox.actions import MALFORMED
from rose.workers.environments.sandbox.environment import LOST, SandboxEnvironment
from rose.workers.environments.sandbox.process import SandboxLost
from rose.workers.environments.sandbox.state import MAX_ACTIONS, SandboxState, decode_state, encode_state
from tests.support.sandbox_fixtures import act, begun, needs_sandboxes, restored, run, seen, shell, sleepers, store
from tests.support.waiting import until

pytestmark = needs_sandboxes

__all__ = ["store"]

T = TypeVar("T")

CHANGES: dict[str, tuple[str, dict[str, str | None]]] = {
    "echo one > a": ("files", {"a": "one"}),
    "echo two > b; mkdir -p d; cp b d/b": ("files", {"b": "two", "d/b": "two"}),
    "rm -rf d b": ("files", {"b": None, "d/b": None}),
    "python3 -c 'print(sum(range(9)))'; ls -R > /dev/null": ("nothing", {}),
    "echo x > /tmp/x; rm /tmp/x": ("nothing", {}),
    "chmod 700 a; chmod 600 a; chmod 644 a": ("nothing", {}),
}


@given(commands=st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=6))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_change_is_reported_exactly_when_files_differ(commands: list[str]) -> None:
    environment = begun()
    files: dict[str, str] = {}
    state = b""
    for command in commands:
        before = dict(files), state
        for path, content in CHANGES[command][1].items():
            files.pop(path, None)
            files |= {} if content is None else {path: content}
        step, state = act(environment, command)
        if before[0] != files:
            assert step.info["changed"] == "files" and state != before[1]
        if CHANGES[command][0] == "nothing" and before[1]:
            assert step.info["changed"] == "nothing" and state == before[1]
    again = restored(state)
    for each in (environment, again):
        assert seen(each) == ("\n".join(f"./{path}:{files[path]}" for path in sorted(files)) or "[no output]")
        run(each.close())


@given(
    writes=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 300_000), st.binary(min_size=1, max_size=4)),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_write_through_a_mapping_is_seen_at_every_place(writes: list[tuple[str, int, bytes]]) -> None:
    environment = begun(setup=["for f in a b c; do head -c 300004 /dev/zero > $f; done"])
    contents = {name: bytearray(300_004) for name in "abc"}
    for name, place, written in writes:
        before = bytes(contents[name])
        contents[name][place : place + len(written)] = written
        code = f"import mmap\nf = open('{name}', 'r+b')\nm = mmap.mmap(f.fileno(), 0)\nm[{place}]\n"
        code += f"m[{place} : {place + len(written)}] = {written!r}\n"  # the page is mapped for reading first
        step, state = act(environment, f"cat > /tmp/p <<'E'\n{code}E\npython3 /tmp/p; rm /tmp/p")
        assert (step.info["changed"] == "files") == (before != contents[name])
    again = restored(state)
    assert seen(again, "cat a b c | sha1sum") == seen(environment, "cat a b c | sha1sum")
    run(environment.close())
    run(again.close())


def test_files_of_all_kinds_are_restored() -> None:
    environment = begun(files={"src/main.c": "int main;"})
    command = (
        "ln -s src/main.c link; ln -s /nowhere dangling; ln src/main.c hard; mkfifo pipe; chmod 4711 src/main.c; "
        "mkdir -m 1777 open; touch 'new\nline' $'\\xff'; echo t > /tmp/t; echo s > /dev/shm/s; chmod 000 open"
    )
    _, state = act(environment, command)
    look = "ls -lARn --time-style=+%s . /tmp /dev/shm | grep -v '^total'; cat /tmp/t /dev/shm/s hard"
    look += "; stat -c '%A %u %g' . /tmp /dev/shm; stat -c %i hard src/main.c | uniq | wc -l"
    again = restored(state)
    for each in (environment, again):
        run(each.step(shell("find . /tmp /dev/shm ! -type f -exec touch -h -d @0 {} +")))
    assert seen(again, look) == seen(environment, look)
    run(environment.close())
    run(again.close())


def test_snapshot_of_a_restored_sandbox_is_the_one_that_it_was_restored_from() -> None:
    environment = begun()
    _, state = act(environment, "echo 1 > a")
    again = restored(state)
    assert run(again.snapshot()) == state
    run(environment.close())
    run(again.close())


def test_large_change_is_repeated_until_it_is_saved(store: Path) -> None:
    environment = begun()
    _, state = act(environment, "yes | head -c 400000 > a")
    assert [each.action for each in decode_state(state).pending] == [shell("yes | head -c 400000 > a")]
    _, later = act(environment, "true")
    until(lambda: not decode_state(act(environment, "true")[1]).pending)
    _, saved = act(environment, "true")
    assert decode_state(saved).packs and len(saved) < 1000
    for each in (state, later, saved):
        again = restored(each)
        assert seen(again, "sha1sum < a") == seen(environment, "sha1sum < a")
        run(again.close())
    run(environment.close())


def test_change_that_cannot_be_repeated_is_restored_from_the_store_once_it_is_saved(store: Path) -> None:
    environment = begun()
    _, state = act(environment, "head -c 400000 /dev/urandom > a")
    until(lambda: any(store.glob("*/*.note")))
    again = restored(state)
    assert seen(again, "sha1sum < a") == seen(environment, "sha1sum < a")
    run(environment.close())
    run(again.close())


def test_repetition_with_another_result_is_refused() -> None:
    environment = begun()
    _, state = act(environment, "head -c 400000 /dev/urandom > a")
    run(environment.close())
    with pytest.raises(SnapshotError, match="other results"):
        restored(state)


def test_chain_of_many_changes_keeps_few_packs_and_the_files(store: Path) -> None:
    environment = begun(setup=["head -c 200000 /dev/urandom > base"])
    for number in range(40):
        _, state = act(environment, f"head -c 9000 /dev/urandom > f{number % 5}")
    until(lambda: not decode_state(act(environment, "true")[1]).pending)
    _, state = act(environment, "true")
    assert len(decode_state(state).packs) <= 12
    again = restored(state)
    assert seen(again, "cat base f? | sha1sum") == seen(environment, "cat base f? | sha1sum")
    run(environment.close())
    run(again.close())


def test_process_that_runs_on_is_started_again_with_its_files(tmp_path: Path) -> None:
    environment = begun(files={"page": "hello"})
    step, _ = act(environment, "python3 -m http.server 8000 > /dev/null 2>&1 & sleep 1")
    assert step.info["changed"] == "processes" and "http.server" in step.observation
    act(environment, "echo changed > page")
    _, state = act(environment, "true")
    assert len(decode_state(state).pending) == 3
    fetch = "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/page').read())\""
    run(environment.close())
    again = restored(state)
    assert "changed" in seen(again, fetch)
    step, state = act(again, "pkill -f http.server; sleep 0.2")
    assert decode_state(act(again, "true")[1]).pending == []
    run(again.close())


def test_process_over_too_many_turns_makes_the_state_say_that_it_cannot_be_restored() -> None:
    environment = begun()
    _, state = act(environment, "sleep 1000 &")
    for _ in range(MAX_ACTIONS):
        _, state = act(environment, "true")
    with pytest.raises(SnapshotError, match="would have to be repeated"):
        restored(state)
    act(environment, "pkill sleep")
    _, state = act(environment, "true")
    run(restored(state).close())
    run(environment.close())


def test_path_that_is_too_long_makes_the_state_say_so_until_it_is_removed() -> None:
    environment = begun()
    deep = "import os\nfor _ in range(60): os.mkdir('a' * 100); os.chdir('a' * 100)"
    step, state = act(environment, f'python3 -c "{deep}"')
    assert step.observation == "[no output]"
    with pytest.raises(SnapshotError, match="a path has more than 1024 bytes"):
        restored(state)
    _, state = act(environment, "rm -r aaa*; echo 1 > b")
    again = restored(state)
    assert seen(again) == "./b:1"
    run(again.close())
    run(environment.close())


def test_files_without_a_store_are_restored_up_to_what_a_snapshot_holds() -> None:
    environment = begun()
    act(environment, "head -c 600000 /dev/urandom > a")
    until(lambda: not decode_state(act(environment, "true")[1]).pending)
    _, state = act(environment, "head -c 600000 /dev/urandom > b")
    until(lambda: bool(act(environment, "true")) and environment.figures.in_background > 1)
    with pytest.raises(SnapshotError, match="other results"):
        restored(act(environment, "true")[1])
    _, state = act(environment, "rm b")
    again = restored(state)
    assert seen(again, "cat a | sha1sum") == seen(environment, "cat a | sha1sum")
    run(again.close())
    run(environment.close())


def test_lost_pack_is_named(store: Path) -> None:
    environment = begun()
    act(environment, "head -c 400000 /dev/urandom > a")
    until(lambda: not decode_state(act(environment, "true")[1]).pending)
    _, state = act(environment, "true")
    run(environment.close())
    for each in store.glob("*/*"):
        each.unlink()
    with pytest.raises(SnapshotError, match="cannot be read"):
        restored(state)


@given(state=st.binary(max_size=80))
@settings(max_examples=60)
def test_invalid_snapshot_bytes_are_refused(state: bytes) -> None:
    with pytest.raises(SnapshotError):
        restored(state)


def test_state_with_a_name_that_leads_elsewhere_is_refused() -> None:
    state = SandboxState(seed=1, arguments={}, lineage="../../../../etc/passwd", content=bytes(16))
    with pytest.raises(SnapshotError):
        restored(encode_state(state))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("touch /usr/x", "Read-only"),
        ("chmod 666 /dev/null", "Read-only"),
        ("echo x > /dev/null; echo $?", "0"),
        ("ls /home /root/.ssh /etc/shadow 2>&1 | grep -c 'cannot access'", "3"),
        ("unshare -Ur true", "exit status"),
        ("mount -t tmpfs x /tmp", "exit status"),
        ("python3 -c \"import socket; socket.create_connection(('1.1.1.1', 80), 1)\"", "unreachable"),
        ("kill -9 1; echo alive", "alive"),
        ("cat /proc/1/mem", "denied"),
        ("echo 1 > /proc/sys/kernel/panic", "Read-only"),
        ("grep -c CapEff:.0000000000000000 /proc/self/status", "1"),
        ("head -c 6M /dev/zero > a; head -c 6M /dev/zero > b", "No space"),
        ("head -c 20M /dev/zero > big", "File too large"),
        ("python3 -c 'bytes(3 << 30)'", "MemoryError"),
        ("sleep 100", "ended after 2 s"),
        (":(){ :|:& };:; sleep 1", "too many processes"),
        ("exit 3", "exit status 3"),
        ("true", "no output"),
        ("seq 100000", "bytes left out"),
        ("printf 'a\\0b\\377'", "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_command_meets_the_limits_of_its_sandbox(command: str, says: str) -> None:
    environment = begun(disk_mib=8, command_seconds=2, processes=16)
    assert says in seen(environment, command)
    assert "ok" in seen(environment, "echo ok")
    run(environment.close())


def test_text_without_a_block_is_a_step_that_changes_nothing() -> None:
    environment = begun()
    before = run(environment.snapshot())
    step = run(environment.step("ls"))
    assert (step.observation, step.done) == (MALFORMED, False)
    assert run(environment.snapshot()) == before
    run(environment.close())


@pytest.mark.parametrize(("content", "reward"), [("right", 1.0), ("wrong", 0.0)])
def test_submission_earns_what_the_check_says(content: str, reward: float) -> None:
    environment = begun(check='test "$(cat answer)" = right')
    act(environment, f"echo {content} > answer")
    step = run(environment.step("```submit\n```"))
    assert (step.done, step.reward, step.success) == (True, reward, reward == 1.0)
    run(environment.close())


async def ended_during(call: Coroutine[Any, Any, T], environment: SandboxEnvironment, word: str, times: int = 1) -> T:
    """The result of a call while the environment's sandbox is ended each time that a command sleeps `word` seconds."""
    going = asyncio.ensure_future(call)
    for _ in range(times):
        await asyncio.to_thread(until, lambda: bool(sleepers(word)))
        assert environment.sandbox is not None
        await asyncio.to_thread(environment.sandbox.close)
        await asyncio.to_thread(until, lambda: not sleepers(word) or going.done())
    return await going


def test_check_whose_sandbox_ends_is_repeated() -> None:
    environment = begun(check="sleep 1.0507; test -e right")
    act(environment, "touch right")
    step = run(ended_during(environment.step("```submit\n```"), environment, "1.0507"))
    assert (step.done, step.reward) == (True, 1.0)
    run(environment.close())


def test_check_whose_sandbox_ends_twice_is_no_reward_of_0() -> None:
    environment = begun(check="sleep 1.0508; false")
    with pytest.raises(SandboxLost):
        run(ended_during(environment.step("```submit\n```"), environment, "1.0508", times=2))
    run(environment.close())


def test_sandbox_that_ends_during_setup_does_not_refuse_the_prompt() -> None:
    environment = SandboxEnvironment()
    with pytest.raises(SandboxLost):
        run(ended_during(environment.reset(0, {"setup": ["sleep 5.0509"]}), environment, "5.0509"))
    run(environment.close())


def test_sandbox_that_was_killed_is_made_again_at_the_next_turn() -> None:
    environment = begun()
    act(environment, "echo kept > a")
    assert environment.sandbox is not None
    environment.sandbox.close()
    assert seen(environment, "cat a") == "kept"
    run(environment.close())


def test_sandbox_that_is_killed_by_its_command_says_so_and_keeps_the_earlier_files() -> None:
    environment = begun()
    act(environment, "echo kept > a")

    async def killed() -> str:
        step = asyncio.ensure_future(environment.step(shell("echo lost > a; sleep 5")))
        await asyncio.sleep(0)
        assert environment.sandbox is not None
        await asyncio.to_thread(environment.sandbox.close)
        return (await step).observation

    assert run(killed()) == LOST
    assert seen(environment, "cat a") == "kept"
    run(environment.close())


@pytest.mark.parametrize(
    "arguments",
    [
        {"colour": "red"},
        {"files": {"../a": ""}},
        {"files": {"/a": ""}},
        {"files": {"a": "", "a/b": ""}},
        {"setup": ["exit 1"]},
        {"disk_mib": 0},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    environment = SandboxEnvironment()
    with pytest.raises(EnvironmentArgumentError):
        run(environment.reset(0, arguments))
    run(environment.close())

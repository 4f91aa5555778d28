"""Messages over shared memory: complete, in order, and without any wait."""

import os
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.workers.executor.ipc.shared_memory import (
    HEADER_BYTES,
    LENGTH,
    RingBuffer,
    RingBufferFull,
    SharedMemoryInvalid,
    create_ring_memory,
)

CAPACITY = 64


def ends() -> tuple[RingBuffer, RingBuffer]:
    descriptor = create_ring_memory(CAPACITY, "test")
    writer, reader = RingBuffer(descriptor), RingBuffer(descriptor)
    os.close(descriptor)
    return writer, reader


@given(st.lists(st.one_of(st.binary(max_size=CAPACITY), st.just(None)), max_size=60))
def test_fitting_message_round_trips_and_a_too_large_message_is_refused(actions: list[bytes | None]) -> None:
    """None lets the reader read."""
    writer, reader = ends()
    expected: list[bytes] = []
    for action in actions:
        if action is None:
            assert bool(reader) == bool(expected)
            assert list(reader.read()) == expected
            expected.clear()
            continue
        room = CAPACITY - sum(LENGTH.size + len(message) for message in expected)
        if LENGTH.size + len(action) <= room:
            writer.write(action)
            expected.append(action)
        else:
            with pytest.raises(RingBufferFull):
                writer.write(action)
    assert list(reader.read()) == expected


def test_another_process_reads_while_this_one_writes() -> None:
    descriptor = create_ring_memory(1 << 16, "test")
    there, back = RingBuffer(descriptor), create_ring_memory(1 << 16, "back")
    count = 20_000
    child = os.fork()
    if child == 0:
        mine, answers, seen = RingBuffer(descriptor), RingBuffer(back), 0
        while seen < count:
            for message in mine.read():
                assert message == b"%d" % seen * (seen % 50)
                seen += 1
        answers.write(b"%d" % seen)
        os._exit(0)
    for number in range(count):
        while True:
            try:
                there.write(b"%d" % number * (number % 50))
                break
            except RingBufferFull:
                os.sched_yield()
    assert os.waitpid(child, 0)[1] == 0
    assert list(RingBuffer(back).read()) == [b"%d" % count]


def test_memory_that_may_shrink_is_refused_as_a_ring_buffer() -> None:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, HEADER_BYTES + CAPACITY)
    with pytest.raises(SharedMemoryInvalid):
        RingBuffer(descriptor)
    os.close(descriptor)
    descriptor = create_ring_memory(CAPACITY, "test")
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


@given(st.binary(min_size=HEADER_BYTES + CAPACITY, max_size=HEADER_BYTES + CAPACITY))
def test_reading_a_ring_buffer_of_any_bytes_terminates(content: bytes) -> None:
    descriptor = create_ring_memory(CAPACITY, "test")
    os.pwrite(descriptor, content, 0)
    line = RingBuffer(descriptor)
    os.close(descriptor)
    with suppress(SharedMemoryInvalid):
        assert sum(LENGTH.size + len(message) for message in line.read()) <= CAPACITY

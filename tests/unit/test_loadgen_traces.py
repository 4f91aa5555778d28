"""Traces of the co-serving benchmark, and the requests made from them."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.workers.loadgen.traces import BLOCK_TOKENS, Arrival, TraceError, TraceScaling, read_trace, scale_requests

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:04.0319600,110,27"""
"""The format of the originals: seven digits of a second, and no final newline."""

MOONCAKE = """{"timestamp": 40, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]}
{"timestamp": 40, "input_length": 600, "output_length": 4, "hash_ids": [0, 7]}
{"timestamp": 2540, "input_length": 1600, "output_length": 3, "hash_ids": [0, 1, 2, 3]}
"""

SHAPE = TraceScaling(prompt_divisor=16, output_divisor=2, longest=2048, vocabulary=99)


def written(folder: Path, text: str) -> str:
    file = folder / "trace"
    file.write_text(text)
    return str(file)


def shared(one: list[int], other: list[int]) -> int:
    """Return the number of leading tokens that two prompts have in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_azure_trace_gives_arrival_times_and_lengths(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path, AZURE), first=0, count=3)
    assert [each.at for each in found] == pytest.approx([0.0, 0.052, 60.052])
    assert [(each.prompt_tokens, each.output_tokens) for each in found] == [(4808, 10), (3180, 8), (110, 27)]


def test_slice_begins_at_its_own_first_arrival(tmp_path: Path) -> None:
    taken = read_trace(written(tmp_path, AZURE), first=1, count=2)
    assert [arrival.at for arrival in taken] == [0.0, pytest.approx(60.0)]


def test_mooncake_trace_also_gives_blocks(tmp_path: Path) -> None:
    taken = read_trace(written(tmp_path, MOONCAKE), first=0, count=3)
    assert [arrival.at for arrival in taken] == [0.0, 0.0, 2.5]
    assert taken[1] == Arrival(at=0.0, prompt_tokens=600, output_tokens=4, blocks=(0, 7))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no trace that is known"),
        ("a,b,c\n1,2,3", "no trace that is known"),
        (AZURE.replace("3180", "x"), "line 3: invalid literal"),
        (AZURE.replace(",3180", ""), "line 3: not enough values"),
        (AZURE.replace("3180", "0"), "line 3: a request has at least one token"),
        (AZURE.replace("2023-11-16 18:17:04.0319600", "yesterday"), "line 3: Invalid isoformat"),
        (AZURE.replace("18:18:04", "18:17:00") + "\n2023-11-16 18:19:00,5,5", "goes back in time"),
        (AZURE + "\n" * 2 + "{}", "line 5: not enough values"),
        (MOONCAKE.replace("[0, 7]", "[0]"), "line 2: 600 tokens are not 1 blocks of 512"),
        (MOONCAKE.replace('"output_length": 4', '"output_length": -4'), "line 2: Expected `int` >= 1"),
        (MOONCAKE + MOONCAKE[:40], "line 4: "),
        ("".join(AZURE.splitlines(keepends=True)[:2]), "there are no 4 from number 0 on"),
        (AZURE.splitlines()[0] + "\n2023-11-16 18:17:03,5,5" * 4, "come at one moment"),
    ],
)
def test_invalid_trace_is_refused_in_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(TraceError) as refused:
        read_trace(written(tmp_path, text), first=0, count=4)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_trace_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read the trace"):
        read_trace(str(tmp_path / "nowhere"), first=0, count=1)


def test_prompts_share_exactly_the_tokens_of_shared_blocks(tmp_path: Path) -> None:
    first, second, third = scale_requests(read_trace(written(tmp_path, MOONCAKE), first=0, count=3), SHAPE).requests
    block = BLOCK_TOKENS // SHAPE.prompt_divisor
    assert [len(each.prompt) for each in (first, second, third)] == [69, 38, 100]
    assert block <= shared(first.prompt, second.prompt) < block + 5
    assert shared(first.prompt, third.prompt) == len(first.prompt)


def test_prompts_of_a_trace_without_blocks_share_nothing(tmp_path: Path) -> None:
    requests = scale_requests(read_trace(written(tmp_path, AZURE), first=0, count=3), SHAPE).requests
    assert shared(requests[0].prompt, requests[1].prompt) < 5


arrivals = st.lists(
    st.builds(
        Arrival,
        at=st.floats(0, 1000),
        prompt_tokens=st.integers(1, 100_000),
        output_tokens=st.integers(1, 5000),
    ),
    min_size=1,
    max_size=5,
)


@given(arrivals, st.integers(1, 64), st.integers(1, 64), st.floats(0.01, 100))
def test_compressed_slice_fits_the_engine_and_keeps_its_order(
    taken: list[Arrival], prompt_divisor: int, output_divisor: int, pace: float
) -> None:
    taken.sort(key=lambda arrival: arrival.at)
    shape = TraceScaling(prompt_divisor=prompt_divisor, output_divisor=output_divisor, longest=300, vocabulary=99)
    work = scale_requests(taken, shape)
    short = 0
    for arrival, request in zip(taken, work.requests, strict=True):
        assert request.tokens >= 1
        assert request.prompt
        assert len(request.prompt) + request.tokens <= shape.longest
        assert all(3 <= token < shape.vocabulary for token in request.prompt)
        short += len(request.prompt) < arrival.prompt_tokens / prompt_divisor
    assert work.truncated == short
    assert work == scale_requests(taken, shape)
    played = work.at_pace(pace).requests
    assert all(one.at <= other.at for one, other in pairwise(played))
    assert played[-1].at == pytest.approx(taken[-1].at / pace)

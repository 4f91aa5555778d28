"""The cost model of the simulator: its laws, its shipped profiles, and the refusals of a profile."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.simulation.cost_model import (
    PROFILES,
    CostModel,
    load_profile,
    profile_names,
    read_profile,
    write_profile,
)
from rose.schemas.errors import UsageError

MODELS = [load_profile(name) for name in profile_names()]

models = st.sampled_from(MODELS)
requests = st.integers(0, 1500)
tokens = st.integers(0, 200_000)
chunk = st.tuples(st.integers(1, 9000), tokens)
chunks = st.lists(chunk, max_size=4)


@given(models, requests, tokens)
def test_step_without_chunks_takes_what_its_terms_give(model: CostModel, decoding: int, context: int) -> None:
    fixed, token_seconds = model.decode_terms(decoding)
    assert model.step_seconds(decoding=decoding, context_tokens=context) == fixed + token_seconds * context


@given(models, requests, tokens, chunks, st.integers(1, 500))
def test_step_with_more_work_takes_no_less_time(
    model: CostModel, decoding: int, context: int, prefill: list[tuple[int, int]], more: int
) -> None:
    seconds = model.step_seconds(decoding=decoding, context_tokens=context, chunks=prefill)
    assert seconds > 0
    larger = [
        model.step_seconds(decoding=decoding + more, context_tokens=context, chunks=prefill),
        model.step_seconds(decoding=decoding, context_tokens=context + more, chunks=prefill),
        model.step_seconds(decoding=decoding, context_tokens=context, chunks=[*prefill, (more, more)]),
    ]
    if prefill:
        (new, before), *others = prefill
        longer = [(new + more, before), *others], [(new, before + more), *others]
        larger += [model.step_seconds(decoding=decoding, context_tokens=context, chunks=each) for each in longer]
    assert min(larger) >= seconds * (1 - 1e-12)


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profile_names_its_sources_and_holds_its_own_file(name: str) -> None:
    text = (PROFILES / f"{name}.toml").read_text(encoding="utf-8")
    tables = {key: value for key, value in tomllib.loads(text).items() if isinstance(value, dict)}
    assert all(len(table["source"]) > 10 for table in tables.values())
    assert read_profile(name).name == name
    assert write_profile(read_profile(name)) == text


def test_h100_profile_takes_the_step_times_of_the_published_tables() -> None:
    """The figures are of NVIDIA's kernels, composed elsewhere without this model, with the fitted host in both."""
    model = load_profile("qwen3-8b-h100-tp1")
    for requests, context, milliseconds in ((1, 1024, 7.7), (16, 4096, 12.8), (64, 2048, 17.8), (256, 1024, 34.5)):
        seconds = model.step_seconds(decoding=requests, context_tokens=requests * context)
        assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.1)
    assert model.prefill_tokens_per_second == pytest.approx(51_000, rel=0.05)


def test_slower_nvlink_costs_only_what_is_reduced_over_several_cards() -> None:
    def seconds(name: str) -> float:
        return load_profile(name).step_seconds(decoding=64, context_tokens=64 * 4096)

    assert seconds("qwen3-8b-h800-tp1") == seconds("qwen3-8b-h100-tp1")
    assert 1.02 < seconds("qwen3-32b-h800-tp4") / seconds("qwen3-32b-h100-tp4") < 1.2


def test_short_chunk_reads_its_context_as_a_decoding_request_does() -> None:
    model = load_profile("qwen3-8b-h100-tp1")
    read = 100_000 * model.decode_terms(1)[1]
    added = model.step_seconds(decoding=0, context_tokens=0, chunks=[(1, 100_000)]) - model.step_seconds(
        decoding=0, context_tokens=0, chunks=[(1, 0)]
    )
    assert added == pytest.approx(read)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("layers = 36", "layers = 0", "layers"),
        ("layers = 36\n", "", "layers"),
        ("[host]", "speed = 3\n[host]", "speed"),
        ("block_tokens = 16", "block_tokens = 1.5", "block_tokens"),
        ("counts = [1, 2,", "counts = [2, 1,", "must rise"),
        ("counts = [1, 2,", "counts = [1,", "as many seconds"),
        ("[host]", "[host", "not TOML"),
    ],
)
def test_damaged_profile_is_refused_in_one_sentence(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = (PROFILES / "qwen3-8b-h100-tp1.toml").read_text(encoding="utf-8")
    assert old in text
    file = tmp_path / "own.toml"
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UsageError, match=words) as refused:
        load_profile(file)
    assert "own.toml" in str(refused.value) and "\n" not in str(refused.value)


def test_unknown_profile_is_refused_with_the_names_of_the_others(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="qwen3-8b-h800-tp1"):
        load_profile("qwen3-8b")
    with pytest.raises(UsageError, match="cannot be read"):
        load_profile(tmp_path / "none.toml")

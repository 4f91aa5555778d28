"""The fit of a cost model to rows: constants are recovered, and errors are of rows that were not fitted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.simulation.calibration import Fit, Row, apply, calibrate, read_rows, tpot_seconds
from rose.pipeline.simulation.cost_model import CostModel, Profile, read_profile
from rose.schemas.errors import UsageError

SIZES = (2, 4, 8)
PROFILES = {size: read_profile(f"qwen3-32b-h100-tp{size}") for size in SIZES}


def rows_of(profile: Profile, noise: float = 0.0) -> list[Row]:
    """Return rows that a server of this profile has, every other one slower by `noise` and the rest faster."""
    rows: list[Row] = []
    model = CostModel.of(profile)
    for prompt in (512, 1024, 4096):
        for answer in (128, 1024):
            for batch in (1, 8, 16, 32):
                row = Row(tp=profile.tensor_parallel, isl=prompt, osl=answer, batch=batch, tpot_ms=1.0)
                seconds = tpot_seconds(model, row) * (1 + noise * (-1) ** len(rows))
                rows.append(Row(row.tp, row.isl, row.osl, row.batch, seconds * 1e3))
    return rows


@given(st.floats(0, 0.01), st.floats(0, 0.001))
def test_host_of_a_server_is_recovered(step: float, sequence: float) -> None:
    rows = [row for profile in PROFILES.values() for row in rows_of(apply(profile, Fit(step, sequence)))]
    found = calibrate(list(PROFILES.values()), rows)
    assert found.fit.step_seconds == pytest.approx(step, abs=1e-8)
    assert found.fit.sequence_seconds == pytest.approx(sequence, abs=1e-9)
    assert found.held_out.largest < 1e-4 and found.without_size.keys() == set(SIZES)


def test_factors_of_another_card_are_recovered_only_when_they_are_fitted() -> None:
    wanted = Fit(0.002, 0.00003, memory_factor=0.7, compute_factor=1.8)
    rows = rows_of(apply(PROFILES[4], wanted))
    found = calibrate([PROFILES[4]], rows, factors=True)
    assert found.fit.memory_factor == pytest.approx(0.7, rel=1e-4)
    assert found.fit.compute_factor == pytest.approx(1.8, rel=1e-4)
    assert found.fit.step_seconds == pytest.approx(0.002, rel=1e-3)
    assert found.held_out.largest < 1e-4 < 0.05 < calibrate([PROFILES[4]], rows).held_out.largest


def test_no_constant_of_a_server_faster_than_the_kernels_is_negative() -> None:
    fast = [Row(row.tp, row.isl, row.osl, row.batch, row.tpot_ms / 2) for row in rows_of(PROFILES[4])]
    found = calibrate([PROFILES[4]], fast)
    assert (found.fit.step_seconds, found.fit.sequence_seconds) == (0.0, 0.0)
    assert found.held_out.bias > 0.1


def test_held_out_errors_do_not_depend_on_the_rows_that_they_are_of() -> None:
    """A row that is held out is changed: the error changes by as much, so the fit has not seen the row."""
    rows = sorted(rows_of(PROFILES[4], noise=0.02))
    wrong = [Row(rows[0].tp, rows[0].isl, rows[0].osl, rows[0].batch, rows[0].tpot_ms / 2), *rows[1:]]
    before, after = calibrate([PROFILES[4]], rows).held_out, calibrate([PROFILES[4]], wrong).held_out
    assert before.largest < 0.05
    assert after.largest == pytest.approx(1.0, abs=0.1)
    assert after.bias - before.bias == pytest.approx(1 / before.rows, abs=0.005)
    assert calibrate([PROFILES[4]], reversed(wrong)) == calibrate([PROFILES[4]], wrong)


def test_rows_that_queue_or_have_no_profile_are_left_out_and_counted() -> None:
    rows = rows_of(PROFILES[4])
    room = PROFILES[4].memory.kv_cache_tokens
    strange = [Row(4, 4096, 64, room // 4096, 900.0), Row(2, 512, 64, 8, 900.0), Row(2, 512, 64, 4, 900.0)]
    found = calibrate([PROFILES[4]], rows + strange)
    assert (found.queued, found.other_sizes) == (1, 2)
    assert found.fit == calibrate([PROFILES[4]], rows).fit


def test_too_few_rows_and_two_profiles_of_a_size_are_refused() -> None:
    with pytest.raises(UsageError, match="5 rows can be fitted, and at least 6"):
        calibrate([PROFILES[4]], rows_of(PROFILES[4])[:5])
    with pytest.raises(UsageError, match="same tensor parallel size"):
        calibrate([PROFILES[4], PROFILES[4]], rows_of(PROFILES[4]))


def test_rows_are_read_by_either_name_of_a_column_and_only_where_all_is_given() -> None:
    lines = [
        "backend,isl,osl,batch_size,tp_size,silicon_tpot_ms",
        "vllm,1024,128,8,4.0,12.5",
        "vllm,1024,128,,4.0,12.5",
        "sglang,1024,128,8,4.0,12.5",
    ]
    assert read_rows(lines, "a.csv", {"backend": "vllm"}) == [Row(4, 1024, 128, 8, 12.5)]
    assert len(read_rows(lines, "a.csv", {})) == 2


@pytest.mark.parametrize(
    ("lines", "where", "words"),
    [
        (["isl,osl,batch,tp", "1,2,3,4"], {}, "no column tpot_ms"),
        (["isl,osl,batch,tp,tpot_ms"], {"system": "h100"}, "no column system"),
        (["isl,osl,batch,tp,tpot_ms", "10,20,1,1,5", "ten,20,1,1,5"], {}, "line 3"),
        (["isl,osl,batch,tp,tpot_ms", "10,20,1,1,-5"], {}, "tpot_ms"),
        ([], {}, "no column isl"),
    ],
)
def test_unreadable_rows_are_refused(lines: list[str], where: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_rows(lines, "rows.csv", where)

"""`rose calibrate`: fits a cost model to measured latencies, from a file or from a server of the user's."""

import csv
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from rose.pipeline.config.options import is_writable
from rose.pipeline.simulation.calibration import Calibration, Errors, apply, calibrate, read_rows
from rose.pipeline.simulation.cost_model import Profile, read_profile, write_profile
from rose.pipeline.terminal import print_line
from rose.schemas.errors import UsageError

BATCHES, LENGTHS = (1, 4, 16, 64), ((64, 64), (256, 64), (1024, 64), (1024, 256), (4096, 128))
"""Loads of a sweep: requests at a time, and (prompt tokens, answer tokens)."""

SWEEP_SEED = 0
"""Seed of a sweep's prompts."""

FACTORED = ("linear", "output", "decode_attention", "prefill_attention")
"""Tables of a profile that the two factors change."""

HEADER = ("isl", "osl", "batch", "tp", "ttft_ms", "tpot_ms")
"""First line of a sweep's file."""


def calibrate_profiles(
    rows: Path,
    names: Sequence[str],
    where: Sequence[str],
    *,
    server: str | None,
    model: str | None,
    factors: bool,
    out: Path | None,
    output: Path | None,
) -> None:
    """`rose calibrate`. Raises UsageError for options that contradict each other and for unreadable rows.

    Args:
        rows: CSV file; with `server`, the file that is written.
        names: Profiles to start from, one for each tensor parallel size.
        where: COLUMN=VALUE, conditions for rows.
        server: URL of a server to measure; None to read the rows.
        model: Name of the model at the server; None for the first.
        factors: Whether the kernels' seconds are fitted too.
        out: File for the calibrated profile.
        output: File for the result, as JSON.
    """
    for option, file in (("--out", out), ("--json", output)):
        if file is not None and not is_writable(file):
            raise UsageError(f"{option} {file} cannot be written: name a file, in a folder that is there")
    profiles = [read_profile(name) for name in names]
    if len(profiles) > 1 and (out is not None or server is not None):
        raise UsageError("--out and --server are for one profile: give one --profile")
    wanted = dict(map(_condition, where))
    if server is not None:
        _measure(server, model, profiles[0], rows)
    try:
        with rows.open(newline="", encoding="utf-8") as lines:
            measured = read_rows(lines, str(rows), wanted)
    except OSError as error:
        raise UsageError(f"{rows} cannot be read: {error.strerror}") from None
    found = calibrate(profiles, measured, factors=factors)
    for line in describe(found):
        print_line(line)
    if output is not None:
        output.write_bytes(msgspec.json.format(msgspec.json.encode(asdict(found)), indent=2) + b"\n")
    if out is not None:
        out.write_text(write_profile(calibrated(profiles[0], found, rows.name, out.stem)), encoding="utf-8")


def _condition(text: str) -> tuple[str, str]:
    column, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--where {text}: write COLUMN=VALUE, as in system=h100_sxm")
    return column, value


def _measure(server: str, model: str | None, profile: Profile, file: Path) -> None:
    """Sweep over a server and write its rows to a new file, each as soon as it is measured."""
    from rose.workers.loadgen.sweep import Latency, Point, sweep

    room = profile.memory.kv_cache_tokens
    points = [Point(batch, *lengths) for lengths in LENGTHS for batch in BATCHES if batch * sum(lengths) <= room]
    try:
        rows = file.open("x", newline="", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be made for the sweep's rows: {error.strerror}") from None
    with rows:
        writer = csv.writer(rows)
        writer.writerow(HEADER)

        def on_point(point: Point, latency: Latency) -> None:
            ttft_ms, tpot_ms = latency.ttft_seconds * 1e3, latency.tpot_seconds * 1e3
            size = profile.tensor_parallel
            writer.writerow((point.prompt, point.answer, point.batch, size, f"{ttft_ms:.4f}", f"{tpot_ms:.5f}"))
            rows.flush()
            sys.stderr.write(
                f"{point.batch} at a time, {point.prompt} + {point.answer} tokens: "
                f"TTFT {ttft_ms:.1f} ms, TPOT {tpot_ms:.2f} ms\n"
            )

        sweep(server, model, points, seed=SWEEP_SEED, on_point=on_point)


def calibrated(profile: Profile, found: Calibration, rows: str, name: str) -> Profile:
    """Return the profile with the fitted figures; the source of each changed table names the file of the rows."""
    replace, fit = msgspec.structs.replace, found.fit
    fitted = apply(profile, fit)
    source = f"fitted on {found.before.rows} rows of {rows}; on rows that were not fitted, {_shares(found.held_out)}"
    fitted = replace(fitted, name=name, host=replace(fitted.host, source=source))
    if (fit.memory_factor, fit.compute_factor) == (1.0, 1.0):
        return fitted
    scaled = f"; memory times {fit.memory_factor:.3f} and compute times {fit.compute_factor:.3f}, fitted on {rows}"
    tables = {table: getattr(fitted, table) for table in FACTORED}
    return replace(fitted, **{table: replace(each, source=each.source + scaled) for table, each in tables.items()})


def describe(found: Calibration) -> list[str]:
    """Return the lines that `rose calibrate` prints."""
    fit = found.fit
    lines = [
        f"host: {fit.step_seconds * 1e3:.3f} ms a step, {fit.sequence_seconds * 1e3:.4f} ms for each request of a step",
        f"factors: memory {fit.memory_factor:.2f}, compute {fit.compute_factor:.2f}",
        f"the time per output token of {found.before.rows} rows before the fit: {_shares(found.before)}",
        f"{found.held_out.rows} rows that were not fitted: {_shares(found.held_out)}",
    ]
    lines += [
        f"{errors.rows} rows of tensor parallel size {size}, fitted on the other sizes: {_shares(errors)}"
        for size, errors in found.without_size.items()
    ]
    if found.queued:
        lines.append(f"left out: {found.queued} rows whose requests do not fit into the KV cache together")
    if found.other_sizes:
        lines.append(f"left out: {found.other_sizes} rows of a tensor parallel size without a profile")
    return lines


def _shares(errors: Errors) -> str:
    return f"median error {errors.median:.1%}, 90th percentile {errors.p90:.1%}, largest {errors.largest:.1%}"

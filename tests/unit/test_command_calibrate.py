"""`rose calibrate`: rows from a file, and rows of a sweep over a server."""

import asyncio
import csv
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rose.pipeline.cli.calibrate import BATCHES, LENGTHS, calibrate_profiles
from rose.pipeline.simulation.calibration import Fit, Row, apply, tpot_seconds
from rose.pipeline.simulation.cost_model import CostModel, load_profile, read_profile
from rose.schemas.errors import RoseError, UsageError
from rose.workers.loadgen.sweep import COUNTED, MOST_TOKEN
from tests.support.roles import rose

BASE = "qwen3-8b-h100-tp1"

STEP_SECONDS = 0.001


class Server:
    """Streams the requested number of tokens, one in each STEP_SECONDS."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_running = 0
        self.fails_at: int | None = None

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "first", "max_model_len": 320}, {"id": "second"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if len(self.bodies) == self.fails_at:
            return web.Response(status=503, text="no room")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        response = web.StreamResponse()
        await response.prepare(request)
        for token in range(body["max_tokens"]):
            await asyncio.sleep(STEP_SECONDS)
            if token + 1 == body["max_tokens"]:
                self.running -= 1
            chunk = {"choices": [{"token_ids": [token]}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        return response


@asynccontextmanager
async def answering(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield site.name
    await runner.cleanup()


async def calibrated(
    rows: Path, *names: str, server: str | None = None, model: str | None = None, out: Path | None = None
) -> None:
    await asyncio.to_thread(
        calibrate_profiles, rows, names, (), server=server, model=model, factors=False, out=out, output=None
    )


async def test_sweep_is_a_closed_loop_over_each_load_that_the_model_has_room_for(tmp_path: Path) -> None:
    server, rows = Server(), tmp_path / "rows.csv"
    async with answering(server) as url:
        await calibrated(rows, BASE, server=url)
    with rows.open(encoding="utf-8") as lines:
        read = [(int(row["batch"]), int(row["isl"]), int(row["osl"])) for row in csv.DictReader(lines)]
    assert read == [(batch, *lengths) for lengths in LENGTHS if sum(lengths) <= 320 for batch in BATCHES]
    assert server.most_running == max(BATCHES)
    assert len(server.bodies) == sum(batch * (1 + COUNTED) for batch, _, _ in read)
    prompts: list[tuple[int, ...]] = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts) and max(map(max, prompts)) <= MOST_TOKEN
    assert {body["model"] for body in server.bodies} == {"first"}
    _, osl = LENGTHS[0]
    begun = [body["max_tokens"] for body in server.bodies[3 + 12 : 3 + 12 + 16]]
    assert begun == [osl * (place + 1) // 16 for place in range(16)], "clients begin out of step"


async def test_failed_request_or_unknown_model_ends_the_sweep_with_a_sentence(tmp_path: Path) -> None:
    server = Server()
    server.fails_at = 5
    async with answering(server) as url:
        with pytest.raises(RoseError, match="no room"):
            await calibrated(tmp_path / "rows.csv", BASE, server=url)
        with pytest.raises(RoseError, match="first, second"):
            await calibrated(tmp_path / "others.csv", BASE, server=url, model="third")
        with pytest.raises(UsageError, match="cannot be made"):
            await calibrated(tmp_path / "rows.csv", BASE, server=url)
    with pytest.raises(RoseError, match="start the server"):
        await calibrated(tmp_path / "more.csv", BASE, server=url)


def rows_file(folder: Path, fit: Fit) -> Path:
    """Write the rows that a server with this host has."""
    model, file = CostModel.of(apply(read_profile(BASE), fit)), folder / "rows.csv"
    with file.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines)
        writer.writerow(("engine", "isl", "osl", "batch", "tp", "tpot_ms"))
        for isl in (512, 2048):
            for batch in (1, 4, 16, 64):
                row = Row(tp=1, isl=isl, osl=128, batch=batch, tpot_ms=1.0)
                writer.writerow(("mine", isl, 128, batch, 1, tpot_seconds(model, row) * 1e3))
        writer.writerow(("other", 512, 128, 1, 1, 5000.0))
    return file


def test_command_writes_a_profile_that_it_can_start_from_again(tmp_path: Path) -> None:
    rows, out, result = rows_file(tmp_path, Fit(0.004, 0.0001)), tmp_path / "mine.toml", tmp_path / "result.json"
    options = ("--profile", BASE, "--where", "engine=mine", "--out", str(out), "--json", str(result))
    done = rose("calibrate", str(rows), *options)
    assert done.returncode == 0, done.stderr
    assert "4.000 ms a step" in done.stdout and "3 rows that were not fitted" in done.stdout
    assert json.loads(result.read_bytes())["fit"]["sequence_seconds"] == pytest.approx(0.0001, rel=1e-3)
    assert load_profile(out).name == "mine"
    assert load_profile(out).decode_terms(1)[0] > load_profile(BASE).decode_terms(1)[0]
    assert "rows.csv" in read_profile(out).host.source and "rows.csv" not in read_profile(out).linear.source
    again = rose("calibrate", str(rows), "--profile", str(out), "--where", "engine=mine")
    assert "8 rows before the fit: median error 0.0%" in again.stdout


def test_every_table_that_the_factors_change_names_the_rows_as_a_source(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    slower = Fit(0.004, 0.0001, memory_factor=1.5, compute_factor=0.8)
    rows = rows_file(tmp_path, slower)
    with rows.open("a", encoding="utf-8") as file:  # four figures need more rows than two
        model = CostModel.of(apply(read_profile(BASE), slower))
        for batch in (2, 8, 32, 48):
            row = Row(tp=1, isl=1024, osl=256, batch=batch, tpot_ms=1.0)
            file.write(f"mine,1024,256,{batch},1,{tpot_seconds(model, row) * 1e3}\n")
    done = rose("calibrate", str(rows), "--profile", BASE, "--where", "engine=mine", "--factors", "--out", str(out))
    assert "memory 1.50, compute 0.80" in done.stdout, done.stderr
    before, after = read_profile(BASE), read_profile(out)
    assert after.linear.seconds != before.linear.seconds and "rows.csv" in after.linear.source
    changed = {each.source for each in (after.output, after.decode_attention, after.prefill_attention)}
    assert all("rows.csv" in source for source in changed) and "rows.csv" not in after.memory.source


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--profile", BASE, "--where", "engine"), "COLUMN=VALUE"),
        (("--profile", BASE, "--model", "mine"), "--server"),
        (("--profile", BASE, "--out", "/none/mine.toml"), "--out"),
        (("--profile", BASE, "--profile", "qwen3-32b-h100-tp4", "--out", "mine.toml"), "one --profile"),
        (("--profile", "qwen4"), "there is no profile qwen4"),
        (("--profile", BASE, "--where", "engine=third"), "0 rows can be fitted"),
    ],
)
def test_contradictory_options_are_refused(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    done = rose("calibrate", str(rows_file(tmp_path, Fit(0.004, 0.0001))), *options)
    assert done.returncode == 2
    assert done.stderr.startswith("rose: ") and words in done.stderr and "Traceback" not in done.stderr

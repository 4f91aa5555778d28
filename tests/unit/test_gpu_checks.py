"""The runner of the checks on a GPU: failures of a check, what is run again, and a dry run of two checks."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.catalog import CHECKS, Entry
from bench.gpu.runner import read_results, run_checks

FAKES = {
    name: Entry(f"tests.support.gpu_checks:{name}", 2 if name == "hangs" else 60)
    for name in ("crashes", "hangs", "raises", "lacks", "works")
}
FOUND = {"crashes": "failed", "hangs": "timeout", "raises": "failed", "lacks": "unavailable", "works": "done"}


def names_in(file: Path) -> list[str]:
    return [json.loads(line)["name"] for line in file.read_text(encoding="utf-8").splitlines()]


def test_check_that_crashes_or_hangs_is_reported_and_does_not_stop_others(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    found = run_checks(FAKES, FAKES, results=results, seconds=200, dry=True)
    assert {name: result.state for name, result in found.items()} == FOUND
    assert found["crashes"].rows == [{"measured": 1}]
    assert "status -11" in found["crashes"].reason
    assert found["raises"].reason == "RuntimeError: no kernel image is available"
    assert found["lacks"].reason == "no CUDA GPU is here"
    assert [(check.value, check.met) for check in found["works"].checks] == [(3.0, False)]
    assert read_results(results, dry=True) == found


def test_second_run_skips_results_and_runs_failed_checks_last(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    run_checks(FAKES, ["works", "raises"], results=results, seconds=200, dry=True)
    with results.open("a", encoding="utf-8") as file:
        file.write('{"name": "cut\n')
    run_checks(FAKES, ["raises", "works", "lacks"], results=results, seconds=200, dry=True)
    results.write_text(results.read_text(encoding="utf-8").replace('{"name": "cut\n', ""), encoding="utf-8")
    assert names_in(results) == ["works", "raises", "lacks", "raises"]


def test_dry_run_does_not_count_for_a_gpu(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    run_checks(FAKES, ["works"], results=results, seconds=200, dry=True)
    assert read_results(results, dry=False) == {}


def test_check_does_not_begin_when_the_time_is_over(tmp_path: Path) -> None:
    assert run_checks(FAKES, FAKES, results=tmp_path / "results.jsonl", seconds=1, dry=True) == {}


@pytest.mark.parametrize("name", CHECKS)
def test_check_says_what_it_decides(name: str) -> None:
    module, _, function = CHECKS[name].function.partition(":")
    assert getattr(importlib.import_module(module), function).__doc__.startswith(f"{name}: decides ")


LACKING = "blake3", "confluent_kafka", "cryptography", "faust", "noida_db", "pydantic_settings", "structlog"
"""Packages of the product that a machine with torch, msgspec and typer does not have."""

TELL_LOADED = """
import atexit, os, sys
def tell():
    with open(os.environ["LOADED"], "a", encoding="utf-8") as file:
        file.writelines(name + "\\n" for name in sys.modules)
atexit.register(tell)
"""


@pytest.mark.slow
def test_dry_run_of_two_checks_prints_one_object_and_needs_torch_and_msgspec_alone(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TELL_LOADED, encoding="utf-8")
    loaded = tmp_path / "loaded"
    line = ["--dry-run", "--only", "B,C", "--json", "-", "--results", str(tmp_path / "results.jsonl")]
    ran = subprocess.run(
        [sys.executable, "-m", "bench.gpu", *line],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "LOADED": str(loaded)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert [(result["name"], result["state"]) for result in found["results"]] == [("B", "done"), ("C", "done")]
    assert found["results"][0]["rows"][0]["errno"] == "none"
    assert [(check["name"], check["value"]) for check in found["checks"]] == [("in_place_logits_off", 0)]
    names = set(loaded.read_text(encoding="utf-8").split())
    assert {"torch", "transformers", "msgspec"} <= names
    assert names.isdisjoint(LACKING)

"""`rose simulate`: what it refuses before it simulates, what it prints and writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rose.pipeline.cli import simulate
from rose.pipeline.cli.simulate import Outputs, simulate_all, simulate_one
from rose.schemas.errors import UsageError
from tests.support.simulated_scenario import TINY, write_scenario

ROOT = Path(__file__).parents[2]

HEAVY = {"torch", "vllm", "transformers", "plotly"}


def rose(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rose.pipeline.cli.main", "simulate", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("change", "to", "words"),
    [
        ("count = 3", "count = 3\nspeed = 3", ("arm rose", "speed", "lending")),
        ("busy = 0.2", "busy = 1.2", ("arm rose", "busy")),
        ('how = "none"', 'how = "sometimes"', ("arm fixed", "elastic.how")),
        ("max_turns = 4", "max_turns = 4.5", ("arm rose", "max_turns")),
        ("turns = 3", "turns = 3\ncontext_tokens = 2000", ("arm rose", "context_tokens")),
        ("fixed = 1.31", "fixd = 1.31", ("paper.fixd", "no arm")),
        ("[arms.rose]", "[arms.rose", ("no TOML",)),
        ('serving_profile = "qwen3-8b-h800-tp1"', 'serving_profile = "qwen4"', ("qwen4",)),
    ],
)
def test_scenario_with_a_wrong_field_is_refused_in_one_sentence(
    change: str, to: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    assert change in TINY
    ran = rose(write_scenario(tmp_path, text=TINY.replace(change, to, 1)))
    assert ran.returncode == 2, ran.stderr
    assert ran.stdout == ""
    (line,) = ran.stderr.splitlines()
    assert line.startswith("rose: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give a scenario"),
        (("tiny.toml", "--all"), "give a scenario"),
        (("none.toml",), "cannot be read"),
        (("tiny.toml", "--arm", "best"), "has no arm best: it has rose, fixed, spot"),
        (("--all", "--scenarios", "empty"), "there is no scenario in"),
        (("--all", "--arm", "rose"), "name the scenario"),
        (("--all", "--trace", "trace.json"), "name the scenario"),
        (("--all", "--report", "page.html"), "name the scenario"),
        (("tiny.toml", "--json", "none/figures.json"), "--json"),
        (("tiny.toml", "--turns", "none/turns.jsonl"), "--turns"),
    ],
)
def test_wrong_option_is_refused_with_exit_status_2(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    write_scenario(tmp_path)
    (tmp_path / "empty").mkdir()
    ran = rose(*(tmp_path / each if "." in each or each == "empty" else each for each in arguments))
    assert (ran.returncode, ran.stdout) == (2, ""), ran.stderr
    assert words in ran.stderr and "Traceback" not in ran.stderr


def test_scenarios_of_one_name_are_refused(tmp_path: Path) -> None:
    write_scenario(tmp_path, "first", text=f'name = "tiny"\n{TINY}')
    write_scenario(tmp_path, "second", text=f'name = "tiny"\n{TINY}')
    with pytest.raises(UsageError, match="another `name`"):
        simulate_all(tmp_path, Outputs())


def test_all_files_are_checked_before_anything_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "run_arms", lambda *_, **__: pytest.fail("simulated"))
    write_scenario(tmp_path, "good")
    write_scenario(tmp_path, "wrong", text=TINY.replace("busy", "bussy"))
    with pytest.raises(UsageError, match="bussy"):
        simulate_all(tmp_path, Outputs())
    with pytest.raises(UsageError, match="--trace"):
        simulate_one(tmp_path / "good.toml", [], Outputs(trace=tmp_path / "none" / "trace.json"))


def test_same_seed_gives_the_same_bytes_in_every_file(tmp_path: Path) -> None:
    """The two processes hash strings differently."""
    write_scenario(tmp_path)
    files = [(tmp_path / f"{run}.json", tmp_path / f"{run}.jsonl", tmp_path / f"{run}.trace") for run in ("1", "2")]
    for seed, (figures, turns, trace) in enumerate(files):
        ran = rose(
            tmp_path / "tiny.toml", "--json", figures, "--turns", turns, "--trace", trace, PYTHONHASHSEED=str(seed)
        )
        assert ran.returncode == 0, ran.stderr
        assert "events in" in ran.stderr
    for first, second in zip(*files, strict=True):
        assert first.read_bytes() == second.read_bytes() != b""


def test_all_scenarios_of_a_folder_are_in_one_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # a narrow terminal cuts no figure
    write_scenario(tmp_path, "first")
    write_scenario(tmp_path, "second", text=TINY.replace("seed = 3", "seed = 4"))
    simulate_all(tmp_path, Outputs(json=tmp_path / "figures.json"))
    found = json.loads((tmp_path / "figures.json").read_bytes())
    assert {name: result["seed"] for name, result in found["scenarios"].items()} == {"first": 3, "second": 4}
    assert {check["name"] for check in found["checks"]} == {"fixed", "elastic", "promise"}
    for check in found["checks"]:
        assert check.keys() >= {"name", "value", "unit", "bound", "direction", "against"}
    assert len(found["checks"][0]["details"]) == 2
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "first, seed 3: one small engine" in printed and "second, seed 4" in printed
    assert "1.31" in printed and "1.20 (rollout)" in printed and "1.07" in printed


def test_only_the_chosen_arm_is_simulated_and_traced(tmp_path: Path) -> None:
    figures, trace = tmp_path / "figures.json", tmp_path / "trace.json"
    simulate_one(write_scenario(tmp_path), ["fixed"], Outputs(json=figures, trace=trace))
    (result,) = json.loads(figures.read_bytes())["scenarios"].values()
    assert list(result["arms"]) == ["fixed"] and result["over"] == {}
    assert "guest computes" not in trace.read_text() and "dedicated-0-0" in trace.read_text()


def test_simulation_loads_no_heavy_module(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from rose.pipeline.cli.simulate import Outputs, simulate_one\n"
        "simulate_one(Path(sys.argv[1]), ['rose'], Outputs())\n"
        "print(*sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(write_scenario(tmp_path))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert HEAVY & set(ran.stdout.splitlines()[-1].split()) == set()

"""The engine process of a dedicated executor gets the settings of the configuration."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.policy_folders import new_policy, save_policy

pytestmark = pytest.mark.slow

START = """
import json
import sys
from pathlib import Path
from threading import Event

from rose.schemas.errors import RoseError
from rose.workers.executor.config import ExecutorConfig
from rose.workers.executor.engine_process import EngineProcess

with EngineProcess(ExecutorConfig(model_folder=Path(sys.argv[1]), vllm=json.loads(sys.argv[2]))) as engine:
    try:
        print(engine.client.wait_until_ready(Event()).kv_bytes_per_token)
    except RoseError as error:
        print(error)
"""


def started(folder: Path, arguments: dict[str, object], **variables: str) -> str:
    """Start an engine process in a fresh process, which has no client of a broker. Return the output."""
    command = [sys.executable, "-c", START, str(folder), json.dumps(arguments)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | variables
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240, env=environment).stdout


def test_arguments_of_the_configuration_reach_vllm(tmp_path: Path) -> None:
    folder = save_policy(tmp_path, new_policy(0, tied=True))
    assert int(started(folder, {"block_size": 4096})) > int(started(folder, {}))
    assert "Unknown attention backend: 'NONE'" in started(folder, {"attention_backend": "NONE"})


def test_engine_whose_first_step_fails_names_the_variables_that_are_set(tmp_path: Path) -> None:
    """vLLM has no such kernels for a CPU."""
    folder = save_policy(tmp_path, new_policy(0, tied=True))
    refusal = started(folder, {}, VLLM_BATCH_INVARIANT="1", VLLM_NO_USAGE_STATS="1")
    assert "vLLM cannot run" in refusal and "(set in the environment: VLLM_BATCH_INVARIANT)" in refusal

"""Derive the profiles of the demo's engines from the heartbeats of a demo run.

    rose demo --name NAME
    python -m bench.derive_demo_profile --run NAME [--out FOLDER]

Keeps true
- Each figure is the median over the heartbeats in which the executor was ready and held turns. An executor writes the
  line that it has fitted to its own steps into its heartbeats: a base, and the seconds of a token.
- The figures hold for the load of the demo: all roles share the machine's cores.
"""

import argparse
import json
import math
import os
import statistics
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.check import say
from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.local.broker import readable_log
from rose.pipeline.simulation.cost_model import PROFILES, parse_profile, write_profile
from rose.schemas.heartbeats import ExecutorState, SlackHeartbeat, WorkerClass
from rose.topics.acl import VIEW, connect_as
from rose.topics.catalog import HEARTBEATS
from rose.topics.log_reader import read_whole_topics

NAMES = {WorkerClass.DEDICATED: "calculator-cpu-tp1", WorkerClass.SERVING: "calculator-cpu-guest-tp1"}

BLOCK_TOKENS = 32
"""Tokens of a KV block of the demo's engines."""

STEP_TOKENS = 512
"""Tokens of the largest step of the demo's engines."""

LIFECYCLE = {
    "source": "measured in the demo's logs on 2 cores: guest_built, and the start of executor-0 to executor_started",
    "wake_seconds": 3.0,
    "load_seconds": 11.3,
}

LINKS = {
    "source": "assumed: 8 Gbit/s of a loopback device; a version of the demo is under 1 MB",
    "network_bytes_per_second": 1e9,
    "nvlink_bytes_per_second": 0.0,
}


def parameters(file: Path) -> int:
    """Return the number of parameters of a safetensors file."""
    with file.open("rb") as model:
        (size,) = struct.unpack("<Q", model.read(8))
        header = json.loads(model.read(size))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def profile_tables(kind: WorkerClass, heartbeats: Sequence[SlackHeartbeat], model_folder: Path) -> dict[str, Any]:
    """Return the tables of the profile of one kind of executor."""
    token = statistics.median(1.0 / each.hardware.prefill_tokens_per_second for each in heartbeats)
    base = statistics.median(
        1.0 / each.hardware.decode_tokens_per_second - each.rollout.running / each.hardware.prefill_tokens_per_second
        for each in heartbeats
    )
    newest = heartbeats[-1]
    shape = json.loads((model_folder / "config.json").read_bytes())
    source = f"median of {len(heartbeats)} heartbeats of a demo run on {os.cpu_count()} cores that other work shared"
    nothing = {"source": "part of linear: the fit of an executor has a base and one cost a token"}
    return {
        "name": NAMES[kind],
        "model": "the demo's policy",
        "card": "CPU",
        "tensor_parallel": 1,
        "shape": {
            "source": "config.json of the demo's policy; float32",
            "layers": shape["num_hidden_layers"],
            "kv_bytes_per_token": newest.kv_bytes_per_token,
            "weight_bytes": 4 * parameters(model_folder / "model.safetensors"),
        },
        "memory": {
            "source": "a heartbeat of the run; block of the demo's configuration",
            "kv_cache_tokens": newest.kv_bytes_total // newest.kv_bytes_per_token // BLOCK_TOKENS * BLOCK_TOKENS,
            "block_tokens": BLOCK_TOKENS,
        },
        "host": {"source": source, "step_seconds": base, "sequence_seconds": 0.0},
        "linear": {"source": source, "counts": [1, STEP_TOKENS], "seconds": [token, STEP_TOKENS * token]},
        "output": nothing | {"counts": [1, STEP_TOKENS], "seconds": [0.0, 0.0]},
        "decode_attention": nothing | {"counts": [1, STEP_TOKENS], "seconds": [0.0, 0.0], "context_token_seconds": 0.0},
        "prefill_attention": nothing | {"token_seconds": 0.0, "pair_seconds": 0.0},
        "lifecycle": LIFECYCLE,
        "links": LINKS,
    }


def main() -> None:
    """Write the profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, metavar="NAME")
    parser.add_argument("--out", type=Path, default=PROFILES, metavar="FOLDER")
    arguments = parser.parse_args()
    config = load(Common(run=arguments.run))
    with readable_log(config) as settings:
        connect_as(settings, VIEW)
        records = [each.record for each in read_whole_topics(settings, [HEARTBEATS])]
    heartbeats = [each for each in records if isinstance(each, SlackHeartbeat)]
    for kind, name in NAMES.items():
        working = [
            each
            for each in heartbeats
            if each.worker_class is kind and each.state is ExecutorState.READY and each.rollout.running
        ]
        tables = profile_tables(kind, working, config.settings.model.folder)
        (arguments.out / f"{name}.toml").write_text(write_profile(parse_profile(tables, name)), encoding="utf-8")
        say(name)


if __name__ == "__main__":
    main()

"""A small scenario: one engine of four turns, and three servers that lend; an arm takes a fraction of a second."""

from pathlib import Path

TINY = """
about = "one small engine, three lenders"
seed = 3

[[dedicated]]
profile = "qwen3-8b-h800-tp1"
count = 1
max_turns = 4

[lending]
serving_profile = "qwen3-8b-h800-tp1"
guest_profile = "qwen3-8b-h800-tp1"
count = 3

[users]
busy = 0.2

[tasks]
groups = 3
group_size = 8
new_tokens = 300
turns = 3

[training]
steps = 2
gpus = 2

[paper]
fixed = 1.31
spot = 1.2
ttft_p99 = 1.07

[arms.rose]

[arms.fixed]
elastic = { how = "none" }

[arms.spot]
elastic = { how = "whole", engine_requests = 8 }
"""


def write_scenario(folder: Path, name: str = "tiny", *, text: str = TINY) -> Path:
    """Write a scenario; return its file."""
    file = folder / f"{name}.toml"
    file.write_text(text)
    return file

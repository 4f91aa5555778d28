"""The codec is compiled also where numba can keep nothing of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_codec_without_a_writable_cache_folder_is_compiled(tmp_path: Path) -> None:
    """A file in place of a folder refuses also root, as a read-only root does."""
    copy = shutil.copytree(ROOT / "rose", tmp_path / "rose", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "workers" / "weights" / "codec" / "__pycache__").touch()
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    encode = """
import numpy
from rose.workers.weights import codec
old, new = numpy.zeros(8, dtype=numpy.uint16), numpy.arange(8, dtype=numpy.uint16)
print(codec.__file__, (codec.decode(old, codec.encode(old, new, "bfloat16"), "bfloat16") == new).all())
"""
    ran = subprocess.run(
        [sys.executable, "-B", "-c", encode],
        cwd=tmp_path,
        env=environment | {"XDG_CACHE_HOME": os.devnull},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.split() == [str(copy / "workers/weights/codec/__init__.py"), "True"], ran.stderr[-600:]

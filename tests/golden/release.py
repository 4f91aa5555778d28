"""The files of a release, in a folder of its name: its contract, the bytes of every record, and the payloads of chunks.
`python -m tests.golden.release` writes those of the current version.

The files of a release are never rewritten, because logs and users rely on them forever.
"""

from importlib.metadata import version
from pathlib import Path

import msgspec

from rose.pipeline.asyncapi import render_document
from rose.schemas.record import Record
from rose.schemas.wire import encode
from tests.golden.contract import contract
from tests.golden.examples import EXAMPLES
from tests.golden.payloads import INDEX, payload_of, pieces

RELEASES = Path(__file__).parent / "releases"

PRESENT = RELEASES / version("rose-rollouts")


def name_of(record: Record | type[Record]) -> str:
    """Return the file name of a record."""
    return f"{record.SCHEMA.partition('/')[0]}.msgpack"


def write(folder: Path) -> None:
    """Write all files of this code. Raises FileExistsError."""
    payloads = folder / "payloads"
    payloads.mkdir(parents=True)
    (folder / "contract.json").write_text(render_document(contract()))
    for example in EXAMPLES:
        (folder / name_of(example)).write_bytes(encode(example))
    for piece in pieces():
        (payloads / piece.name).write_bytes(payload_of(piece))
    (payloads / "index").write_bytes(msgspec.msgpack.encode(INDEX))


if __name__ == "__main__":
    write(PRESENT)

"""The command in a folder of the test's own."""

from pathlib import Path

import pytest

from tests.integration.rose_command import Rose


@pytest.fixture
def rose(broker_kind: str, tmp_path: Path) -> Rose:
    return Rose(broker_kind, tmp_path)

"""The address of an endpoint: an unusable address, or one with a password for the bus, is refused at once."""

import pytest

from rose.schemas.errors import UsageError
from rose.workers.lender.config import EndpointConfig


@pytest.mark.parametrize("url", ["server:8000", "file:///etc/passwd", "http://", "http://me:secret@server:8000"])
def test_invalid_address_is_refused_and_not_echoed(url: str) -> None:
    with pytest.raises(UsageError, match="http://host:port") as refused:
        EndpointConfig(url=url)
    assert "secret" not in str(refused.value)


def test_plain_address_is_accepted() -> None:
    assert EndpointConfig(url="https://server.example:8000/").url and not EndpointConfig().url

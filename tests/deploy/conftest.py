"""The image store of a test file. Data kept for later runs is in pytest's cache."""

from collections.abc import Iterator

import pytest

from tests.deploy.image_fixtures import UNPACKED, Debian, Images


@pytest.fixture(scope="module")
def debian() -> Debian:
    """The base of the images."""
    return UNPACKED


@pytest.fixture(scope="module")
def images(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, debian: Debian
) -> Iterator[Images]:
    with Images.on(debian, tmp_path_factory.mktemp("images"), request.config.cache.mkdir("images")) as images:
        yield images

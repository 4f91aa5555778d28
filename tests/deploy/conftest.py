"""The store of images that the tests of a file build; what is kept for the next time lies in pytest's cache."""

from collections.abc import Iterator

import pytest

from tests.deploy.image_fixtures import UNPACKED, Debian, Images


@pytest.fixture(scope="module")
def debian() -> Debian:
    """What its images are based on."""
    return UNPACKED


@pytest.fixture(scope="module")
def images(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, debian: Debian
) -> Iterator[Images]:
    with Images.on(debian, tmp_path_factory.mktemp("images"), request.config.cache.mkdir("images")) as images:
        yield images

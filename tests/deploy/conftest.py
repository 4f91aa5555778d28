"""The store of images that this session builds; what is kept for the next one lies in pytest's cache."""

from collections.abc import Iterator

import pytest

from tests.deploy.images_kit import Builder, Images, need_builder


@pytest.fixture(scope="session")
def images(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    need_builder()
    builder = Builder(tmp_path_factory.mktemp("images"), request.config.cache.mkdir("images"))
    try:
        builder.make_base()
        builder.make_context()
        yield Images(builder)
    finally:
        builder.close()

"""The light image, built here from the current wheel. `test_images.py` builds the others."""

from pathlib import Path

import pytest

from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.topics.local_broker import free_ports
from tests.deploy.image_fixtures import BASE, Images, is_ready, look_into, running
from tests.support.brokers import EMBEDDED, flags, start
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MOST_MEGABYTES = 400
DEBIAN_MEGABYTES = 174
"""Size of a set-up Debian with Python, which these tests replace by a smaller base."""


def test_light_image_is_small_without_a_compiler_and_lists_its_contents(images: Images) -> None:
    own = look_into(images, "light") - images.builder.container(BASE).megabytes()
    assert own + DEBIAN_MEGABYTES < MOST_MEGABYTES


def test_missing_role_is_not_healthy(images: Images) -> None:
    health = images.container("light").run("rose", "health")
    assert health.returncode == 1 and "nothing answers" in health.stderr
    assert "Traceback" not in health.stderr


def test_role_asked_to_stop_exits_with_status_0(images: Images, tmp_path: Path) -> None:
    runs, [port] = tmp_path / "runs", free_ports(1)
    runs.mkdir()
    with start(EMBEDDED, tmp_path / "broker") as broker:
        settings = broker.settings()
        create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=1))
        light = images.container("light")
        with running(light, port, "router", *flags(settings), log=runs / "router.log") as router:
            until(lambda: is_ready(port))
        assert router.returncode == 0
        assert light.written() == [], "the root may be read-only"

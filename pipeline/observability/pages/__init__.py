"""The dashboards, one module for each page."""

from rose.pipeline.observability.pages.bus import BUS
from rose.pipeline.observability.pages.rollout import ROLLOUT
from rose.pipeline.observability.pages.serving import SERVING
from rose.pipeline.observability.pages.weights import WEIGHTS

DASHBOARDS = (SERVING, ROLLOUT, WEIGHTS, BUS)

"""The dashboards: what is worth a look, page by page."""

from pipeline.observability.pages.bus import BUS
from pipeline.observability.pages.rollout import ROLLOUT
from pipeline.observability.pages.serving import SERVING
from pipeline.observability.pages.weights import WEIGHTS

DASHBOARDS = (SERVING, ROLLOUT, WEIGHTS, BUS)

"""The exported metrics and their dashboards: declared once, written out by `python -m rose.pipeline.observability`."""

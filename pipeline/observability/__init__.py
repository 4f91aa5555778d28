"""The exported metrics, their dashboards and the reference pages.

`python -m rose.pipeline.observability` writes the generated files.
"""

"""The exported metrics and their dashboards. `python -m rose.pipeline.observability` writes the generated files."""

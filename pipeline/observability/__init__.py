"""What is exported, and the dashboards over it: declared once, written out by `python -m pipeline.observability`."""

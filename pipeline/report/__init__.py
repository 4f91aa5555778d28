"""The report of a run: its history from the log, `summary.json`, and `report.html`."""

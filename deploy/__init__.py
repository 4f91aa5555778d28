"""Images, compose file and chart, and `generate`, which writes the parts of them that follow from the code."""

"""A trajectory's life, told from the log."""

"""Load generator: sends the requests of a trace to a serving engine and measures their latency."""

"""Load on a serving engine, replayed from a trace: when users ask, how much they send, how long they wait."""

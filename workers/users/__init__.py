"""The users of a serving engine, played from a trace: when they ask, how much they send, what they wait."""

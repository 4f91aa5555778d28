"""Emulated executors: they keep the executor's contract on the real bus, and only compute is emulated.

Time is real: records travel, users come, turns go back before they end, and an engine computes when it may.
`pipeline/simulation` has the same executors in simulated time, with an engine that computes in steps. The engine here
has no steps, only rates.

`users`     serving load from a real trace, and the capacity that it leaves
`engine`    turns whose durations follow from rates, and a prefix cache
`executor`  one emulated executor: the real inbox, gate, lease and memory with that engine; pure
`fleet`     the process that runs many emulated executors
`figures`   figures of a fleet's journal
"""

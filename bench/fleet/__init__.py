"""Emulated executors: they keep the executor's contract on the real bus, and only compute is emulated.

Time is real: records travel, users come, turns go back before they end, and an engine computes when it may.
`bench.emulated` is the other emulation, in simulated time: records take no time, no executor leaves, and engines run
batches step by step over a cache of blocks, as vLLM's engines do. Both emulations use the executor's own inbox,
heartbeats and answers. They have different engines: the steps of `bench.emulated` are never paused, and the engine here
has no steps.

`users`     serving load from a real trace, and the capacity that it leaves
`engine`    turns whose durations follow from rates, and a prefix cache
`executor`  one emulated executor: the real inbox, gate, lease and memory with that engine; pure
`fleet`     the process that runs many emulated executors
`figures`   figures of a fleet's journal
"""

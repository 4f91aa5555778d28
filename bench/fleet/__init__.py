"""Emulated executors: they keep the executor's contract on the real bus, and only compute is emulated.

Time is real: records travel, users come, turns go back before they end, and an engine computes when it may. The engine
is the simulator's (`rose.pipeline.simulation.engine`), which `rose simulate` runs in simulated time.

`users`     serving load from a real trace, and the capacity that it leaves
`engine`    the simulator's engine, with a cost model from rates
`executor`  one emulated executor: the real inbox, gate, lease and memory with that engine; pure
`fleet`     the process that runs many emulated executors
`figures`   figures of a fleet's journal
"""

"""Emulated executors: they keep the executor's contract on the real bus, and only compute is emulated.

Time is real here: records travel, users come, turns go back before they end, and an engine computes when it is let.
`bench.emulated` is the other emulation: simulated time, in which records take none and nobody leaves, and engines that
run batches step by step over a cache of blocks, as vLLM's do. Both have the executor's own inbox, heartbeats and
answers. They share no engine: that one is made of steps that are never paused, this one of none.

`users`     serving load from a real trace, and what it leaves
`engine`    turns that take the time that rates give, and a prefix cache
`executor`  one emulated executor: the real inbox, gate, lease and memory around that engine; pure
`fleet`     the process that plays many of them
`figures`   what a fleet's journal says
"""

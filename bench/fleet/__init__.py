"""Emulated executors: they keep the executor's contract on the real bus, and only compute is emulated.

`users`     serving load from a real trace, and what it leaves
`engine`    turns that take the time that rates give, and a prefix cache
`executor`  one emulated executor: the real inbox, gate, lease and memory around that engine; pure
`fleet`     the process that plays many of them
`figures`   what a fleet's journal says
"""

"""The cost of a run: device time by what became of the work, and prices."""

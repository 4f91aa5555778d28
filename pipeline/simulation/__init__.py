"""Simulation of rollouts on a fleet: the production cores on a virtual clock, with a cost model in place of engines."""

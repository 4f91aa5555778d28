"""Elasticity: which serving workers lend, decided from one summary per cell and second."""

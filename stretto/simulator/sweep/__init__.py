"""Sweeps: grids of simulations, each in its own process, with one report."""

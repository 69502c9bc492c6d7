"""Claims of the literature about distributed training, tested in the simulator: `python -m experiments`.

Each experiment is one module: its claim, its grid of simulations, its table, its plot, and a sentence on whether the
claim holds here.
"""

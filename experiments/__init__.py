"""The literature's claims about learning together, tried in the simulator: `python -m experiments`.

Each experiment is a script of its own: its claim, its grid of simulations, its table, its picture, and its sentence
about whether the claim holds here.
"""

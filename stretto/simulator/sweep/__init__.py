"""A grid of simulations, each a process, as many at once as there are cores, and one report of all of them."""

"""One script alone and under several recipes, on the same data and seeds, and what came of it."""

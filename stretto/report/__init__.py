"""Reports of runs and comparisons, built from their logs only."""

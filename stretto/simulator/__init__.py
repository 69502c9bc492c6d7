"""The simulator: many workers in one process, on a virtual clock."""

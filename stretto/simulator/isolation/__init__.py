"""The state of one simulated worker's script, apart from the others' in the same process."""

"""A training script that is cut into modules, which import each other by relative names."""

"""Checkpoints: format, storage, and transfer of a run's state."""

"""Simulated computing: step time, speeds, contention."""

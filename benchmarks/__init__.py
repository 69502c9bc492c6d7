"""Benchmarks of Stretto, each against another way to do the same, measured in the same run.

    python -m benchmarks          the quick benchmarks
    python -m benchmarks ddp      one benchmark

Each benchmark states its question, runs its sides in turns, prints a ratio and writes results/NAME.json.
"""

"""Figures about Stretto, each taken against another way to do the same in the same run.

    python -m benchmarks          the quick ones
    python -m benchmarks ddp      one of them

Each states its question, runs its sides in turns, prints a ratio and writes results/NAME.json.
"""

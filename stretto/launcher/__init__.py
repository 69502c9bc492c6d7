"""Launcher: starts the processes of a run on this machine and supervises them.

Nothing here imports torch: workers start quickly, and variables that a script sets before it imports torch have effect.
"""

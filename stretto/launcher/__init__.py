"""Starting a run on this machine and seeing it to its end.

Nothing here imports torch: the workers start at once, and what a script sets before it imports torch still
counts.
"""

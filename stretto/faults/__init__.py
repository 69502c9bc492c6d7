"""Fault injection: the plan of faults, in one language for live and simulated runs."""

"""Engines: what starts the processes of a run and reports their exits."""

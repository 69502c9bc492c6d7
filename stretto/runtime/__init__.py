"""The clock, the event log and the time per phase of one worker: what the simulator replaces."""

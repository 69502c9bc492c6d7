"""Clock, event log and phase timer of one worker: the parts that the simulator replaces."""

"""Workers of several processes that share one model."""

"""Simulated services, membership and transports."""

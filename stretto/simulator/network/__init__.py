"""Simulated links: topology, flows, bytes on the wire."""

"""Assignment and leases of batches: state machines without socket, clock or thread."""

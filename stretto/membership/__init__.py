"""Who works on what: state machines without socket, clock or thread."""

"""Membership: state machines without sockets, clocks or threads; the server and the client carry their messages."""

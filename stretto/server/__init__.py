"""The parameter server: plain state machines, and apart from them the service that carries their messages.

`shard` applies what arrives, `meeting` answers what all ask together; neither knows a socket, a clock or a thread.
`messages` is what is said, `parcels` how it is cut into frames, `service` the ZeroMQ side.
"""

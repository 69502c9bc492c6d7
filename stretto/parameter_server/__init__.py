"""The parameter server: plain state machines, and apart from them the service that carries their messages.

`shard` applies what arrives (`versions` are its numbers, `member` what it knows of a worker), `meeting` answers what
all ask together, `desk` says which machine is told what; none of them knows a socket, a clock or a thread. `messages`
is what is said, `parcels` how it is cut into frames, `service` the ZeroMQ side.
"""

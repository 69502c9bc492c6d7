"""The parameter server: plain state machines, and apart from them the RPC server that carries their messages.

`shard` applies updates (`versioned_buffers` holds its parameters, `worker_record` its records of the workers);
`barrier` computes collective operations; the handlers (`handler`, `shard_handler`, `dispatcher_handler`) map messages
to these state machines. None of them uses a socket or a thread, and the clock is an argument. `messages` is the
protocol, `framing` its division into frames, `rpc_server` and `rpc_channel` the ZeroMQ ends, `client` a worker's side.
"""

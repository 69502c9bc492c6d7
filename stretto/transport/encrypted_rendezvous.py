"""Rendezvous of generations whose members exchange encrypted: addresses and keys arrive with the coordinator's message.

    worker 0                             coordinator                            worker 1
      | -- ReadyReport(port, public key) -> |  <- ReadyReport(port, public key) -- |
      | <- GenerationView(both) ----------- |  -- GenerationView(both) ----------> |
      | -- Hello, from the key of worker 0 --------------------------------------> |
      | <------------------------------------- Hello, from the key of worker 1 --- |
      | accepts no more connections                                                |

A port serves one generation, so no message of an earlier one reaches it. The key pair is that of the process.
"""

from __future__ import annotations

import threading

import torch
import zmq

from stretto.errors import TransportError
from stretto.membership.messages import GenerationView
from stretto.transport.device_groups import notice_host_memory
from stretto.transport.elastic import AbortableTransport
from stretto.transport.encrypted import EncryptedTransport
from stretto.transport.encrypted_sockets import KeyPair, ReservedPort
from stretto.transport.gloo_rendezvous import own_address
from stretto.transport.malloc import trim_freed_memory
from stretto.transport.relay_tunnels import RelayAccess
from stretto.transport.rendezvous import LastWorkerTransport
from stretto.transport.shared_memory import over_shared_memory
from stretto.transport.worker_endpoint import Endpoint


class EncryptedRendezvous:
    """Connects the members of generations, each within `failure_timeout_s`, at this worker's address `toward` a host.

    A group of the devices would not be encrypted, so their tensors pass through the memory of the hosts.
    """

    def __init__(
        self,
        toward: str,
        failure_timeout_s: float,
        timeout_s: float,
        device: torch.device | None = None,
        relay: RelayAccess | None = None,
        ports: range | None = None,
    ) -> None:
        self._relay, self._ports = relay, ports
        self._closed = set[str]()
        """Machines to which this worker has not connected directly."""
        self._toward, self._patience_s, self._timeout_s = toward, failure_timeout_s, timeout_s
        if device is not None and device.type != "cpu":
            notice_host_memory("groups of devices are not encrypted; --no-encryption would use them")
        self._keys = KeyPair(*zmq.curve_keypair())
        self._port: ReservedPort | None = None
        self._forming: EncryptedTransport | None = None
        self._generation = 0
        """Generation of the transport that is connecting, or that was returned last."""
        self._aborted = 0
        """Newest generation that was aborted, perhaps before its members connect."""
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """Address of this worker in the next generation: host, port and public key."""
        with self._lock:
            if self._port is None:
                self._port = ReservedPort(own_address(self._toward), self._keys, self._ports)
            return str(self._port.endpoint)

    def form(self, members: GenerationView, rank: int) -> AbortableTransport:
        """Connect with the members, each at the address in its report."""
        if len(members.members) == 1:
            return LastWorkerTransport()
        ends = [(one.worker, Endpoint.parse(one.report.address)) for one in members.members]
        port = self._taken(ends[rank][1])
        transport = EncryptedTransport(port, members.generation, rank, ends, self._timeout_s, self._relay, self._closed)
        with self._lock:
            self._forming, self._generation = transport, members.generation
            is_aborted = self._aborted >= members.generation
        if is_aborted:
            transport.abort()
        try:
            transport.connect(self._patience_s)
        except TransportError:
            transport.close()
            raise
        trim_freed_memory()
        return over_shared_memory(transport, None, self._patience_s)

    def abort(self, generation: int) -> None:
        """Abort a generation: its connecting, now or later, or its transport."""
        with self._lock:
            self._aborted = max(self._aborted, generation)
            forming = self._forming if self._generation <= generation else None
        if forming is not None:
            forming.abort()

    def close(self) -> None:
        """Release the port of the next generation."""
        with self._lock:
            if self._port is not None:
                self._port.close()
            self._port = None

    def _taken(self, own: Endpoint) -> ReservedPort:
        """Return the port that the members know. The next generation has another."""
        with self._lock:
            port, self._port = self._port, None
        if port is None or port.endpoint != own:
            raise TransportError(f"the members of a generation know another address of this worker: {own}")
        return port

"""Handshake of two workers that know each other's public keys, and the ciphers of their messages.

Noise_KK_25519_AESGCM_SHA256 of the Noise protocol framework, revision 34, http://www.noiseprotocol.org/noise.html:

    initiator                       responder
      | -- e, es, ss ----------------> |    proves the initiator's key
      | <- e, ee, se ----------------- |    proves the responder's, and that neither message is an old one
      | == messages, AES-256-GCM ====> |

Messages are longer than the 65,535 bytes of the framework: its limit serves implementations with fixed buffers.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PROTOCOL = b"Noise_KK_25519_AESGCM_SHA256"
KEY_BYTES, TAG_BYTES = 32, 16
HANDSHAKE_BYTES = KEY_BYTES + TAG_BYTES
"""Bytes of each message of a handshake without a payload."""
_TOKENS = ((("e", "s"), ("s", "s")), (("e", "e"), ("s", "e")))
"""Keys whose shared secrets each message adds: the initiator's, then the responder's; ephemeral or static."""


class AuthenticationError(Exception):
    """Message that the holder of the expected key has not sent, or not at this place."""


class Cipher:
    """AES-256-GCM under one key, whose nonces count the messages. So each is opened once, in the order of sealing."""

    def __init__(self, key: bytes) -> None:
        self._cipher, self._count = AESGCM(key), 0

    def seal(self, plain: Any, associated: Any = b"") -> bytes:
        """Return an encrypted text with its tag."""
        return self._cipher.encrypt(self._nonce(), plain, associated)

    def seal_into(self, target: Any, plain: Any) -> None:
        """Write an encrypted text with its tag into a buffer of `TAG_BYTES` more."""
        self._cipher.encrypt_into(self._nonce(), plain, None, target)

    def open(self, sealed: Any, associated: Any = b"") -> bytes:
        """Return the plain text. Raise AuthenticationError if it is not that of the next message."""
        try:
            return self._cipher.decrypt(self._nonce(), sealed, associated)
        except InvalidTag:
            raise AuthenticationError from None

    def open_into(self, target: Any, sealed: Any) -> None:
        """Write the plain text into a buffer of its size. Raise AuthenticationError as `open` does."""
        try:
            self._cipher.decrypt_into(self._nonce(), sealed, None, target)
        except InvalidTag:
            raise AuthenticationError from None

    def _nonce(self) -> bytes:
        number, self._count = self._count, self._count + 1
        return number.to_bytes(12, "big")


class Handshake:
    """One side of a handshake. The initiator calls `write` and then `read`, the responder `read` and then `write`.

    Both sides must give the same `prologue`. Keys are the 32 bytes of X25519.
    """

    def __init__(
        self, is_initiator: bool, own: bytes, peer: bytes, prologue: bytes, ephemeral: bytes | None = None
    ) -> None:
        self._is_initiator, self._tokens = is_initiator, iter(_TOKENS)
        self._own = {"s": X25519PrivateKey.from_private_bytes(own)}
        self._peer = {"s": X25519PublicKey.from_public_bytes(peer)}
        self._ephemeral = ephemeral
        self._hash = self._chaining_key = PROTOCOL.ljust(KEY_BYTES, b"\0")
        self._key = b""
        publics = [self._own["s"].public_key().public_bytes_raw(), peer]
        for one in (prologue, *(publics if is_initiator else reversed(publics))):
            self._mix_hash(one)

    def write(self, payload: bytes = b"") -> bytes:
        """Return the next message. Raise AuthenticationError if the other side's key is not one of a secret."""
        made = self._ephemeral and X25519PrivateKey.from_private_bytes(self._ephemeral)
        self._own["e"] = made or X25519PrivateKey.generate()
        public = self._own["e"].public_key().public_bytes_raw()
        self._mix(public)
        sealed = Cipher(self._key).seal(payload, self._hash)
        self._mix_hash(sealed)
        return public + sealed

    def read(self, message: bytes) -> bytes:
        """Return the payload of the other side's message. Raise AuthenticationError if it has another key."""
        public, sealed = message[:KEY_BYTES], message[KEY_BYTES:]
        try:
            self._peer["e"] = X25519PublicKey.from_public_bytes(public)
        except ValueError:  # a key of too few bytes
            raise AuthenticationError from None
        self._mix(public)
        payload = Cipher(self._key).open(sealed, self._hash)
        self._mix_hash(sealed)
        return payload

    def ciphers(self) -> tuple[Cipher, Cipher]:
        """Return the ciphers of messages from the initiator, and of messages from the responder."""
        one, other = self._derived(b"")
        return Cipher(one), Cipher(other)

    def _mix(self, ephemeral: bytes) -> None:
        self._mix_hash(ephemeral)
        for initiators, responders in next(self._tokens):
            own, peer = (initiators, responders) if self._is_initiator else (responders, initiators)
            try:
                secret = self._own[own].exchange(self._peer[peer])
            except ValueError:  # the peer's key is one with which all secrets are zero
                raise AuthenticationError from None
            self._chaining_key, self._key = self._derived(secret)

    def _mix_hash(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def _derived(self, secret: bytes) -> tuple[bytes, bytes]:
        """Return two keys: HKDF of the chaining key and a secret."""
        extracted = hmac.digest(self._chaining_key, secret, "sha256")
        first = hmac.digest(extracted, b"\1", "sha256")
        return first, hmac.digest(extracted, first + b"\2", "sha256")

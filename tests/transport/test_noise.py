"""Handshake of Noise: the messages of published vectors, and messages that are altered, repeated or another's."""

from __future__ import annotations

import itertools

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from stretto.transport.noise import HANDSHAKE_BYTES, AuthenticationError, Handshake

PROLOGUE = bytes.fromhex("4a6f686e2047616c74")
STATIC = (
    "e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1",
    "4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893",
)
EPHEMERAL = (
    "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
    "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
)
MESSAGES = (
    (
        "4c756477696720766f6e204d69736573",
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79448564738a841228e693caeec4c497a8bd562231c3e51a1f03c4fd45dfe3a67870",
    ),
    (
        "4d757272617920526f746862617264",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843b94504c4d83506f5dd2568b68490eba8ed6f9cf2cca194a273c56d7ae3c558",
    ),
    ("462e20412e20486179656b", "6a5c10a201d4e3a08f79f64949e55731f774913a4d949bda3fcebf"),
    ("4361726c204d656e676572", "4e8a1bf06926fdd74e2f516e2b0c11cc1dc3387fadeb75389d4342"),
    (
        "4a65616e2d426170746973746520536179",
        "c1df7194ca8ea51d4dd99059bc9b90288112d47237d8481f1773fb26a31629a05c",
    ),
    (
        "457567656e2042f6686d20766f6e2042617765726b",
        "3edba4feaf590ee88dd8f5fba51db4bee651cf41afd410fe476c524ac9b1db24252fc55ff8",
    ),
)
"""Payloads and messages of a vector of cacophony for Noise_KK_25519_AESGCM_SHA256; the sides send in turns."""


def sides(prologues: tuple[bytes, bytes] = (PROLOGUE, PROLOGUE), fixed: bool = True) -> tuple[Handshake, Handshake]:
    """Return an initiator and a responder who expect each other."""
    secret = [bytes.fromhex(one) for one in STATIC]
    public = [X25519PrivateKey.from_private_bytes(one).public_key().public_bytes_raw() for one in secret]
    ephemeral = [bytes.fromhex(one) if fixed else None for one in EPHEMERAL]
    return (
        Handshake(True, secret[0], public[1], prologues[0], ephemeral[0]),
        Handshake(False, secret[1], public[0], prologues[1], ephemeral[1]),
    )


def test_messages_are_those_of_the_vector() -> None:
    vector = [tuple(bytes.fromhex(text) for text in one) for one in MESSAGES]
    initiator, responder = sides()
    for writer, reader in ((initiator, responder), (responder, initiator)):
        payload, message = vector.pop(0)
        assert writer.write(payload) == message
        assert reader.read(message) == payload
    sealing, opening = initiator.ciphers(), responder.ciphers()
    for (payload, message), direction in zip(vector, itertools.cycle((0, 1))):
        assert sealing[direction].seal(payload) == message
        assert opening[direction].open(message) == payload


def finished() -> tuple[Handshake, Handshake]:
    initiator, responder = sides(fixed=False)
    responder.read(initiator.write())
    initiator.read(responder.write())
    return initiator, responder


def test_messages_in_place_are_those_of_copies() -> None:
    initiator, responder = finished()
    plain, sealed, opened = bytes(range(100)), bytearray(116), bytearray(100)
    initiator.ciphers()[0].seal_into(sealed, plain)
    assert sealed == initiator.ciphers()[0].seal(plain)
    responder.ciphers()[0].open_into(opened, sealed)
    assert opened == plain


@pytest.mark.parametrize("place", [0, 16, 31, 32, 47])
@pytest.mark.parametrize("number", [0, 1])
def test_an_altered_handshake_is_refused(number: int, place: int) -> None:
    initiator, responder = sides()
    message, reader = bytearray(initiator.write()), responder
    if number:
        responder.read(bytes(message))
        message, reader = bytearray(responder.write()), initiator
    message[place] ^= 1
    with pytest.raises(AuthenticationError):
        reader.read(bytes(message))


@pytest.mark.parametrize("sent", [b"", b"short", bytes(HANDSHAKE_BYTES), bytes(200)])
def test_what_is_no_handshake_is_refused(sent: bytes) -> None:
    with pytest.raises(AuthenticationError):
        sides()[1].read(sent)


def test_a_public_key_with_which_all_secrets_are_zero_is_refused() -> None:
    own = X25519PrivateKey.generate().private_bytes_raw()
    with pytest.raises(AuthenticationError):
        Handshake(True, own, bytes(32), PROLOGUE).write()
    sent = sides()[0].write()
    with pytest.raises(AuthenticationError):
        Handshake(False, own, bytes(32), PROLOGUE).read(sent)


def test_another_prologue_is_refused() -> None:
    initiator, responder = sides((PROLOGUE, b"another"))
    with pytest.raises(AuthenticationError):
        responder.read(initiator.write())


def test_a_repeated_first_message_gives_its_sender_no_cipher() -> None:
    initiator, responder = sides(fixed=False)
    first = initiator.write()
    responder.read(first)
    initiator.read(responder.write())
    again = sides(fixed=False)[1]
    again.read(first)
    again.write()
    with pytest.raises(AuthenticationError):
        again.ciphers()[0].open(initiator.ciphers()[0].seal(b"a message"))


def test_messages_that_are_altered_repeated_left_out_or_of_the_other_direction_are_refused() -> None:
    initiator, responder = finished()
    sealing = initiator.ciphers()[0]
    first, second = sealing.seal(b"first"), sealing.seal(b"second")
    altered = bytes([first[0] ^ 1]) + first[1:]
    for wrong in (second, altered, b"", first[:-1]):
        with pytest.raises(AuthenticationError):
            responder.ciphers()[0].open(wrong)
    with pytest.raises(AuthenticationError):
        responder.ciphers()[1].open(first)
    opening = responder.ciphers()[0]
    assert opening.open(first) == b"first"
    with pytest.raises(AuthenticationError):
        opening.open(first)

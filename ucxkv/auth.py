"""Proof of a shared secret by challenge and response, and seals on the frames that follow.

Either side proves that it knows the secret by an HMAC-SHA256 over everything both have said so far:
the two hellos with their fresh nonces.  Each direction has labels of its own, so that nothing said
can be sent back, or said again on another connection.  Afterwards every frame carries a seal, keyed
by that exchange and numbered: altered, left out or repeated frames are noticed.  Frames are not
encrypted, and who has heard a handshake can try out guesses of a weak secret.
"""

from __future__ import annotations

import hashlib
import hmac

SEAL_SIZE = 16

DIALLER = b"dialler"
LISTENER = b"listener"


def key_of(secret: str | bytes | None) -> bytes | None:
    """The bytes of a secret."""
    return secret.encode() if isinstance(secret, str) else secret


def transcript(dialler_said: bytes, listener_said: bytes) -> bytes:
    """A digest of both hellos; no other pair of hellos has the same."""
    digest = hashlib.sha256(b"ucxkv transcript")
    for said in (dialler_said, listener_said):
        digest.update(len(said).to_bytes(8, "big"))
        digest.update(said)
    return digest.digest()


def _derive(key: bytes, purpose: bytes, side: bytes, said: bytes) -> bytes:
    return hmac.digest(key, b"ucxkv " + purpose + b" of the " + side + b"\0" + said, "sha256")


def proof(key: bytes | None, side: bytes, said: bytes) -> bytes:
    """What `side` proves itself with; empty without a secret."""
    return b"" if key is None else _derive(key, b"proof", side, said)


def proves(mac: bytes, key: bytes | None, side: bytes, said: bytes) -> bool:
    """Whether `mac` is the proof of `side`."""
    return hmac.compare_digest(mac, proof(key, side, said))


class Seal:
    """Makes or checks the seals of one direction, frame after frame."""

    def __init__(self, key: bytes, side: bytes, said: bytes) -> None:
        self._key = _derive(key, b"frames", side, said)
        self._count = 0

    def next(self, body: bytes) -> bytes:
        """The seal of the next frame."""
        number = self._count.to_bytes(8, "big")
        self._count += 1
        return hmac.digest(self._key, number + body, "sha256")[:SEAL_SIZE]

    def check(self, body: bytes, seal: bytes) -> bool:
        """Whether `seal` is that of the next frame."""
        return hmac.compare_digest(self.next(body), seal)

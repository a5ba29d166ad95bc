"""The first messages of a connection, as the dialler and as the listener say them.

    dialler                        listener
    preamble, Hello       →
                          ←        preamble, Hello         (or Refusal: versions, settings, ids)
    Proof                 →
                          ←        Proof                   (or Refusal: the secret)
                          ←        Welcome                 (or Refusal: what the links allow)

Each side judges the other's hello by itself.  Nothing about existing links is said before both
proofs are right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ucxkv import auth, wire
from ucxkv.connection import Connection
from ucxkv.types import LlmRole

# UCX versions that may be linked with each other although they differ, as (major, minor).
TESTED_TOGETHER: frozenset[tuple[int, int]] = frozenset({(1, 22)})


class Refused(Exception):
    """No link over this connection.  `code` is a wire.Refusal's, `suspicious` asks for a log."""

    def __init__(self, text: str, code: int = wire.REFUSED, *, suspicious: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.suspicious = suspicious


@dataclass(frozen=True)
class Introduction:
    """Both hellos of a connection whose ends have proven themselves."""

    mine: wire.Hello
    theirs: wire.Hello
    link_id: bytes  # names a link that is made over this connection


# A function, so that the hello's serial is taken when the hello is sent.
MakeHello = Callable[[], wire.Hello]
Stage = Callable[[str], None]


def ucx_release(version: str) -> tuple[int, ...]:
    """Major and minor number of a version as UCX writes it."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def compatible(mine: str, theirs: str) -> bool:
    """Whether two UCX versions may be linked."""
    pair = {ucx_release(mine), ucx_release(theirs)}
    return len(pair) == 1 or pair <= TESTED_TOGETHER


def wrong_protocol(theirs: int, library: str) -> Refused:
    """The refusal of another protocol version."""
    return Refused(
        f"the peer speaks protocol version {theirs}, this side (ucxkv {library}) speaks"
        f" {wire.PROTOCOL}"
    )


def objection(mine: wire.Hello, theirs: wire.Hello) -> Refused | None:
    """Why these two cannot link, in words that are true when said by either; None if they can."""
    if theirs.expected is not None and theirs.expected != mine.cluster_id:
        return Refused(f"cluster {mine.cluster_id} answers here, not cluster {theirs.expected}")
    if mine.expected is not None and mine.expected != theirs.cluster_id:
        return Refused(f"cluster {theirs.cluster_id} answers here, not cluster {mine.expected}")
    if theirs.cluster_id == mine.cluster_id:
        return Refused(f"both sides are cluster {mine.cluster_id}")
    if not compatible(mine.ucx, theirs.ucx):
        return Refused(
            f"cluster {mine.cluster_id} uses UCX {mine.ucx}, cluster {theirs.cluster_id} uses UCX"
            f" {theirs.ucx}: these versions have not been tested together"
        )
    if mine.chunk_size != theirs.chunk_size:
        return Refused(
            f"cluster {mine.cluster_id} streams chunks of {mine.chunk_size} bytes, cluster"
            f" {theirs.cluster_id} of {theirs.chunk_size}: both must have the same"
        )
    if mine.secured != theirs.secured:
        with_secret, without = (mine, theirs) if mine.secured else (theirs, mine)
        return Refused(
            f"cluster {with_secret.cluster_id} asks for a secret, cluster {without.cluster_id} has"
            " none",
            suspicious=mine.secured,
        )
    return None


def _open(
    connection: Connection, key: bytes | None, said: bytes, sending: bytes, receiving: bytes
) -> bytes:
    """Go over to sealed frames; returns the link id of this connection."""
    if key is None:
        connection.unseal(None, None)
    else:
        connection.unseal(auth.Seal(key, sending, said), auth.Seal(key, receiving, said))
    return said[:16]


async def dial(
    connection: Connection,
    make_hello: MakeHello,
    key: bytes | None,
    stage: Stage,
    role: LlmRole | None = None,
) -> tuple[Introduction, wire.Welcome]:
    """The dialler's part.  Raises Refused, ProtocolError or ConnectionLost."""
    stage("waiting for the peer's hello")
    mine = make_hello()
    connection.send_preamble()
    said = connection.send_opening(mine)
    version = await connection.receive_preamble()
    if version != wire.PROTOCOL:
        raise wrong_protocol(version, mine.library)
    theirs, answer = await connection.receive_opening()
    if isinstance(theirs, wire.Refusal):
        raise Refused(theirs.text, theirs.code)
    if not isinstance(theirs, wire.Hello):
        raise wire.ProtocolError("the peer did not begin with a hello")
    problem = objection(mine, theirs)
    if problem is not None:
        raise problem
    if role is not None and role != theirs.role:
        raise Refused(
            f"cluster {theirs.cluster_id} has the role {LlmRole(theirs.role).name}, not"
            f" {LlmRole(role).name}"
        )
    both = auth.transcript(said, answer)
    stage("proving the secret")
    connection.send_opening(wire.Proof(auth.proof(key, auth.DIALLER, both)))
    message, _ = await connection.receive_opening()
    if isinstance(message, wire.Refusal):
        raise Refused(message.text, message.code)
    if not isinstance(message, wire.Proof) or not auth.proves(
        message.mac, key, auth.LISTENER, both
    ):
        raise Refused("the peer has not proven that it knows the secret", suspicious=True)
    stage("waiting for the peer to accept the link")
    message, _ = await connection.receive_opening()
    if isinstance(message, wire.Refusal):
        raise Refused(message.text, message.code)
    if not isinstance(message, wire.Welcome):
        raise wire.ProtocolError("the peer neither accepted nor refused")
    link_id = _open(connection, key, both, auth.DIALLER, auth.LISTENER)
    return Introduction(mine, theirs, link_id), message


async def answer(
    connection: Connection, make_hello: MakeHello, key: bytes | None
) -> tuple[Introduction, Callable[[wire.Welcome | wire.Refusal], None]]:
    """The listener's part, up to the point where both are known.

    Returns a function that sends the verdict.  Raises Refused, after telling the peer why,
    ProtocolError, after telling it nothing, or ConnectionLost.
    """
    version = await connection.receive_preamble()
    if version != wire.PROTOCOL:
        connection.send_preamble()
        raise wrong_protocol(version, make_hello().library)
    theirs, said = await connection.receive_opening()
    if not isinstance(theirs, wire.Hello):
        raise wire.ProtocolError("the peer did not begin with a hello")
    mine = make_hello()
    connection.send_preamble()
    problem = objection(mine, theirs)
    if problem is not None:
        connection.send_opening(wire.Refusal(problem.code, str(problem)))
        raise problem
    both = auth.transcript(said, connection.send_opening(mine))
    message, _ = await connection.receive_opening()
    if not isinstance(message, wire.Proof):
        raise wire.ProtocolError("the peer did not prove itself")
    if not auth.proves(message.mac, key, auth.DIALLER, both):
        problem = Refused(
            f"cluster {theirs.cluster_id} does not know the secret of cluster {mine.cluster_id}",
            suspicious=True,
        )
        connection.send_opening(wire.Refusal(problem.code, str(problem)))
        raise problem
    connection.send_opening(wire.Proof(auth.proof(key, auth.LISTENER, both)))

    def verdict(message: wire.Welcome | wire.Refusal) -> None:
        connection.send_opening(message)
        if isinstance(message, wire.Welcome):
            _open(connection, key, both, auth.LISTENER, auth.DIALLER)

    return Introduction(mine, theirs, both[:16]), verdict
